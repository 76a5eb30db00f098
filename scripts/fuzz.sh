#!/usr/bin/env bash
# Damage files of every format in 20,000 ways, and show that each is refused with a message or read as what it was.
# One process, for hours: most inputs take milliseconds, those of configurations, clusters and reports a tenth of a second.
#     scripts/fuzz.sh [TARGET ...] [--inputs N] [--seed N]
#     scripts/fuzz.sh --defects      show that the fuzzers find defects seeded into the readers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_venv dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$VENV/bin/python" -m tests.fuzz "$@"
