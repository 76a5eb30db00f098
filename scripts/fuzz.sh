#!/usr/bin/env bash
# Damage every file format in 20,000 ways and show that each file is refused with a message, or read as what it was
# (TIME).
#     scripts/fuzz.sh [TARGET ...] [--inputs N] [--seed N]
#     scripts/fuzz.sh --defects      show that the fuzzers find defects seeded into the readers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_venv dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m tests.fuzz "$@"
