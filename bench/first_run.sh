#!/usr/bin/env bash
# The first minutes on a GPU, in numbered parts. Each part ends in less than ten minutes.
#
#     bash bench/first_run.sh PART [FOLDER]               PART: a number from 1 to 14, or the word all: 1 to 8
#     bash bench/first_run.sh --dry_run PART [FOLDER]     the same commands at a tiny size, without a GPU
#     bash bench/first_run.sh --list PART                 prints the commands
#
#     1  the product that adds to a float32 gradient, and the kernels that matter most: error and time
#     2  real steps of configs/gpt2_345m.py, as it is and for speed; test_log.py and test_data.py
#     3  the other kernels
#     4  345M beside plain PyTorch, micro-batches of 32, and the profile of a step
#     5  the same with micro-batches of 64
#     6  124M
#     7  345M beside plain PyTorch, which must use cuDNN's attention
#     8  345M with eight micro-batches in an update, beside plain PyTorch
#     9, 10, 11   2, 4, 8 GPUs: three steps in fp32 of each schedule, ZeRO 0 to 3, tp and cp; losses as on one GPU?
#     12, 13, 14  2, 4, 8 GPUs: 345M in bf16 with the waits of each communication; CUDA_DEVICE_MAX_CONNECTIONS unset, 1
#
# FOLDER (default: $OUT, or out/first_run) receives partN.log with all output, summary.txt with a line for each command,
# and NAME.jsonl, the metrics of a run of part 2. The first two grow during the run. A failure does not stop the next
# command. Exit code: 0 all passed, 1 something failed, 2 no GPU or a wrong argument. Nothing is installed or downloaded.
# A command that is not finished after its share of time is ended; it counts as failed.
set -u
cd "$(dirname "$0")/.." || exit 2

mode=run
case "${1:-}" in --dry_run | --list) mode=${1#--} && shift ;; esac
case "${1:-}" in
[1-9] | 1[0-4]) parts=$1 ;;
all) parts="1 2 3 4 5 6 7 8" ;;
*) echo "error: first_run.sh: the argument should be a number from 1 to 14, or all" >&2 && exit 2 ;;
esac
folder=${2:-${OUT:-out/first_run}}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT # tokens and checkpoints
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
unset CUDA_DEVICE_MAX_CONNECTIONS
LIMIT=570 # seconds of a part
COUNTS=([9]=2 [10]=4 [11]=8 [12]=2 [13]=4 [14]=8) # GPUs of the parts with several
failed=0

if [ $mode = dry_run ]; then
    export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 LIMIT=1800
elif [ $mode = run ] && ! $python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
    echo "error: first_run.sh: PyTorch finds no GPU here; --dry_run runs the same commands at a tiny size" >&2
    exit 2
fi
[ $mode = list ] || mkdir -p "$folder" || exit 2

say() { echo "$@" | tee -a "$folder/summary.txt"; }

run() { # run SECONDS COMMAND...: at most so many seconds
    local limit=$1 left=$((LIMIT - SECONDS)) start=$SECONDS code
    shift
    if [ $mode = list ]; then printf '%q ' "$@" && echo && return; fi
    printf '\n$ %s\n' "$*" >>"$log"
    timeout -k 10 $((left < limit ? (left > 0 ? left : 1) : limit)) "$@" </dev/null 2>&1 | tee -a "$log"
    code=${PIPESTATUS[0]}
    case $code in
    0) say "passed  part $part $((SECONDS - start)) s  $*" ;;
    *) say "FAILED  part $part $((SECONDS - start)) s  $*  (exit code $code: $(tail -n 1 "$log"))" && failed=1 ;;
    esac
}

kernel() { run 150 $python -m bench kernels --only="$1" --repeats=10; }

spread() { # spread SECONDS NAME CONFIG [OPTION...]: train on $gpus GPUs
    run "$1" $python -m torch.distributed.run --nproc_per_node=$gpus train.py "$3" --data_dir="$work/data" \
        --out_dir="$work/$2" --eval_iters=0 --log_interval=1 "${@:4}"
}

three() { # three NAME [OPTION...]: three steps in fp32, compared with those of one GPU
    spread 90 "$1" configs/short_run.py --dtype=fp32 --ledger=False --num_layers=$((2 * all)) --num_attention_heads=8 \
        --micro_batch_size=1 "${@:2}"
    [ "$1" = one ] || run 60 $python -m bench same --one="$work/one" --other="$work/$1"
}

