"""Names the rank that the others wait for, if a run makes no progress.

After `comm_timeout` seconds (on NCCL 60 more) torch ends the ranks that wait, and torchrun names one of them, but
another rank is the culprit. So after 0.8 comm_timeout without progress (an iteration, a part of a validation, a
checkpoint) a thread of each rank writes a row: the communication that its rank waits for, and the place in the program.
The lowest rank with a row prints all rows, and the ranks without one:

    no progress for 16 s:
    rank 0: iteration 8: waits for rank 2 to send (comm.py:101 wait < pipeline.py:326 receive < ...)
    rank 2: iteration 8: waits for ranks [3] in all_reduce 113 of activations over tp (comm.py:101 wait < ...)
    ranks [3]: no answer (stopped, dead, ended, or its host is lost)

Ranks that wait in different numbers of a communication (113 above) have lost their common order. On NCCL, the row has
the latest communication, because `wait` does not block the host (no GPU has tested this).
"""

import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

from parallel.comm import Pending

ROOT = Path(__file__).absolute().parent.parent
PROGRAM = ROOT, ROOT / "parallel", ROOT / "recovery"


class Watchdog:
    """Knows when this rank made progress."""

    def __init__(self):
        self.progress("start")

    def progress(self, what):
        """Note that this rank begins `what`."""
        self.what, self.since = what, time.monotonic()

    def watch(self, mesh, out_dir, seconds):
        """Start the thread. It reports after `seconds` without progress."""
        folder, main, rank = Path(out_dir, "hang"), threading.get_ident(), mesh.rank
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # rows of an earlier run

        def watch():
            """Report a lack of progress once. The ranks share `folder`, because a collective could hang, too."""
            reported = None
            while True:
                time.sleep(seconds / 50)
                since = self.since
                if time.monotonic() - since > seconds and since != reported:
                    folder.mkdir(exist_ok=True)
                    row = folder / str(rank)
                    row.write_text(f"{self.what}: {waits_for(rank)} ({places(main)})")
                    time.sleep(seconds / 8)  # until the others have written
                    # Only the file system's times: its clock may differ from this machine's.
                    earliest = row.stat().st_mtime - seconds
                    new = [path for path in folder.iterdir() if path.stat().st_mtime > earliest]
                    rows = {int(path.name): path.read_text() for path in new}
                    if rank == min(rows):
                        print(hang_table(rows, mesh.world.ranks, seconds), file=sys.stderr, flush=True)
                    reported = since

        threading.Thread(target=watch, daemon=True).start()


def waits_for(rank):
    """Return the communication that this process waits for, or the latest one that it started."""
    if waiting := Pending.waiting:
        return waiting.name.replace(f"rank {rank} waited", "waits")
    return f"waits for no communication; the latest was: {Pending.latest}"


def places(thread):
    """Return the thread's four innermost functions of the project."""
    frames = traceback.extract_stack(sys._current_frames()[thread])
    project_frames = [frame for frame in frames if Path(frame.filename).parent in PROGRAM]
    innermost = reversed(project_frames[-4:])
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in innermost)


def hang_table(rows, ranks, seconds):
    lines = [f"no progress for {seconds:.0f} s:"]
    lines += [f"rank {rank}: {row}" for rank, row in sorted(rows.items())]
    if silent := [rank for rank in ranks if rank not in rows]:
        lines.append(f"ranks {silent}: no answer (stopped, dead, ended, or its host is lost)")
    return "\n".join(lines)
