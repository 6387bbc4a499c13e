"""Mistakes of a user: one line with the field, its value and the remedy, and exit code 2.

`locked` refuses a second run in a folder. `report` also gives the line to torchrun.
"""

import argparse
import contextlib
import fcntl
import json
import os
import sys
import time

import flags


class UserError(Exception):
    """A mistake that the user can correct. Its message has a line for each mistake."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, with one line for a mistake. A flag's `-` means `_`. Unknown flags get `flags.refusal`."""

    def parse_args(self, words=None):
        words, known = list(sys.argv[1:] if words is None else words), self._option_string_actions
        wrong = []
        for i, word in enumerate(words[: words.index("--") if "--" in words else None]):
            flag, equals, value = word.partition("=")
            if flag.startswith("--"):
                words[i] = f"--{flags.plain(flag)}{equals}{value}"
                wrong += [flag] * (f"--{flags.plain(flag)}" not in known)
        if wrong:
            names = [name for option in known if (name := flags.plain(option))]
            raise UserError(flags.refusal(wrong, names, self.prog))
        return super().parse_args(words)

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help lists the options)")

    def format_help(self):
        return super().format_help() + flags.table_text(self.prog)


def report(error, late=0):
    """Print an error's line on stderr. Under torchrun, also write the line into the error file of this process.

    At its end, torchrun prints the error file with the smallest time as the "Root Cause". late: seconds to add to the
    time. A rank that only lost a peer reports with late=1, so it does not become the root cause.
    """
    print(f"error: {error}", file=sys.stderr, flush=True)
    write_error_file(f"error: {error}", late)


def write_error_file(text, late=0):
    """Write `text` as torch.distributed.elastic's ErrorHandler does: the time is an int, in seconds, as a string."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + late)}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def exit_on_user_error(main):
    """Call `main()`. A UserError is reported and ends the program with exit code 2, Ctrl-C with exit code 130.

    A reader that closes the pipe early (`| head`) is no error.
    """
    try:
        main()
    except UserError as error:
        report(error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the flush at exit fails
        sys.exit(141)


@contextlib.contextmanager
def explained(what):
    """Turn an OSError in the block into a UserError: `what`, for example a file's name, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}") from None


@contextlib.contextmanager
def locked(path, message):
    """Create the file `path` and hold its lock. Raises UserError(message) if another process holds the lock.

    The system releases the lock when this process ends, also when the process is killed.
    """
    with explained(path):
        file = open(path, "w")
    with file:
        try:
            # lockf, because its lock belongs to this process only. With flock, forked workers would share the lock, and
            # a worker that lives longer than this process would keep the lock.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(message) from None
        except OSError:
            pass  # the file system has no locks
        yield
