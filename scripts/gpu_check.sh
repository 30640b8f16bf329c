#!/usr/bin/env bash
# Checks what needs a GPU, in at most eight minutes on a fresh machine: tests/gpu, then measures
# tables in host memory against what the cost model expects.
#   scripts/gpu_check.sh [FOLDER]    figures go to FOLDER (default: $OUT, else outputs/gpu_check)
#
# Takes DLRM_PYTHON, or the first of .venv and python3 whose torch sees the GPU; no other package of
# this project is needed but NumPy, and nothing is fetched. Where none sees it, .venv is made, as
# scripts/test does. Without a GPU: one line, and status 0.
#
# GPU_CHECK_DEVICE=cpu    tries this script itself: the tests skip, the figures tell nothing
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-${OUT:-$checkout/outputs/gpu_check}}"
device="${GPU_CHECK_DEVICE:-cuda}"
candidates=("$checkout/.venv/bin/python" python3)
[[ -n "${DLRM_PYTHON:-}" ]] && candidates=("$DLRM_PYTHON")

# Whether this Python's torch can be used on the device.
fits() {
    "$1" -c 'import sys, numpy, torch
sys.exit(sys.version_info < (3, 10) or (sys.argv[1] == "cuda" and not torch.cuda.is_available()))' \
        "$device" 2>/dev/null
}

# Whether a driver tells of a GPU, and the caller hasn't hidden it.
has_gpu() {
    [[ "${CUDA_VISIBLE_DEVICES-unset}" != "" ]] || return 1
    compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi -L 2>/dev/null | grep -q '^GPU '
}

python=""
for candidate in "${candidates[@]}"; do
    if fits "$candidate"; then
        python="$candidate"
        break
    fi
done
if [[ -z "$python" ]]; then
    if ! has_gpu; then
        echo "gpu_check: skipped, nothing tested or measured: no GPU here, nor a torch that sees one"
        exit 0
    fi
    source "$checkout/scripts/setup.sh"
    ensure_venv dev
    python="$venv/bin/python"
    if ! fits "$python"; then
        echo "gpu_check: there is a GPU, but torch of $python doesn't see it: the driver is too" \
            "old for it, or torch is a CPU build; set DLRM_PYTHON" >&2
        exit 1
    fi
fi
echo "gpu_check: $("$python" -c 'import sys, torch; print(sys.executable, "torch", torch.__version__)')"
mkdir -p "$out"
out="$(cd "$out" && pwd)"
cd "$checkout"
export PYTHONPATH="$checkout" PYTHONUNBUFFERED=1
status=0

# Settings of its own: the project's are for the pytest it pins and the plugins beside it, and the
# fixtures above tests/gpu need the project's other packages.
if "$python" -c 'import pytest' 2>/dev/null; then
    settings="$(mktemp -d)"
    trap 'rm -rf "$settings"' EXIT
    echo '[pytest]' > "$settings/pytest.ini"
    timeout -k 10 210 "$python" -m pytest -c "$settings/pytest.ini" --rootdir "$checkout" \
        --confcutdir "$checkout/tests/gpu" --import-mode=importlib -p no:cacheprovider \
        -q -rs --durations=3 tests/gpu || status=$?
else
    echo "gpu_check: no pytest here: rows are compared by scripts/gpu_host_check.py, no more"
    timeout -k 10 210 "$python" scripts/gpu_host_check.py --exactness --device "$device" || status=$?
fi

quick=()
[[ "$device" == cpu ]] && quick=(--quick)
timeout -k 10 200 "$python" scripts/gpu_host_check.py --device "$device" ${quick[@]+"${quick[@]}"} \
    --limit-s 120 --json "$out/gpu_host_check.json" || status=$?
exit "$status"
