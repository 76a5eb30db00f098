#!/usr/bin/env bash
# Open a shell in a SLURM allocation, in which srun starts one rank per GPU:
#     bash scripts/slurm/interactive.sh [options of salloc] [command]
#     srun .venv/bin/python pretrain_gpt.py --config configs/modes/3d.yaml
# Without options: one node with 8 GPUs and 8 CPUs for each, for an hour.  Ctrl-C during a run saves and ends it; srun
# forwards the signal.  Set SRUN_CPUS_PER_TASK for another number of CPUs: srun does not inherit it from salloc.
export SRUN_CPUS_PER_TASK=${SRUN_CPUS_PER_TASK:-8} SLURM_CPU_BIND=${SLURM_CPU_BIND:-none}
exec salloc --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task="$SRUN_CPUS_PER_TASK" --time=1:00:00 "$@"
