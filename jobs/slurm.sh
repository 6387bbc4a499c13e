#!/usr/bin/env bash
# Train under Slurm, from the folder of train.py. An option of sbatch replaces the line below:
#
#     sbatch --nodes=2 --gpus-per-node=8 --time=24:00:00 jobs/slurm.sh configs/gpt2_345m.py --tp=2
#
# There is one torchrun on each node. 600 s before the time is over, Slurm sends USR1 to this shell (B:), not to
# torchrun, which would end at once. scancel sends TERM to torchrun and its processes (srun would kill them if it got
# TERM itself). The run saves a checkpoint and stops, and the job is queued again. It is not queued again after
# another end, because torchrun's exit code does not tell a stop from a mistake. With --pp on many nodes, add
# --order=pp-dp-tp if plan.py says that it is faster.
#SBATCH --job-name=nanoparallel
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # without it, --max-restarts fails (pytorch issue 135712)
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 50000)) # two jobs on one node have two ports
timed_out=
patience=$(torchrun --help | grep -q shutdown-timeout && echo --shutdown-timeout=540) # torch 2.11 lacks it

srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=3 $patience \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$host:$port" train.py "$@" &
step=$!
trap 'timed_out=1; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
wait $step
code=$?
while kill -0 $step 2>/dev/null; do # a signal ends `wait` before the step ends
    wait $step
    code=$?
done
if [ "$timed_out" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
