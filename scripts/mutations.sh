#!/usr/bin/env bash
# Seed plausible bugs one by one and show that the tests of equality catch each (about ten minutes on two cores).
#     scripts/mutations.sh [--full] [NAME ...]      --full: also the whole matrices, for bugs that the covering array misses
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_venv dev
exec "$VENV/bin/python" -m tests.mutations "$@"
