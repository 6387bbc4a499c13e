"""Runs tests in a copy of the project, within limits, and says in one line why a test gave no answer.

    with copied({"model.py": text}) as folder:             # the last commit, with another model.py
        results = run_tests(folder, ["test_model.py"])     # [(test, None or the failure's message)]

Exercises, hunts, planted defects, and the tests of check.py and GUIDE.md run so. This is no sandbox: a program of the
copy can do whatever one of this user can do. pytest loads this file there, too: as its plugin it writes a line when a
test begins, and one when it ends.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from errors import UserError, explained, reading, regular

ROOT = Path(__file__).parent.parent
REPORT = Path("report.jsonl").absolute()  # of the copy, if pytest loads this file
BEGUN = "begun"
# A shell's script: run a command, and kill its group when stdin closes. A command with & gets no stdin from sh, so the
# first one reads 3, a copy of it.
ENDS_WITH_PARENT = 'exec 3<&0; { read _ <&3; kill -9 0; } & exec "$@" </dev/null 3<&-'
# A process with a time limit may have 4 GiB of memory, and write files of 4 GiB (in sh's units): it may never end.
LIMITS = f"{{ ulimit -Sd {4 * 2**20}; ulimit -Sf {8 * 2**20}; }} 2>/dev/null; "
ERROR = r"(?m)^E\s+(.*)"  # a line of the message in pytest's text of a failure
LIMIT = 120  # seconds of CPU time that judging an answer may need (--limit)
STOPS = 2  # processes of pytest, which share the limit: the second one runs the tests after one that gave no answer
LONGEST = 10**7  # characters of an output or a report


# --- the plugin, in the copy ------------------------------------------------------------------------------------------


def write(*row):
    with open(REPORT, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def pytest_runtest_logstart(nodeid, location):
    write(nodeid, BEGUN)


def pytest_runtest_logreport(report):
    if report.when == "call" or not report.passed:  # a skipped test has not passed
        write(report.nodeid, None if report.passed else "skipped" if report.skipped else report.longreprtext)


def pytest_collectreport(report):
    if report.failed:
        write("", report.longreprtext)


# --- a copy -----------------------------------------------------------------------------------------------------------


def need_pytest():
    if not importlib.util.find_spec("pytest"):
        raise UserError("this needs pytest: pip install pytest")


def git(*words):
    """Return git's output, as bytes. Raises UserError."""
    with explained("exercises need git"):
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise UserError(f"exercises need a clone, made by git clone; git says: {done.stderr.decode()}")
    return done.stdout


def committed(file):
    """Return a file's committed text."""
    return git("show", f"HEAD:./{file}").decode()


def beginning(path, length=LONGEST):
    """Return the first characters of a file that a student may have replaced. Raises UserError."""
    with reading(path), open(regular(path), encoding="utf-8") as file:
        return file.read(length)


def replaced(text, edits):
    """Return `text` with new texts in place of old ones. Raises ValueError unless each old one is there once."""
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"`{old}` is there {text.count(old)} times, not once")
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def copied(files=(), changes=False):
    """Yield a temporary folder with the files of the last commit, and with these {path: text} instead of theirs.

    changes: with what has changed in tracked files since then, too.
    """
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 and older have none
        archive.extractall(folder)
        names = git("diff", "--name-only", "--relative", "--diff-filter=d", "-z", "HEAD").decode() if changes else ""
        for path in names.split("\0")[:-1]:
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, Path(folder, path))
        for path, text in dict(files).items():
            Path(folder, path).write_text(text, "utf-8")
        yield Path(folder)


# --- a run in the copy ------------------------------------------------------------------------------------------------


def run(folder, words, limit=None, watched=None, **environment):
    """Run Python with `words` in `folder`. Return (its exit code, its output, its errors).

    The code is None after limit / STOPS seconds of CPU time, after ten times as many on the clock, or if for `limit`
    seconds the processes used no CPU time and the file `watched` (default: the output) did not change. All are killed
    then, and also when this process ends: at its end, however it comes, the pipe to their stdin closes.
    """
    environment = os.environ | {"PYTHONPATH": str(folder), **environment}
    script = LIMITS * bool(limit) + ENDS_WITH_PARENT
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        command = ["sh", "-c", script, "sh", sys.executable, *words]
        pipes = dict(stdin=subprocess.PIPE, stdout=output, stderr=errors)
        process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes)
        try:
            code = waited_for(process, watched or output.fileno(), limit)
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()
        output.seek(0)
        errors.seek(0)
        return code, output.read(LONGEST), errors.read(LONGEST)


def waited_for(process, file, limit):
    """Return the exit code, or None."""
    size = before = 0
    begun = since = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1 if limit else None)
        used, now = cpu_seconds(process.pid), time.monotonic()
        if size != (size := os.stat(file).st_size) or used > before + 0.5:
            before, since = used, now
        if used > limit / STOPS or now > min(since + limit, begun + 10 * limit / STOPS):
            return None


def cpu_seconds(group):
    """Return the CPU time of a group of processes and of those that they waited for, or 0 where there is no /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += (int(fields[2]) == group) * sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_tests(folder, tests, *options, limit=None):
    """Run `tests` (arguments of pytest) in a copy of the tree. Return [(test, None or the message of its failure)].

    limit: seconds of CPU time for all. A test that gives no answer, or ends the process, has this as its message, and
    the tests after it run in a new process. The message has no line of the test's source, which may contain a defect's
    words. Raises UserError if an answer has replaced the report.
    """
    need_pytest()
    results, todo, report = {}, [*tests], Path(folder, REPORT.name)
    environment = {"OMP_NUM_THREADS": "1"} | ({"PATIENCE": str(limit / 3)} if limit else {})
    if sys.platform == "linux":  # torch has no threads here, so pytest itself can be forked: one import less
        environment["WORKERS"] = "fork"
    options = ["-q", "-p", "no:cacheprovider", "-p", "testing.judging", "--tb=short", "-m", "", *options]
    for _ in range(STOPS):
        report.write_text("")
        with reading(report):
            code, _, errors = run(folder, ["-m", "pytest", *options, *todo], limit, report, **environment)
            results |= dict(map(json.loads, beginning(report).splitlines()))
        why = f"no answer in {limit:g} s" if code is None else f"the process ended with exit code {code}"
        begun = [test for test, text in results.items() if text == BEGUN]
        results |= dict.fromkeys(begun, why)
        todo = [test for test in todo if not any(contains(test, other) for other in results)]
        if not begun or not todo:
            break
    if begun:
        why = f"not run: {why}"
    elif errors:  # pytest has not begun, as with a wrong line in a file that conftest.py imports
        lines = re.findall(ERROR, errors.replace(f"{folder}/", ""))
        why = "\n".join(lines or [f"{why} {errors.splitlines()[-1]}"])
    why = results.pop("", why)
    return [(test, message(text)) for test, text in [*results.items(), *((test, why) for test in todo)]]


def contains(asked, test):
    """Return whether the argument `asked` of pytest contains the test."""
    return asked in (test, test.partition("[")[0], test.partition("::")[0])


def message(text):
    """Return the message in pytest's text of a failure, or None."""
    return None if text is None else "\n".join(re.findall(ERROR, text)) or text or "failed"
