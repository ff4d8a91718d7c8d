#!/usr/bin/env bash
# The tables of benchmarks/README.md and tests/gpu, in calls of ten minutes: 1 to 5 and 9 on four GPUs of a host, 6 to 8 on
# two.
#
#   benchmarks/tables.sh 1     tests/gpu on GPUs 2 and 3; beside it Qwen3-8B, 4,096 tokens, and its floor on 0 and 1
#   benchmarks/tables.sh 2     nothing beside it, on 0 and 1: what depends on the host, which are coalesced windows and
#                              Qwen3-8B with 1,024 tokens, and where the host's time goes
#   benchmarks/tables.sh 3     in pairs the tests of the peers and endurance beside Llama-1B with 512 and 2,048 tokens and
#                              transformers' model; then the tests that need four GPUs, and gathers by kernel and by copy
#                              engine
#   benchmarks/tables.sh 4     4,096 tokens with nothing kept; then kept buckets and 8 micro-steps on four
#   benchmarks/tables.sh 5     4,096 tokens on four, at stage 2 and at stage 3 with less memory, beside FSDP2
#   benchmarks/tables.sh 6     Qwen3-8B, 4,096 tokens and stage 2, beside its floor; then memory with nothing kept and with
#                              compact states; the optimizer's step alone
#   benchmarks/tables.sh 7     tests/gpu; then 1,024 tokens as graphs
#   benchmarks/tables.sh 8     the rows of the README's table, the most important ones first; each result is printed as it
#                              comes. `8 z2 lora`: only these rows: z3, z2, 1.7b, 1024 (transformers' models), plain-z3,
#                              plain-1024, plain-512, lora
#   benchmarks/tables.sh 9     the same on four GPUs: groups (two groups of two), 14b, z3, z2
#
# OUT names the folder for logs (default: ./out), END the seconds after which nothing goes on (default: 560, of 8 and 9:
# 545), CACHE the folder of compiler caches that calls share (default: OUT/cache), ARM the seconds that one implementation
# may take in 8 and 9 (default: 90), MORE further arguments of benchmarks.lm for these, PYTHON the interpreter (default:
# python3). What matters is printed. Where only some files of OUT are kept, or OUT is emptied between the calls, name
# others for both, and pack OUT behind each call.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
part=${1:?a number from 1 to 9}
shift
case $part in 8 | 9) END=${END:-545} ;; esac
out=${OUT:-$PWD/out} END=${END:-560} CACHE=${CACHE:-$out/cache}
mkdir -p "$out"

left() { echo $((END - SECONDS < $1 ? END - SECONDS : $1)); }

# run NAME SECONDS gpu.sh's arguments: its output is NAME.txt in the folder of logs, its files are in NAME.
run() {
    local name=$1 limit
    limit=$(left "$2")
    shift 2
    [ "$limit" -gt 20 ] || { echo "== $name: no time is left"; return; }
    OUT=$out/$name LIMIT=$limit benchmarks/gpu.sh "$@" > "$out/$name.txt" 2>&1
    echo "== $name, after $SECONDS s"
    grep -aE "^(holds|FAILS|FAILED|ERROR|implementation |zeroweave-|fsdp2-|compute)|rror:|^by copy|^\| |equal in|grew| (passed|failed)" \
        "$out/$name.txt" | cut -c1-300 | head -40
    tail -n 1 "$out/$name.txt" | cut -c1-300
}
bench() { run "$1" "$2" bench --cache "$CACHE" "${@:3}"; }

# row NAME CASE STAGE implementations of benchmarks.lm: each result is a line, and printed when it is there. The peer's
# step is one CUDA graph. NCCL's kernels gather where a graph cannot have copy engines, in the later rows from the start.
peer="fsdp2-ce-graphs-%s|fsdp2-graphs-%s"
row() {
    local name=$1 case=$2 stage=$3 limit impl=""
    shift 3
    [ ${#wanted[@]} = 0 ] || [[ " ${wanted[*]} " = *" $name "* ]] || return 0
    limit=$(left 600)
    [ "$limit" -gt 50 ] || { echo "== $name: no time is left"; return; }
    for arm in "$@"; do
        case $arm in peer) arm=${peer//%s/$stage} ;; *) arm=$arm-$stage ;; esac
        impl=$impl,$arm
    done
    echo "== $name ($case), at $SECONDS s"
    mkdir -p "$out/$name"
    PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} \
        timeout --signal=INT --kill-after=10 "$limit" "${PYTHON:-python3}" -m benchmarks.lm --out "$out/$name" \
        --case "$case" --cache "$CACHE" $rows --timeout "${ARM:-90}" --impl "${impl#,}" $more 2>&1 | tee "$out/$name.txt" |
        grep -a --line-buffered -E ": step [0-9.]+ s \\(|^(holds|FAILS|failed)|^\| |exited with| instead$|not done|rror:| as (one )?graph" |
        cut -c1-300
    if grep -q "^fsdp2-ce-graphs-.* instead" "$out/$name.txt"; then peer="fsdp2-graphs-%s"; fi
}
wanted=("$@") more=${MORE:-}
rows="--in-a-row 10 --steps 34 --warm 14"
host="--case qwen3-8b-1024 --steps 36 --warm 20 --timeout 150"
auto="--variant auto compile.memory_budget=auto"
windows="--engines zeroweave,deepspeed --backwards 4 --modes coalesce --graphs --warm 16"
in_96_gib="--variant auto compile.memory_budget=$((96 << 30))"

# All but what needs a quiet GPU, and plans.
mapfile -t rest < <(ls tests/gpu/test_*.py | grep -vE "memory|budget|plan")

case $part in
1)
    (
        export CUDA_VISIBLE_DEVICES=2,3
        run quiet 200 tests tests/gpu/test_memory.py tests/gpu/test_budget.py --tb=short
        run tests 560 tests "${rest[@]}" -n 7 --dist worksteal --tb=short
    ) &
    (
        export CUDA_VISIBLE_DEVICES=0,1
        bench z2 300 --case qwen3-8b-4096-z2 $rows --timeout 200 $in_96_gib \
            --impl zeroweave-graphs-auto-z2,compute-graphs,fsdp2-ce-z2
        bench z3 560 --case qwen3-8b-4096-z3 $rows --timeout 200 $auto \
            --impl zeroweave-graphs-auto-z3,compute-graphs,fsdp2-ce-z3
    )
    wait
    ;;
