# Functions for the other scripts, sourced in the repository's root: `setup_venv [EXTRA]` makes .venv and installs into it.
# A complete installation is not checked again until setup.py changes; an interrupted one is resumed.

VENV=.venv

step() { printf '\n== %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

setup_venv() {
    local extra=${1:-} stamp=$VENV/.installed-${1:-base} key
    key=$(cksum setup.py)
    for done in "$stamp" "$VENV/.installed-dev"; do
        if [[ -f $done && $(<"$done") == "$key" ]]; then return; fi
    done
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then make_venv; fi
    if ! has_gpu; then install_cpu_torch; fi
    step "Installing megatron3d${extra:+[$extra]} and what it needs into $VENV"
    "$VENV/bin/python" -m pip install -e ".${extra:+[$extra]}" || fail "the installation did not finish: see pip's message above"
    printf '%s\n' "$key" >"$stamp"
}

make_venv() {
    local python
    for python in python3 python3.13 python3.12 python3.11 python3.10; do
        if "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            step "Making $VENV with $("$python" --version)"
            "$python" -m venv --clear "$VENV" || fail "$python cannot make virtual environments; install its venv module (Debian and Ubuntu: apt install python3-venv)"
            return
        fi
    done
    fail "no Python 3.10 to 3.13 on the PATH; install one and run this again"
}

has_gpu() { [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L >/dev/null 2>&1; }

# Without a GPU the CUDA build of torch would waste gigabytes: install the newest CPU build of pip's own sources or of
# PyTorch's, or else, where the newest release comes as a CUDA build only, an older one of pip's own sources.
install_cpu_torch() {
    local torch wanted build pip=("$VENV/bin/python" -m pip install)
    local pytorch=(--index-url=https://download.pytorch.org/whl/cpu --timeout=15 --retries=1)
    torch=$(grep -o 'torch>=[^"]*' setup.py)
    wanted=$torch
    step "Looking for a CPU build of $torch"
    build=$(newest_build "$torch")
    if [[ $build != cpu && $(newest_build "${pytorch[@]}" "$torch") == cpu ]]; then
        build=cpu
        pip+=("${pytorch[@]}")
    fi
    while [[ $build == "cuda "* ]]; do
        wanted+=",!=${build#cuda }"
        build=$(newest_build "$wanted")
    done
    if [[ $build == cpu ]]; then
        "${pip[@]}" "$wanted" || fail "torch was not installed: see pip's message above"
    elif [[ ${MEGATRON3D_ALLOW_CUDA_BUILD:-} != 1 ]]; then
        fail "found no CPU build of $torch, neither in pip's own sources nor at https://download.pytorch.org/whl/cpu.
Put one into $VENV yourself, or set MEGATRON3D_ALLOW_CUDA_BUILD=1 to install the CUDA build (about 3 GB)"
    fi
}

# Print what torch pip would install with these arguments: "cuda" and its version, or "cpu", as also where the environment
# has one already; nothing if pip finds none.
newest_build() {
    local report
    report=$("$VENV/bin/python" -m pip install --dry-run --quiet --report - "$@") || return 0
    "$VENV/bin/python" -c '
import json, sys
versions = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.load(sys.stdin)["install"]}
has_cuda = "torch" in versions and any(name.startswith("nvidia-") for name in versions)
print("cuda " + versions["torch"] if has_cuda else "cpu")' <<<"$report"
}
