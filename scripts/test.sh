#!/usr/bin/env bash
# Everything that must hold before a change is kept: style, types, tests.  Makes .venv on the first run.
# Arguments go to pytest: scripts/test.sh tests/test_mesh.py -k coord
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_venv dev
command -v chromium >/dev/null || [[ $EUID -ne 0 ]] || timeout 300 apt-get install -y -qq chromium >/dev/null 2>&1 || true # looks at pages
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests run several ranks on few cores

# tests/test_slurm.py submits jobs to a SLURM of its own; where there is none, it says so and is skipped.
if [[ $EUID == 0 && ! -x /usr/sbin/slurmctld ]] && command -v apt-get >/dev/null; then
    step "SLURM and munge"
    (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge) >/dev/null ||
        echo "they cannot be installed here"
fi

step "ruff: style"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
step "mypy: types"
"$VENV/bin/mypy"
step "pytest: behaviour"
"$VENV/bin/python" -m pytest "$@"
