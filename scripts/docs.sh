#!/usr/bin/env bash
# Build this documentation and the API reference into site/; open site/index.html.  Arguments are passed to mkdocs build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/common.sh

setup_venv docs
NO_MKDOCS_2_WARNING=1 "$VENV/bin/mkdocs" build --strict "$@"
echo "site/index.html"
