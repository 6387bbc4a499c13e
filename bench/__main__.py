"""The command line of the measurements.

    python -m bench layouts [TEXT]      a training step of every layout whose name contains TEXT, ours and PyTorch's own
    python -m bench kernels [TEXT]      correctness and speed of every operation whose name contains TEXT, on a GPU
    python -m bench train [CONFIG.py] [--field=value ...]      a training step, ours and plain PyTorch's, on a GPU

The measurement NAME is `measure` of bench/NAME.py.
"""

import importlib
import sys

from errors import UserError, exit_on_user_error

NAMES = ["layouts", "kernels", "train"]


def main():
    """Run the named measurement. Without a name, print the list."""
    name, *words = sys.argv[1:] or ["--help"]
    if {"-h", "--help"} & {name, *words}:
        return print(__doc__)
    if name not in NAMES:
        raise UserError(f"{name} is no measurement; the measurements are {', '.join(NAMES)}")
    importlib.import_module(f"bench.{name}").measure(*words)


if __name__ == "__main__":
    exit_on_user_error(main)
