#!/usr/bin/env bash
# A shell in an allocation of SLURM's, in which srun starts one rank per GPU:
#     bash scripts/slurm/interactive.sh [salloc's options] [command]
#     srun .venv/bin/python pretrain_gpt.py --config configs/modes/3d.yaml
# Without options: one node with 8 GPUs, for an hour.  Ctrl-C in a run saves and ends it; srun passes it on.
exec salloc --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --time=1:00:00 "$@"
