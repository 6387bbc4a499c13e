#!/usr/bin/env bash
# The first ten minutes on one GPU, the most important first: the tests that need a GPU, each
# operation of kernels.py, and a training step of GPT-2 345M beside PyTorch's, eager and compiled.
#
#     bash bench/first_run.sh [FOLDER]
#
# FOLDER (default: $OUT, or out/first_run) receives a log of each command, which grows line by line,
# and summary.txt. A command that fails, or is not finished in its time, does not stop the next one.
# Exit code: 0 all passed, 1 something failed. Nothing is installed or downloaded.
# Without a GPU the same commands run at a tiny size, and the tests are skipped.
set -u
cd "$(dirname "$0")/.." || exit 2
folder=${1:-${OUT:-out/first_run}}
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
failed=0
mkdir -p "$folder" || exit 2

say() { echo "$@" | tee -a "$folder/summary.txt"; }

run() { # run NAME SECONDS ARGUMENT...: python with these arguments
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    timeout -k 10 "$limit" "$python" "$@" </dev/null 2>&1 | tee "$folder/$name.log"
    code=${PIPESTATUS[0]}
    if [ "$code" = 0 ]; then
        say "passed  $((SECONDS - start)) s  $*"
    else
        say "FAILED  $((SECONDS - start)) s  $*  (exit code $code: $(tail -n 1 "$folder/$name.log"))"
        failed=1
    fi
}

say "$(date -u '+%F %T') UTC, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm --format=csv,noheader 2>/dev/null |
    tee -a "$folder/summary.txt"
if "$python" -c "import pytest" 2>/dev/null; then
    mapfile -t files < <(grep -l 'mark\.cuda' test_*.py testing/test_*.py)
    run tests 90 -m pytest -q -W default -p no:cacheprovider -m cuda "${files[@]}"
else
    say "skipped the tests: pytest is not installed"
fi
run kernels 210 -m bench kernels
run train 270 -m bench train configs/gpt2_345m.py --micro_batch_size=32
exit $failed
