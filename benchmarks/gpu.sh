#!/usr/bin/env bash
# Everything that needs GPUs, in one call.
#
#   benchmarks/gpu.sh tests [pytest arguments]           tests/gpu, or those of it that are named: two ranks, on one
#                                                        GPU what needs no second
#   benchmarks/gpu.sh bench [benchmarks.lm arguments]    the benchmark of benchmarks/README.md, on all GPUs
#   benchmarks/gpu.sh coalesce [its arguments]           benchmarks.coalesce, on two GPUs
#   benchmarks/gpu.sh saving [its arguments]             benchmarks.saving: what checkpoints cost, on all GPUs
#   benchmarks/gpu.sh endurance [its arguments]          benchmarks.endurance: hundreds of steps, on all GPUs;
#                                                        --graphs both: as CUDA graphs and not
#   benchmarks/gpu.sh plan [its arguments]               benchmarks.plan: plans beside what GPUs do, on all GPUs
#   benchmarks/gpu.sh update [its arguments]             benchmarks.update: the optimizer's step alone, on one GPU
#   benchmarks/gpu.sh gathers                            benchmarks.gathers: by kernel and copy engine, on all GPUs
#   benchmarks/gpu.sh doctor                             versions and devices, only
#
# Run from anywhere. PYTHON names the interpreter (default: python3), OUT the folder for logs and results
# (default: ./out), LIMIT the seconds after which a run is ended (default: 540).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
what=${1:?tests, bench, coalesce, saving, endurance, plan, update, gathers or doctor}
shift
python=${PYTHON:-python3}
export OUT=${OUT:-$PWD/out} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUT"

# Ends the run before whatever started this script would, so that what was written so far survives.
# By SIGINT: pytest then still says why tests failed.
bounded() { timeout --signal=INT --kill-after=15 "${LIMIT:-540}" "$@"; }

doctor() {
    env | grep -E '^(NCCL|TORCH|NVSHMEM|CUDA)_' | sort
    "$python" -c '
import sys, torch
print("python", sys.version.split()[0], "torch", torch.__version__, "NCCL", torch.cuda.nccl.version())
for i in range(torch.cuda.device_count()):
    p = torch.cuda.get_device_properties(i)
    print(f"GPU {i}: {p.name}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} multiprocessors")
'
}

# Ranks that share the only GPU take turns on it unless CUDA's multi-process service runs: without it a gather takes
# six times as long. With it an illegal access of one process ends them all.
sharing() {
    [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" = 1 ] || return
    command -v nvidia-cuda-mps-control > /dev/null || return
    CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d)
    export CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY=$CUDA_MPS_PIPE_DIRECTORY
    nvidia-cuda-mps-control -d
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
}

case $what in
tests)
    case " $*" in *" tests/"*) all= ;; *) all=tests/gpu ;; esac
    run() { sharing; bounded "$python" -m pytest ${all:+"$all"} -v --durations=0 "$@"; }
    ;;
bench) run() { bounded "$python" -m benchmarks.lm --out "$OUT" "$@"; } ;;
coalesce) run() { bounded "$python" -m benchmarks.coalesce --out "$OUT" "$@"; } ;;
saving) run() { bounded "$python" -m benchmarks.saving --out "$OUT" "$@"; } ;;
endurance) run() { bounded "$python" -m benchmarks.endurance --out "$OUT/runs" "$@"; } ;;
update) run() { bounded "$python" -m benchmarks.update "$@"; } ;;
gathers) run() { bounded "$python" -m benchmarks.gathers; } ;;
plan) run() { bounded "$python" -m benchmarks.plan --out "$OUT" "$@"; } ;;
doctor) run() { :; } ;;
*) echo "unknown: $what" >&2; exit 2 ;;
esac
{ doctor; run "$@"; } 2>&1 | tee "$OUT/$what.log"
