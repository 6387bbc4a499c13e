"""Users' mistakes: one line that names the field, the value and what would be right, and exit code 2.

One of them is a second run in the same folder: `locked` refuses it.
"""

import argparse
import contextlib
import fcntl
import os
import sys


class UserError(Exception):
    """What the person at the keyboard can mend. The message is one line, written for that person."""


class Parser(argparse.ArgumentParser):
    """The standard library's, whose mistakes are one line too."""

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help lists the options)")


def exit_on_user_error(main):
    """Call `main()`; a UserError becomes its one line on stderr and exit code 2, Ctrl-C exit code 130.

    Output that nobody reads any more (`| head`) is no error.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
        sys.exit(141)


@contextlib.contextmanager
def explained(what):
    """In the block, what the system refuses becomes a UserError: `what`, say the file's name, and the reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}") from None


@contextlib.contextmanager
def locked(path, message):
    """Hold the lock of the file `path`, which is made. Raises UserError(message) if another process holds it.

    The system takes the lock back when this process ends, however it ends.
    """
    with explained(path):
        file = open(path, "w")
    with file:
        try:
            # lockf, for its lock belongs to this process alone. Workers that the process forks would share an flock,
            # and one that outlives the process would keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(message) from None
        except OSError:
            pass  # the file system has no locks
        yield
