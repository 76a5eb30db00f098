#!/usr/bin/env bash
# Everything that must hold before a change is kept: style, types, tests.  Makes .venv on the first run.
# Arguments go to pytest: scripts/test.sh tests/unit/parallel/test_mesh.py -k coord
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_venv dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests run several ranks on few cores

# Tests submit jobs to a SLURM of their own, and look at pages in a browser; where these are not, they say so and are skipped.
packages=()
[[ -x /usr/sbin/slurmctld ]] || packages+=(slurm-wlm munge)
command -v chromium >/dev/null || packages+=(chromium)
if ((${#packages[@]})) && [[ $EUID == 0 ]] && command -v apt-get >/dev/null; then
    step "${packages[*]}"
    (apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}") >/dev/null ||
        echo "cannot be installed here"
fi

step "ruff: style"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
step "mypy: types"
"$VENV/bin/mypy"
step "pytest: behaviour"
"$VENV/bin/python" -m pytest "$@"
