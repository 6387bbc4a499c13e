"""Tells users of `python bench.py NAME` the new command, `python -m bench NAME`. `import bench` imports the folder
bench/, not this file.
"""

import shlex
import sys

print("error: python bench.py is now:", shlex.join(["python", "-m", "bench", *sys.argv[1:]]), file=sys.stderr)
sys.exit(2)
