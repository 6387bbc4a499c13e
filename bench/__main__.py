"""The command line of the measurements. Each measurement prints tables like those in the README.

    python -m bench                   list the measurements
    python -m bench layouts           a training step of every layout, ours and PyTorch's own
    python -m bench kernels           correctness and speed of every operation, on a GPU
    python -m bench train             a whole step, ours and plain PyTorch's, and a profile, on a GPU
    python -m bench sweep             a training step of every layout that this machine can run, beside predictions

The measurement NAME is the function `measure` of bench/NAME.py. Its keyword arguments are the options, its docstring
is the help. This file imports a measurement only when it is needed. The measurements share machine.py, plain.py and
tables.py. No file outside bench/ imports bench, except its tests.
"""

import importlib
import inspect
import sys

from errors import UserError, exit_on_user_error

NAMES = ["layouts", "kernels", "train", "sweep"]


def measurement(name):
    return importlib.import_module(f"bench.{name}").measure


def print_list():
    for name in NAMES:
        measure = measurement(name)
        options = " ".join(f"--{p.name}={p.default}" for p in inspect.signature(measure).parameters.values())
        print(f"python -m bench {name} {options}\n    {measure.__doc__}")


def parse_options(name, arguments, parameters):
    """Return {option: value} from arguments like --key=value. A value has its default's type. Raises UserError."""
    options = {}
    for argument in arguments:
        key, _, value = argument.removeprefix("--").partition("=")
        if key not in parameters:
            raise UserError(f"{argument}: {name} has the options {', '.join('--' + key for key in parameters)}")
        kind = type(parameters[key].default)
        try:
            options[key] = kind(value)
        except ValueError:
            raise UserError(f"{argument}: should be like --{key}={parameters[key].default}") from None
        if kind is int and options[key] < 1:
            raise UserError(f"{argument}: should be at least 1")
    return options


def main():
    """Run the named measurement with its options. Without a name, print the list. Raises UserError."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in NAMES:
        print_list()
        if name not in ("-h", "--help"):
            raise UserError(f"{name} is no measurement; the measurements are {', '.join(NAMES)}")
        return
    measure = measurement(name)
    measure(**parse_options(name, arguments, inspect.signature(measure).parameters))


if __name__ == "__main__":
    exit_on_user_error(main)
