#!/usr/bin/env bash
# Open a shell in a SLURM allocation, in which srun starts one rank per GPU:
#     bash scripts/slurm/interactive.sh [options of salloc] [command]
#     srun .venv/bin/python pretrain_gpt.py --config configs/modes/3d.yaml
# Without options: one node with 8 GPUs, for an hour.  Ctrl-C during a run saves and ends it; srun forwards the signal.
exec salloc --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --time=1:00:00 "$@"
