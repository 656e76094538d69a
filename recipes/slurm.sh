#!/bin/bash
# Trains on two machines with four GPUs each. If the job is preempted or its time runs out, it
# returns to the queue.
#
#     sbatch recipes/slurm.sh [--config file.yaml] [section.key=value ...]
#
# Submit it from the folder that contains main.py and .venv. Every machine must see that folder at
# the same path.
# --mem is the RAM of a machine. Loading takes up to one copy of the model per rank.
#SBATCH --job-name=onefile-grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=128G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
set -u
cd "$SLURM_SUBMIT_DIR"
export PATH="$PWD/.venv/bin:$PATH"
# Without this, a machine that has failed couldn't rejoin on its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"  # srun reads only this variable
port=$((10000 + SLURM_JOB_ID % 20000))  # one per job, because two jobs may share a machine
first_machine=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Slurm sends SIGTERM when it preempts the job, and 60 seconds before the job's time runs out. Then
# this function ends the trainer and requeues the job. When the job starts again, the trainer
# resumes from its newest checkpoint.
requeue() {
    scancel --signal=TERM "$SLURM_JOB_ID"  # to torchrun; srun would kill it
    wait "$trainer"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap requeue TERM

srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first_machine:$port" \
    main.py model.device=cuda "$@" &
trainer=$!
wait "$trainer"
