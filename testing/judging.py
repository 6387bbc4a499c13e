"""Runs tests of a copy of the tree within a limit of time, and says in one line why a test gave no answer.

pytest loads this file there, too: as its plugin it writes a line when a test begins, and one when it ends.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPORT = Path("report.jsonl").absolute()  # of the copy, if pytest loads this file
BEGUN = "begun"
# A shell's script: run a command, and kill its group when stdin closes. sh gives a command with & no stdin of its own.
ENDS_WITH_PARENT = 'exec 3<&0; { read _ <&3; kill -9 0; } & exec "$@" </dev/null 3<&-'
STOPS = 2  # tests without an answer, until the rest is left out


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


def run(folder, words, limit=None, watched=None, **environment):
    """Run Python with `words` in `folder`. Return (its exit code, its output and the last line of stderr).

    The code is None if the file `watched` (default: the output) did not change for `limit` seconds, while the processes
    used either no CPU time or more than limit / 2: a busy machine makes a test slow, not red. All are killed then, and
    also when this process ends: at its end, however it comes, the pipe to their stdin closes.
    """
    environment = os.environ | {"PYTHONPATH": str(folder), **environment}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        command = ["sh", "-c", ENDS_WITH_PARENT, "sh", sys.executable, *words]
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
        return code, output.read() + "".join(errors.read().rstrip().splitlines()[-1:])


def waited_for(process, file, limit):
    """Return the exit code, or None."""
    size, since, begun, before = 0, time.monotonic(), 0.0, 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)
        if size != (size := os.stat(file).st_size):
            since, begun = time.monotonic(), cpu_seconds(process.pid)
            before = begun
        elif limit and time.monotonic() > since + limit:
            used = cpu_seconds(process.pid)
            if used < before + 0.5 or used > begun + limit / 2:
                return None
            since, before = time.monotonic(), used


def cpu_seconds(group):
    """Return the CPU time of a group of processes, or 0 where there is no /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += (int(fields[2]) == group) * (int(fields[11]) + int(fields[12]))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_tests(folder, tests, *options, limit=None):
    """Run `tests` (arguments of pytest) in a copy of the tree. Return [(test, None or the message of its failure)].

    A test that gives no answer in `limit` seconds (`run`), or ends the process, has this as its message, and the tests
    after it run in a new process. The message has no line of the test's source, which may contain a defect's words.
    """
    results, todo, report = {}, [*tests], Path(folder, REPORT.name)
    environment = {"OMP_NUM_THREADS": "1"} | ({"PATIENCE": str(limit / 3)} if limit else {})
    if sys.platform == "linux":  # torch has no threads here, so pytest itself can be forked: one import less
        environment["WORKERS"] = "fork"
    options = [*options, "-q", "-p", "no:cacheprovider", "-p", "testing.judging", "--tb=short", "-m", ""]
    for _ in range(STOPS):
        report.write_text("")
        code, said = run(folder, ["-m", "pytest", *options, *todo], limit, report, **environment)
        for test, text in map(json.loads, report.read_text("utf-8").splitlines()):
            results[test] = text if text in (None, BEGUN) else message(text)
        why = f"no answer in {limit:g} s" if code is None else f"the process ended with exit code {code}"
        begun = [test for test, text in results.items() if text == BEGUN]
        results |= dict.fromkeys(begun, why)
        todo = [test for test in todo if not any(contains(test, other) for other in results)]
        if not begun or not todo:
            break
    why = f"not run: {why}" if begun else " ".join([why, *said.splitlines()[-1:]])
    why = results.pop("", why)
    return [*results.items(), *((test, why) for test in todo)]


def contains(asked, test):
    """Return whether the argument `asked` of pytest contains the test."""
    return asked in (test, test.partition("[")[0], test.partition("::")[0])


def message(text):
    """Return the message in pytest's text of a failure."""
    return "\n".join(re.findall(r"(?m)^E\s+(.*)", text)) or text or "failed"
