#!/usr/bin/env bash
# Check style, types and behaviour.  The first run makes .venv.
#     scripts/test.sh                               everything except the whole matrices: before a commit
#     scripts/test.sh --fast                        style, types and fast unit tests: while working
#     scripts/test.sh --full                        everything, including the whole matrices of tests/slow
#     scripts/test.sh tests/unit/parallel -k coord  other arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_venv dev
cores=$(env -u OMP_NUM_THREADS nproc)        # nproc would return the number of threads
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # tests run several ranks on few cores

# Some tests start a SLURM cluster or render pages in a browser; without these packages they are skipped with a message.
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
pytest=("$VENV/bin/python" -m pytest)
parallel=(-n "$cores" --maxprocesses 8)
# All that tests/conftest.py does not mark as slow; importing the other tests takes each worker 6 s.
fast=(tests/unit tests/test_architecture.py tests/test_words.py)
if (($# == 0)) || [[ $* == --fast || $* == --full ]]; then
    step "pytest: fast unit tests"
    "${pytest[@]}" -m "not slow" "${parallel[@]}" "${fast[@]}"
    if [[ ${1:-} == --fast ]]; then exit; fi
    step "pytest: layouts, several ranks, whole programs"
    "${pytest[@]}" -m slow --on-cpu "${parallel[@]}" --dist loadfile "$@"
else
    step "pytest"
    "${pytest[@]}" "$@"
fi
