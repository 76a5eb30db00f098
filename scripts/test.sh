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
pytest=("$VENV/bin/python" -m pytest)
# All that tests/conftest.py does not mark as slow; importing the other tests takes each worker 6 s.
fast=(tests/unit tests/test_architecture.py tests/test_words.py)

# Run the given tests while mypy, which computes on one core, checks the types; fail where either does.
test_while_mypy_checks() {
    local found status=0 mypy
    found=$(mktemp)
    "$VENV/bin/mypy" >"$found" 2>&1 &
    mypy=$!
    "${pytest[@]}" "$@" || status=$?
    step "mypy: types"
    wait "$mypy" || status=$?
    cat "$found"
    rm "$found"
    return "$status"
}

if (($# == 0)) || [[ $* == --fast || $* == --full ]]; then
    step "pytest: fast unit tests, while mypy checks types"
    test_while_mypy_checks -m "not slow" -n "$cores" --maxprocesses 8 "${fast[@]}"
    if [[ ${1:-} == --fast ]]; then exit; fi
    step "pytest: layouts, several ranks, whole programs"
    # One worker more than cores: tests of SLURM and of the watchdog wait for minutes.
    "${pytest[@]}" -m slow --on-cpu -n "$((cores + 1))" --maxprocesses 8 --dist loadfile "$@"
else
    step "pytest, while mypy checks types"
    test_while_mypy_checks "$@"
fi
