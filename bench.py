"""`python bench.py NAME` is now `python -m bench NAME`; this file only says so. `import bench` finds the folder."""

import shlex
import sys

print("error: python bench.py is now:", shlex.join(["python", "-m", "bench", *sys.argv[1:]]), file=sys.stderr)
sys.exit(2)
