# Sourced by scripts/dlrm and scripts/test: makes or renews .venv in the checkout.
#   ensure_venv EXTRAS    e.g. ensure_venv "" or ensure_venv dev
#
# DLRM_PYTHON   the Python to use (default: python3, or the first of python3.13 … python3.10)
# DLRM_EXTRAS   further extras, comma-separated: cuda, peers
#
# Extras once installed are kept. The stamp records what the environment was made from.

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$checkout/.venv"
stamp="$venv/.dlrm-stamp"

find_python() {
    local candidate
    local candidates=(python3 python3.13 python3.12 python3.11 python3.10)
    [[ -n "${DLRM_PYTHON:-}" ]] && candidates=("$DLRM_PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "dlrm: no Python 3.10 or newer among ${candidates[*]}; install one or set DLRM_PYTHON" >&2
    return 1
}

ensure_venv() {
    local extras="$1${DLRM_EXTRAS:+${1:+,}$DLRM_EXTRAS}"
    local source
    source="$(cksum < "$checkout/pyproject.toml") $checkout"
    _is_current "$source" "$extras" && return
    exec 9>"$checkout/.venv.lock"
    if command -v flock >/dev/null; then
        flock 9
        # Another call may have done it while this one waited.
        if _is_current "$source" "$extras"; then
            exec 9>&-
            return
        fi
    fi
    _install "$source" "$extras"
    exec 9>&-
}

# Made from this pyproject.toml in this place, with these extras, and still working.
_is_current() {
    local have extra
    have="$(cat "$stamp" 2>/dev/null)" || return 1
    [[ "${have%|*}" == "$1" ]] || return 1
    for extra in ${2//,/ }; do
        [[ ",${have##*|}," == *",$extra,"* ]] || return 1
    done
    "$venv/bin/python" -c 'import sys' 2>/dev/null
}

_install() {
    local have extras="$2" extra python
    have="$(cat "$stamp" 2>/dev/null || true)"
    for extra in $(tr ',' ' ' <<< "${have##*|}"); do
        [[ ",$extras," == *",$extra,"* ]] || extras="${extras:+$extras,}$extra"
    done
    echo "dlrm: setting up $venv (once; some minutes)" >&2
    # An environment that was moved, or whose Python or pip is gone, is made anew.
    if [[ -n "$have" && "${have%|*}" != *" $checkout" ]] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null
    then
        python="$(find_python)"
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
    rm -f "$stamp"
    # torch first and exactly: a looser request could bring another build.
    _pip install "$(grep -o 'torch==[0-9.]*' "$checkout/pyproject.toml" | head -n 1)"
    _pip install --editable "$checkout${extras:+[$extras]}"
    if [[ ",$extras," == *,peers,* ]]; then
        _pip install --no-deps "$(grep -o 'torchrec==[0-9.]*' "$checkout/pyproject.toml" | head -n 1)"
    fi
    if [[ ",$extras," == *,cuda,* ]]; then
        # Both wheels hold the package fbgemm_gpu: keep the CUDA one only.
        _pip uninstall --yes fbgemm-gpu-cpu
        _pip install --force-reinstall --no-deps \
            "$(grep -o 'fbgemm-gpu==[0-9.]*' "$checkout/pyproject.toml" | head -n 1)"
    fi
    echo "$1|$extras" > "$stamp"
}

_pip() {
    "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@" >&2
}