waits() { # waits NAME [OPTION...]: bytes and waits in bf16, twice
    local tiny=() name
    [ $mode = dry_run ] && tiny=(--num_layers=$((2 * all)) --hidden_size=64 --num_attention_heads=8 --seq_length=64
        --max_position_embeddings=64 --micro_batch_size=2 --global_batch_size=16 --train_iters=3 --vocab_size=512)
    for name in "$1" "$1_one_connection"; do
        [ "$name" = "$1" ] || local -x CUDA_DEVICE_MAX_CONNECTIONS=1
        spread 120 "$name" configs/gpt2_345m.py --dtype=bf16 --recompute=none --dropout=0.0 --global_batch_size=64 \
            --micro_batch_size=2 --train_iters=12 --ledger "${@:2}" "${tiny[@]}"
    done
}

train() { # train NAME [OPTION...]: a few real steps of configs/gpt2_345m.py
    local tiny=()
    [ $mode = dry_run ] && tiny=(--num_layers=1 --hidden_size=64 --num_attention_heads=2 --seq_length=64
        --max_position_embeddings=64 --micro_batch_size=1 --global_batch_size=2 --train_iters=4 --log_interval=2)
    run 200 $python train.py configs/gpt2_345m.py --data_dir="$work/data" --out_dir="$work/$1" --train_iters=40 \
        --log_interval=10 --eval_iters=0 "${@:2}" "${tiny[@]}"
    [ $mode = list ] || cp "$work/$1/metrics.jsonl" "$folder/$1.jsonl"
}

step() { # step NAME MICRO_BATCH_SIZE [OPTION...]
    local tiny=()
    [ $mode = dry_run ] && tiny=(--steps=1 --repeats=1)
    run $LIMIT $python -m bench train --config="$1" --micro_batch_size="$2" "${@:3}" "${tiny[@]}"
}

for part in $parts; do
    SECONDS=0 log=$folder/part$part.log
    if [ $mode != list ]; then
        say "part $part, $(date -u '+%F %T') UTC, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $mode"
        nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,power.draw --format=csv,noheader 2>/dev/null |
            tee -a "$folder/summary.txt"
        $python -c "import sys, torch, triton; from torch.backends import cudnn; print('Python', sys.version.split()[0],
            'torch', torch.__version__, 'triton', triton.__version__, 'cuDNN', cudnn.version())" |
            tee -a "$folder/summary.txt"
    fi
    all=${COUNTS[part]:-1} gpus=$all
    if [ $mode = run ] && ! $python -c "import sys, torch; sys.exit(torch.cuda.device_count() < $all)"; then
        say "skipped part $part: needs $all GPUs"
        continue
    fi
    case $part in
    1)
        for name in "dW of proj" "dW of fc1" cross_entropy_ add_layer_norm attention; do kernel "$name"; done
        ;;
    2)
        run 120 $python prepare.py --tokenizer=bytes --out="$work/data" # needs no vocabulary from the network
        train gpt2_345m
        train gpt2_345m_fast --dropout=0.0 --recompute=none --micro_batch_size=32
        run 60 $python -m pytest -q test_log.py test_data.py
        ;;
    3)
        for name in "linear + cross_entropy_" "add_layer_norm, nothing added" "add_layer_norm, dropout" add dropout gelu \
            relu adamw join add_rows_ add_rms_norm swiglu rotate; do kernel "$name"; done
        ;;
    4) step gpt2_345m 32 ;;
    5) step gpt2_345m 64 ;;
    6) step gpt2_124m 32 ;;
    7) step gpt2_345m 32 --attention=cudnn --only=plain ;;
    8) step gpt2_345m 32 --micro_batches=8 --only=plain --steps=2 ;;
    9 | 10 | 11)
        run 120 $python prepare.py --tokenizer=bytes --out="$work/data"
        gpus=1 three one
        for zero in 0 1 2 3; do three zero$zero --zero=$zero; done
        for schedule in 1f1b gpipe chimera zb-h1 zb-h2; do three $schedule --pp=$all --schedule=$schedule; done
        for schedule in interleaved zb-v; do three $schedule --pp=$all --schedule=$schedule --chunks=2; done
        three tp --tp=$all --sequence_parallel
        three cp --cp=$all
        [ $all = 2 ] || three three_axes --tp=2 --pp=2 --zero=3 --sequence_parallel
        ;;
    12 | 13 | 14)
        run 120 $python prepare.py --tokenizer=bytes --out="$work/data"
        for zero in 1 3; do waits zero$zero --zero=$zero; done
        for schedule in 1f1b zb-h1; do waits $schedule --pp=$all --schedule=$schedule; done
        waits tp --tp=$all --sequence_parallel
        ;;
    esac
done
[ $failed = 0 ] || { [ $mode = list ] || echo "something failed: see $folder/summary.txt" >&2; }
exit $failed
