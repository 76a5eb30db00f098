#!/usr/bin/env bash
# Train on this machine with one process per GPU, one process if there is no GPU, or the number in the first argument.
#     bash scripts/launch_local.sh [N] --config configs/modes/3d.yaml [section.key=value ...]
# The ranks are forked from one process that has imported torch, and read the configuration, once.
# Ctrl-C, or SIGTERM or SIGUSR1 to this process, saves and ends the run; Ctrl-C again, a second later, interrupts it.
# It exits with the code of the run: 0 done, 2 user error, 3 stopped on request after saving.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-$root/.venv/bin/python}" -m megatron3d.runtime.local_ranks "$root/pretrain_gpt.py" "$@"
