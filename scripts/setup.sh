# Sourced by scripts/dlrm and scripts/test: makes or renews .venv in the checkout.
#   ensure_venv EXTRAS    e.g. ensure_venv "" or ensure_venv dev
#
# DLRM_PYTHON   the Python to use (default: the first of python3, python3.13 … python3.10 that is new enough)
# DLRM_EXTRAS   further extras, e.g. cuda or peers

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$checkout/.venv"

find_python() {
    local candidate
    for candidate in ${DLRM_PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "dlrm: no Python 3.10 or newer found; install one or set DLRM_PYTHON" >&2
    return 1
}

ensure_venv() {
    local extras="$1${DLRM_EXTRAS:+${1:+,}$DLRM_EXTRAS}"
    local wanted have python
    wanted="$(cksum < "$checkout/pyproject.toml") $checkout"
    have="$(cat "$venv/.dlrm-stamp" 2>/dev/null || true)"
    # Up to date: same pyproject.toml, and every extra wanted now was installed then.
    if [[ "${have%%|*}" == "$wanted" ]] && _has_extras "${have#*|}" "$extras"; then
        return
    fi
    exec 9>"$checkout/.venv.lock"
    command -v flock >/dev/null && flock 9
    python="$(find_python)"
    echo "dlrm: setting up $venv (once; some minutes)" >&2
    if [[ ! -x "$venv/bin/python" ]] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        rm -rf "$venv"
        "$python" -m venv "$venv"
    fi
    rm -f "$venv/.dlrm-stamp"
    # torch first and exactly: a looser request could bring another build.
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        "$(grep -o 'torch==[0-9.]*' "$checkout/pyproject.toml" | head -n 1)" >&2
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        --editable "$checkout${extras:+[$extras]}" >&2
    if [[ ",$extras," == *,cuda,* ]]; then
        # Both wheels hold the package fbgemm_gpu: keep the CUDA one only.
        "$venv/bin/python" -m pip uninstall --quiet --yes fbgemm-gpu-cpu >&2
        "$venv/bin/python" -m pip install --quiet --force-reinstall --no-deps \
            "$(grep -o 'fbgemm-gpu==[0-9.]*' "$checkout/pyproject.toml" | head -n 1)" >&2
    fi
    echo "$wanted|$extras" > "$venv/.dlrm-stamp"
    exec 9>&-
}

_has_extras() {
    local extra
    for extra in ${2//,/ }; do
        [[ ",$1," == *",$extra,"* ]] || return 1
    done
}
