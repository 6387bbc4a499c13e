#!/usr/bin/env bash
# Trains a part of the grid of layouts (test_layouts.py), and adds its result to testing/grid.txt: commit, part, time.
#
#     bash testing/grid.sh 3                  part 3 of 32: about 400 layouts, 5 to 20 minutes on two cores
#     ADVERSARY=1 bash testing/grid.sh 3      the same, where each result comes late (testing/adversary.py)
#
# A part is a random sample of the grid. Commit first: the line names the last commit.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:?which part? 1 to 32} parts=32 points=$(mktemp)
trap 'rm "$points"' EXIT
git diff --quiet HEAD -- '*.py' || { echo "error: commit the changed files first" >&2 && exit 2; }
commit=$(git rev-parse --short HEAD)
pytest --collect-only -q -m grid test_layouts.py | grep :: | awk "NR % $parts == $part % $parts" > "$points"
pytest -q -m grid -p no:cacheprovider "@$points" | tee /dev/stderr | tail -n 1 |
    sed "s/^/$commit $(date -u +%F) part $part of $parts${ADVERSARY:+, ADVERSARY}: /" | tee -a testing/grid.txt
