"""Mistakes of a user: one line with the field, its value and the remedy, and exit code 2.

`locked` refuses a second run in a folder. `report` also gives the line to torchrun. `Stream` keeps a run alive if its
text cannot be printed.
"""

import argparse
import contextlib
import errno
import fcntl
import io
import json
import os
import re
import stat
import sys
import time
from pathlib import Path

import flags


class UserError(Exception):
    """A mistake that the user can correct. Its message has a line for each mistake."""


def parse_json(text):
    """Return the value of a JSON text, str or bytes. Raises ValueError, also for too many nested brackets."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too many nested brackets") from None


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

    def parse_known_args(self, words=None, namespace=None):
        words = list(sys.argv[1:] if words is None else words)
        for word in words[: words.index("--") if "--" in words else None]:
            if word.startswith("--") and word.endswith("=--"):  # argparse would take it for no value
                raise UserError(f"{word}: should be a value")
        return super().parse_known_args(words, namespace)

    def error(self, message):
        raise UserError(f"{message} ({self.prog} --help lists the options)")

    def format_help(self):
        return super().format_help() + flags.table_text(self.prog)


def report(error, late=0):
    """Print an error's line on stderr. Under torchrun, also write the line into the error file of this process.

    At its end, torchrun prints the error file with the smallest time as the "Root Cause". late: seconds to add to the
    time. A rank that only lost a peer reports with late=1, so it does not become the root cause.
    """
    text = "\nerror: ".join(map(one_line, str(error).split("\nerror: ")))
    print(f"error: {text}", file=sys.stderr, flush=True)
    write_error_file(f"error: {text}", late)


def one_line(text):
    """Return `text` with its control characters escaped. A text over 1,000 characters loses its middle."""
    text = text if len(text) <= 1000 else f"{text[:500]} ... {text[-400:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def write_error_file(text, late=0):
    """Write `text` as torch.distributed.elastic's ErrorHandler does: the time is an int, in seconds, as a string."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + late)}
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def cause(error):
    """Return a UserError for an exception with a cause outside the program, otherwise None.

    Such a cause is a system call that failed (OSError), or a lack of memory in Python or PyTorch.
    """
    if isinstance(error, MemoryError) or re.search("can't allocate memory|out of memory", str(error)):
        return UserError(f"not enough memory: {str(error).splitlines()[0] if str(error) else 'Python needs more'}")
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{error.filename or 'the system refused a call'}: {error.strerror}")
    return None


class Stream(io.RawIOBase):
    """stdout or stderr without errors: after the first error, for example of a full disk, the text is dropped.

    So a run finishes its work although its text cannot be printed. Only a reader that closes the pipe of stdout early
    (`| head`) stops the program.
    """

    def __init__(self, number, error=None):
        self.number, self.error = number, error

    def fileno(self):
        return self.number

    def isatty(self):
        return os.isatty(self.number)

    def writable(self):
        return True

    def write(self, data):
        if self.error is None:
            try:
                return os.write(self.number, data)
            except OSError as error:
                if isinstance(error, BrokenPipeError) and self.number == 1:
                    raise
                self.error = error
        return len(data)


def open_streams():
    """Replace stdout and stderr by `Stream`s. A character that their encoding lacks is written as an escape (\\xe9).

    A closed stdin, stdout or stderr becomes /dev/null. Otherwise the next file that the program opens would get its
    number, and text for stdout would be written into this file.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for number, name in ((1, "stdout"), (2, "stderr")):
        old = getattr(sys, name)
        if old is not getattr(sys, f"__{name}__"):
            continue  # a test has replaced it
        closed = None if old else OSError(errno.EBADF, "it is closed")
        encoding, lines = (old.encoding, old.line_buffering) if old else ("utf-8", True)
        raw = io.BufferedWriter(Stream(number, closed))
        stream = io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=lines)
        setattr(sys, name, stream)


def lost_text():
    """Flush stdout. Return the error that stopped its text, or None."""
    sys.stdout.flush()
    return getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "error", None)


def exit_on_user_error(main):
    """Call `main()`. A UserError, or an error with a `cause`, is reported and ends the program with exit code 2.

    Ctrl-C ends it with exit code 130. If the work is done but stdout refused its text, the exit code is 1. A reader
    that closes the pipe early (`| head`) is no error.
    """
    open_streams()
    code = 0
    try:
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        if not code and (error := lost_text()):
            report(f"stdout: {error.strerror}; the work is done, but its text is lost")
            code = 1
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the flush at exit fails
        code = 141
    except Exception as error:
        explained = error if isinstance(error, UserError) else cause(error)
        if explained is None:
            raise
        report(explained)
        code = 2
    if code:
        sys.exit(code)


def regular(path):
    """Return Path(path). Raises OSError for a FIFO or a device: a read of it may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return Path(path)


def writable(path):
    """Return Path(path). Raises OSError for a FIFO: a write to it may wait for ever for a reader."""
    if os.path.exists(path) and stat.S_ISFIFO(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "is a FIFO", str(path))
    return Path(path)


@contextlib.contextmanager
def reading(file, *more):
    """Turn what can go wrong with a user's file in the block, or one of the exceptions `more`, into a UserError."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, EOFError, *more) as error:
        said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: {said}") from None


@contextlib.contextmanager
def explained(what):
    """Turn an OSError in the block into a UserError: `what`, for example a file's name, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror or error}") from None


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