2)
    (
        export CUDA_VISIBLE_DEVICES=0,1
        run coalesce-z2 75 coalesce $windows --stages 2 --set compile.memory_budget=$((2500 << 20))
        run coalesce-z3 75 coalesce $windows --stages 3 --blocks --set compile.memory_budget=$((1400 << 20))
        bench q1024 420 $host --host-profile zeroweave-fours-z3,compute,zeroweave-graphs-z3 \
            --impl zeroweave-z3,zeroweave-fours-z3,compute,zeroweave-graphs-keeps-z3,fsdp2-ce-z3,zeroweave-graphs-z3
    )
    ;;
3)
    (
        export CUDA_VISIBLE_DEVICES=0,1
        run peers 400 tests tests/gpu/benchmarks tests/gpu/test_plan.py -n 4 --tb=short
        run endurance 400 endurance --graphs both --model small --steps "${STEPS:-300}" --at-once 3
    ) &
    (
        export CUDA_VISIBLE_DEVICES=2,3
        bench llama-512 110 --case llama-1b-512 --timeout 100 --impl zeroweave-graphs-z2,fsdp2-ce-z2
        bench llama-2048 130 --case llama-1b-2048 --timeout 100 --impl zeroweave-graphs-z3,fsdp2-ce-z3
        bench hf 150 --case hf-qwen3-8b-4096-z3 --timeout 100 --impl zeroweave-z3,fsdp2-ce-z3
    ) &
    wait
    run four 110 tests tests/gpu/test_experts.py tests/gpu/test_checkpoints.py -k four -n 2 --tb=short
    run gathers 90 gathers
    ;;
4)
    (
        export CUDA_VISIBLE_DEVICES=0,1
        bench z3-none 250 --case qwen3-8b-4096-z3 $rows --timeout 200 --impl zeroweave-graphs-z3,fsdp2-ce-z3
    )
    bench kept 130 --case qwen3-8b-1024-kept --steps 24 --warm 14 --timeout 100 --impl zeroweave-graphs-kept-z3,fsdp2-ce-z3
    bench gas-8 240 --case qwen3-8b-1024-gas-8 --steps 16 --warm 11 --timeout 118 \
        --impl zeroweave-graphs-kept-z3,zeroweave-graphs-z3
    ;;
5)
    less="--variant less compile.memory_budget=$((53 << 30))"
    bench z2 300 --case qwen3-8b-4096-z2 $rows --timeout 150 $in_96_gib --impl zeroweave-graphs-auto-z2,fsdp2-ce-z2
    bench z3 200 --case qwen3-8b-4096-z3 $rows --timeout 130 $less --impl zeroweave-graphs-less-z3,fsdp2-ce-z3
    ;;
6)
    bench auto-z2 320 --case qwen3-8b-4096-z2 $rows --timeout 200 $in_96_gib \
        --impl zeroweave-graphs-auto-z2,compute-graphs,fsdp2-ce-z2
    small="--steps 10 --warm 6 --timeout 60 --variant compact precision.optimizer=compact"
    bench small-z3 130 --case qwen3-8b-4096-z3 $small --impl zeroweave-z3,zeroweave-compact-z3
    bench small-z2 70 --case qwen3-8b-4096-z2 $small --impl zeroweave-compact-z2
    run update 60 update
    ;;
7)
    run quiet 60 tests tests/gpu/test_memory.py tests/gpu/test_budget.py --tb=short
    run tests 480 tests "${rest[@]}" -n 7 --dist worksteal --tb=short
    bench q1024 160 $host --impl zeroweave-graphs-z3,fsdp2-ce-z3
    ;;
8)
    row z3 hf-qwen3-8b-4096-z3 z3 zeroweave-graphs peer zeroweave fsdp2-ce
    row z2 hf-qwen3-8b-4096-z2 z2 zeroweave-graphs peer zeroweave fsdp2-ce
    row 1.7b hf-qwen3-1.7b-2048 z3 zeroweave-graphs-fours peer zeroweave-graphs
    row 1024 hf-qwen3-8b-1024 z3 zeroweave-graphs-fours peer zeroweave-graphs
    row plain-z3 qwen3-8b-4096-z3 z3 zeroweave-graphs peer fsdp2-ce
    row plain-1024 qwen3-8b-1024 z3 zeroweave-graphs-fours peer zeroweave-graphs
    row plain-512 llama-1b-512 z2 zeroweave-graphs peer fsdp2-ce
    row lora hf-qwen3-8b-lora z3 zeroweave-graphs peer zeroweave fsdp2-ce
    ;;
9)
    row groups hf-qwen3-8b-groups z3 zeroweave-graphs peer zeroweave fsdp2-ce
    row 14b hf-qwen3-14b-2048 z3 zeroweave-graphs peer zeroweave fsdp2-ce
    row z3 hf-qwen3-8b-4096-z3 z3 zeroweave-graphs peer fsdp2-ce
    row z2 hf-qwen3-8b-4096-z2 z2 zeroweave-graphs peer fsdp2-ce
    ;;
*) echo "unknown: $part" >&2; exit 2 ;;
esac
