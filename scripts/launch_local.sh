#!/usr/bin/env bash
# Train on this machine with one process per GPU, one process if there is no GPU, or the number in the first argument.
#     bash scripts/launch_local.sh [N] --config configs/modes/3d.yaml [section.key=value ...]
# Ctrl-C, or SIGTERM or SIGUSR1 to this process, saves and ends the run; Ctrl-C again, a second later, interrupts it.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}

if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    processes=$1
    shift
else
    processes=$("$python" -c 'import torch; print(torch.accelerator.device_count() or 1)')
fi
if ((processes < 2)); then exec "$python" "$root/pretrain_gpt.py" "$@"; fi

# torchrun would give each process one thread, forward fewer signals, and kill after 30 s processes that are still saving.
cores=$(PYTHONPATH=$root "$python" -c 'from megatron3d.runtime.process import num_cores; print(num_cores())')
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > processes ? cores / processes : 1))}
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGQUIT,SIGUSR1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1800
exec "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" "$root/pretrain_gpt.py" "$@"
