"""The command line of the measurements.

    python -m bench                   list the measurements
    python -m bench layouts           a training step of every layout, ours and PyTorch's own
    python -m bench kernels           correctness and speed of every operation, on a GPU
    python -m bench train             a training step, ours and plain PyTorch's, on a GPU

The measurement NAME is `measure` of bench/NAME.py. Its keyword arguments are the options, its docstring is the help:
`python -m bench NAME --help`.
"""

import argparse
import importlib
import inspect
import sys

from errors import UserError, exit_on_user_error
from options import Parser, within

NAMES = ["layouts", "kernels", "train"]


def measurement(name):
    """Return (the measurement's function, the parser of its options)."""
    measure = importlib.import_module(f"bench.{name}").measure
    formatter = argparse.RawDescriptionHelpFormatter
    about = dict(description=measure.__doc__, formatter_class=formatter)
    parser = Parser(f"python -m bench {name}", **about, allow_abbrev=False)
    for option in inspect.signature(measure).parameters.values():
        kind = type(option.default)
        parser.add_argument(f"--{option.name}", type=within(1, 10**6) if kind is int else kind, default=option.default)
    return measure, parser


def main():
    """Run the named measurement. Without a name, print the list."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        return print(__doc__)
    if name not in NAMES:
        raise UserError(f"{name} is no measurement; the measurements are {', '.join(NAMES)}")
    measure, parser = measurement(name)
    measure(**vars(parser.parse_args(words)))


if __name__ == "__main__":
    exit_on_user_error(main)
