"""Mistakes of a user: one line with the field, its value and the remedy, and exit code 2.

`with reading(file):` turns every error of a missing or damaged file into one line, so the code in it needs no checks.
"""

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

if sys.platform == "win32" or sys.version_info < (3, 11):  # the programs import this file before all others
    python = f"Python {sys.version.split()[0]} on {sys.platform}"
    print(f"error: {python}: should be 3.11 or later, on Linux, macOS or WSL (GUIDE.md, Machines)", file=sys.stderr)
    sys.exit(2)
import fcntl

for name in ("stdin", "stdout", "stderr"):  # one that the shell closed (>&-): no later file may get its number
    setattr(sys, name, getattr(sys, name) or open(os.devnull, "r+"))

LESS_MEMORY = (
    "set --recompute=full, a smaller --micro_batch_size, --zero, --tp or, on a GPU, --offload; "
    "python plan.py lists what fits"
)
WRONG = OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError


class UserError(Exception):
    """A mistake that the user can correct. Its message is one line."""

    agreed = False  # True: every rank raises it, so one rank prints it


def agreed(text):
    """Return a UserError that every rank raises, so that one rank prints it."""
    error = UserError(text)
    error.agreed = True
    return error


# --- files ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(file, *exceptions, wrong=WRONG, damaged=""):
    """Turn an error of the content of `file`, or one of `exceptions`, into a UserError.

    damaged: added, unless the system refused to read the file, which may be intact: no rights, too many open files ...
    """
    try:
        yield
    except UserError:
        raise
    except (*wrong, *exceptions) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]
        intact = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        raise UserError(f"{file}{'' if intact else damaged}: {reason}") from None


def explained(what):
    """Turn an OSError in the block into a UserError about `what`."""
    return reading(what, wrong=(OSError,))


def regular(path):
    """Return `path`. Raises UserError for a pipe or a device: its bytes may never come, or never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path}: should be a file, not a folder, a pipe or a device")
    return path


def whole_number(table, name, least=0, most=10**13):
    """Return table[name], read from a file. Raises ValueError unless it is a whole number from `least` to `most`."""
    value = table[name]
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.40}; should be a whole number, {least:,} to {most:,}")
    return value


def variable(name, least=0):
    """Return the whole number in a launcher's environment variable, or `least` without it. Raises UserError."""
    with reading(f"{name}: should be a whole number"):
        return whole_number({name: int(os.environ.get(name, least))}, name, least)


def fetched(path):
    """Return `path`, a file of a model's folder. Raises UserError if git has only a pointer to it, without its content.

    Also for a link out of the folder: a copy would publish another file. In Hugging Face's cache, the files in
    snapshots/NAME are links into ../../blobs.
    """
    with open(regular(path), "rb") as file:
        if b"version https://git-lfs" in file.read(50):
            raise UserError(f"{path} is a Git LFS pointer, not the file; run git lfs pull")
    folder, target = Path(path).parent.resolve(), Path(path).resolve()
    if not {folder, folder.parent.parent / "blobs"} & {*target.parents}:
        raise UserError(f"{path}: a link to {target}, out of its folder; should be a copy of that file")
    return path


LOCKS = []  # files of `locked`


@contextlib.contextmanager
def locked(path, message):
    """Hold the lock of the file `path` in the block. Raises UserError(message) if another process holds it."""
    with explained(path):
        file = open(path, "w")
    with file:
        try:
            # With flock, a forked worker would keep the lock longer than this process.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(message) from None
        except OSError:
            pass  # the file system has no locks
        LOCKS.append(file)
        yield


def check_locks():
    """Raise UserError if the file of a lock that this process holds is not that of its path any more."""
    for file in (file for file in LOCKS if not file.closed):
        if not (os.path.exists(file.name) and os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))):
            why = "was removed, so another process may write into this folder; nothing more is written"
            raise UserError(f"{file.name}: {why}; choose another folder")


# --- the end of a command ---------------------------------------------------------------------------------------------


def cause(error):
    """Return a UserError for a mistake, an OSError or a lack of memory, otherwise None."""
    if isinstance(error, MemoryError) or re.search("can't allocate memory|out of memory|ALLOC_FAILED", str(error)):
        return UserError(f"not enough memory: {str(error) or 'MemoryError'}; in training, {LESS_MEMORY}")
    if isinstance(error, OSError) and error.strerror:
        return UserError(f"{error.filename or 'the system refused a call'}: {error.strerror}")
    return error if isinstance(error, UserError) else None


def shown(text):
    """Return `text` with escapes for what a terminal would obey: controls, ends of lines, changes of direction."""
    return re.sub(
        r"[\0-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", lambda c: ascii(c[0])[1:-1], text
    )


def report_error(error, shift=0, code=2):
    """Print an error's line on stderr, and write it into torchrun's error file of this process. code: exit code.

    torchrun prints the error file with the smallest time as the "Root Cause". So a rank that only lost a peer reports
    with shift=1 second.
    """
    line = shown(" ".join(f"error: {error}".splitlines()))
    print(line, file=sys.stderr)
    write_error_file(line, shift, code)


def write_error_file(text, shift=0, code=2):
    """Write `text` as torch.distributed.elastic's ErrorHandler does."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": text, "timestamp": str(int(time.time()) + shift)}
        with contextlib.suppress(OSError):
            with open(path + ".new", "w", encoding="utf-8") as file:
                json.dump({"message": {"message": text, "errorCode": code, "extraInfo": extra}}, file)
            os.replace(path + ".new", path)  # torchrun may kill this process now; half a report would end torchrun


def losable(stream):
    """Let a full disk or a closed pipe cost only the text of `stream`: it goes to /dev/null, and no write fails."""
    write = stream.write

    def attempt(text=""):
        try:
            write(text)
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    if "write" not in vars(stream):
        stream.write = attempt
    attempt()


def end_if_repeated():
    """End a process that torchrun starts again after a mistake. It reports the mistake of the start before again."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    with contextlib.suppress(UserError, *WRONG):
        start = variable("TORCHELASTIC_RESTART_COUNT")
        last_path = path.replace(f"attempt_{start}", f"attempt_{start - 1}")
        if last_path != path:  # else set by hand, not by torchrun
            with open(last_path, encoding="utf-8") as file:
                code = json.load(file)["message"]["errorCode"]
            if code == 2:
                os.rename(last_path, path)
                sys.exit(2)


end_if_repeated()  # before the import of torch, which takes seconds


def exit_on_user_error(main):
    """Call `main()`. An error with a `cause` ends the program with its line and exit code 2, Ctrl-C with 130."""
    sys.stdout.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
    losable(sys.stderr)
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` closes the pipe early
        losable(sys.stdout)  # otherwise the flush at exit fails
        sys.exit(141)
    except Exception as error:
        if (user_error := cause(error)) is None:
            raise
        report_error(user_error)
        losable(sys.stdout)
        sys.exit(2)
