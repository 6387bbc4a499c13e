"""The command line of the measurements: each prints a table as the README has it.

    python -m bench                   lists them
    python -m bench prepare --mb=200  throughput and memory of prepare.py
    python -m bench layouts           a step of every layout beside PyTorch's own
    python -m bench kernels           every operation on its own, right and how fast, on a GPU
    python -m bench train             a whole step beside plain PyTorch, and its profile, on a GPU

The measurement NAME is the function `measure` of bench/NAME.py. Its keyword arguments are the options; its docstring
is the help. Imports run downward: this file imports a measurement when it is asked for, the measurements import
`machine`, `plain` and `tables`, and nothing outside bench/ imports bench.
"""

import importlib
import inspect
import sys

from errors import UserError, exit_on_user_error

NAMES = ["prepare", "layouts", "kernels", "train"]


def measurement(name):
    return importlib.import_module(f"bench.{name}").measure


def print_list():
    for name in NAMES:
        measure = measurement(name)
        options = " ".join(f"--{p.name}={p.default}" for p in inspect.signature(measure).parameters.values())
        print(f"python -m bench {name} {options}\n    {measure.__doc__}")


def parse_options(name, arguments, parameters):
    """{option: value} from arguments like --key=value; a value has the type of the default. Raises UserError."""
    options = {}
    for argument in arguments:
        key, _, value = argument.removeprefix("--").partition("=")
        if key not in parameters:
            raise UserError(f"{argument}: {name} has the options {', '.join('--' + key for key in parameters)}")
        try:
            options[key] = type(parameters[key].default)(value)
        except ValueError:
            raise UserError(f"{argument}: should be like --{key}={parameters[key].default}") from None
    return options


def main():
    """Run a measurement with its options; without one, print the list. Raises UserError."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in NAMES:
        print_list()
        if name not in ("-h", "--help"):
            raise UserError(f"no measurement {name}; there are: {', '.join(NAMES)}")
        return
    measure = measurement(name)
    measure(**parse_options(name, arguments, inspect.signature(measure).parameters))


if __name__ == "__main__":
    exit_on_user_error(main)
