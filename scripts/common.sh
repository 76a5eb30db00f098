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

# Without a GPU the CUDA build of torch would waste gigabytes: install a CPU build from wherever one is available.
install_cpu_torch() {
    local torch source pip=("$VENV/bin/python" -m pip install)
    torch=$(grep -o 'torch>=[^"]*' setup.py)
    step "Looking for a CPU build of $torch"
    for source in "" "--index-url=https://download.pytorch.org/whl/cpu --timeout=15 --retries=1"; do
        # shellcheck disable=SC2086  # the options are meant to be split
        if "${pip[@]}" $source --dry-run --quiet --report - "$torch" | without_cuda; then
            "${pip[@]}" $source "$torch" || fail "torch was not installed: see pip's message above"
            return
        fi
    done
    [[ ${MEGATRON3D_ALLOW_CUDA_BUILD:-} == 1 ]] || fail "found no CPU build of $torch, neither in pip's own sources nor at https://download.pytorch.org/whl/cpu.
Put one into $VENV yourself, or set MEGATRON3D_ALLOW_CUDA_BUILD=1 to install the CUDA build (about 3 GB)"
}

# Return whether pip's report on stdin installs no NVIDIA package; no report means that there is no source to install from.
without_cuda() {
    "$VENV/bin/python" -c '
import json, sys
report = sys.stdin.read()
names = [item["metadata"]["name"] for item in json.loads(report)["install"]] if report.strip() else ["nvidia-?"]
sys.exit(any(name.startswith("nvidia-") for name in names))'
}
