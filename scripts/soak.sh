#!/usr/bin/env bash
# Start short runs of many layouts one after another, and count those that do not end with exit code 0.
#     scripts/soak.sh [--load] [COUNT]      COUNT runs (default 1,000), each at a port of its own
#     scripts/soak.sh ... 2> /dev/null      without a line per run
# Every 20th run is started by torchrun, the others by scripts/launch_local.sh, whose ranks share their imports.
# With --load as many busy processes as there are cores run beside them, so that ranks are late at other places.  The output
# of each run that fails, or takes longer than SOAK_TIMEOUT_S (300), is kept in SOAK_FOLDER (runs/soak).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

layouts=(
    "2 parallel.tensor_model_parallel_size=2"
    "2 parallel.zero_stage=0"
    "2 parallel.zero_stage=3 checkpoint.async_save=true"
    "2 parallel.pipeline_model_parallel_size=2 checkpoint.async_save=true"
    "2 parallel.context_parallel_size=2"
    "2 train.exit_interval=1"
    "3 parallel.zero_stage=1 train.global_batch_size=12"
    "4 parallel.tensor_parallel_mode=2d parallel.tensor_parallel_shape=[2,2]"
    "4 parallel.tensor_model_parallel_size=2 parallel.pipeline_model_parallel_size=2 checkpoint.async_save=true"
)

load=false
if [[ ${1:-} == --load ]]; then load=true && shift; fi
count=${1:-1000}
[[ $count =~ ^[0-9]+$ ]] || fail "COUNT=$count: give a whole number, such as 100"
setup_venv dev
folder=${SOAK_FOLDER:-runs/soak}
mkdir -p "$folder"
work=$(mktemp -d)
busy=()
trap 'for each in "${busy[@]}"; do kill "$each"; done; rm -rf "$work"' EXIT
if $load; then
    for ((i = 0; i < $(nproc); i++)); do
        while :; do :; done &
        busy+=($!)
    done
fi
PYTHONPATH=. "$VENV/bin/python" -c "
import sys
from pathlib import Path
from tests.support.tiny_run import write_config
write_config(Path(sys.argv[1]))" "$work"

export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
torchrun=("$VENV/bin/python" -m torch.distributed.run --standalone)
declare -A codes=()
for ((i = 1; i <= count; i++)); do
    layout=${layouts[(i - 1) % ${#layouts[@]}]}
    read -ra words <<<"$layout"
    code=0 wanted=0 launcher=launch_local.sh start=(bash scripts/launch_local.sh "${words[0]}")
    if [[ $layout == *exit_interval* ]]; then wanted=3; fi
    if ((i % 20 == 0)); then # torchrun takes a stop on request, code 3, for a crash
        wanted=0 launcher=torchrun start=("${torchrun[@]}" --nproc-per-node "${words[0]}" pretrain_gpt.py)
    fi
    timeout -k 10 "${SOAK_TIMEOUT_S:-300}" "${start[@]}" --config "$work/tiny.yaml" \
        train.train_iters=3 checkpoint.save_interval=2 "checkpoint.save=$work/run" checkpoint.load=null "${words[@]:1}" \
        >"$work/output" 2>&1 || code=$?
    if ((code != wanted)); then
        mv "$work/output" "$folder/$(printf '%04d' "$i")-code$code.log"
        echo "$launcher $layout" >>"$folder/$(printf '%04d' "$i")-code$code.log"
    fi
    if ((code == wanted)); then code=0; fi
    codes[$code]=$((${codes[$code]:-0} + 1))
    rm -rf "$work/run"
    echo "$i/$count: code $code, $launcher $layout" >&2
done
for code in "${!codes[@]}"; do echo "exit code $code: ${codes[$code]} runs"; done
((${codes[0]:-0} == count)) || {
    echo "outputs of the others: $folder"
    exit 1
}
