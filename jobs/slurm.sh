#!/usr/bin/env bash
# Train under Slurm, from the folder of train.py. An option of sbatch replaces its line below:
#
#     sbatch --nodes=2 --gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=24:00:00 \
#         jobs/slurm.sh configs/gpt2_345m.py --tp=2
#
# Without --cpus-per-gpu (or --exclusive), all processes of a node may share one core. --mem=0 gives the node's memory.
# --time must be longer than 600 s and the start of the run; for a short job, add --signal=B:USR1@60.
#
# There is one torchrun on each node. 600 s before the time is over, Slurm sends USR1 to this shell (B:), not to
# torchrun, which would end at once. scancel sends TERM to torchrun and its processes (srun would kill them if it got
# TERM itself). The run saves a checkpoint and stops, and the job is queued again. It is not queued again after
# another end, because torchrun's exit code does not tell a stop from a mistake. With --pp on many nodes, add
# --order=pp-dp-tp if plan.py says that it is faster.
#
# All tasks of a job array get the same words. So a task's number must choose its folder in the configuration file:
#
#     import os
#     out_dir = f"out/task_{os.environ['SLURM_ARRAY_TASK_ID']}"
#
# If a torchrun dies or never starts, srun ends the others after 60 s (--wait), and the job fails; submit it again to
# resume. This cuts off no save: the ranks of all nodes wait until it is complete. After your own scancel or a
# preemption, Slurm kills the run after KillWait (30 s by default). A stopped run ends with tracebacks of torchrun
# (SignalException); they are no errors.
#SBATCH --job-name=nanoparallel
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append

# The lines of your cluster. All nodes get the variables that they set.
# module load cuda
# source .venv/bin/activate

if [ -z "$SLURM_GPUS_ON_NODE" ]; then
    echo "error: the job has no GPUs; add sbatch --gpus-per-node=N" >&2
    exit 2
fi
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # one task of a job array
timed_out=
stop() {
    # USR1 in the first minute: --time is too short. Slurm checks limits every 30 s, so USR1 may come that late.
    if [[ $(squeue --noheader --jobs="$job" --format=%M) =~ ^0:[0-5].$ ]]; then
        echo "error: --time is not, or hardly, longer than the seconds of --signal (600): the job runs to its limit" \
            "and is not queued again; set a longer --time, or sbatch --signal=B:USR1@60" >&2
    else
        echo "600 s (or --signal) before the time limit: the run saves, and the job is queued again" >&2
        timed_out=1
        scancel --signal=TERM "$job"
    fi
}
trap stop USR1
trap : TERM # wait for the step, which needs "$errors" until its end

export errors=$(mktemp -d) # the first node's torchrun copies the report of the first error into it
trap 'rm -rf "$errors"' EXIT
on_first='[ "${SLURM_PROCID:-0}" = 0 ] && export TORCHELASTIC_ERROR_FILE="$errors/report"'
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000)) # two jobs on one node have two ports, below those of outgoing connections
patience=$(torchrun --help 2>/dev/null | grep -q shutdown-timeout && echo --shutdown-timeout=540) # not in torch 2.11

# The variables in single quotes differ between nodes: --gpus=4 may give two nodes 3 and 1 GPUs.
srun --wait=60 --ntasks="$SLURM_NNODES" --ntasks-per-node=1 \
    sh -c "$on_first; "'exec torchrun --nproc-per-node="$SLURM_GPUS_ON_NODE" "$@"' torchrun \
    --nnodes="$SLURM_NNODES" --max-restarts=3 $patience --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$host:$port" train.py "$@" &
step=$!
wait $step
code=$?
while kill -0 $step 2>/dev/null; do # a signal ends `wait` before the step ends
    wait $step
    code=$?
done
sed -n 's/.*"message": "\(error: .*\)", "errorCode".*/\1/p' <<<"$(cat "$errors"/* 2>/dev/null)" >&2 # the last line
if [ "$timed_out" ]; then
    scontrol requeue "$job"
fi
exit $code
