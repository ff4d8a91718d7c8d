"""Named comparisons: what `python -m benchmarks.lm --case NAME` runs, and the ratios that must come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Case:
    """`speed` has the least that the peer's step divided by an implementation's may be; `memory` the largest ratio.

    An implementation that `speed` does not name must be as fast as its peer. Memory is the steady one and that of the
    GPU, where symmetric memory and everything else counts that is no tensor's. `host` has the most seconds of a step
    that an implementation may keep the host; `no_slower` names another one of the run that it must be as fast as.
    `cached`: compiler caches were kept, so that first steps are not compared.
    """

    arguments: str = ""
    speed: Mapping[str, float] = field(default_factory=dict)
    memory: float = 1.05
    host: Mapping[str, float] = field(default_factory=dict)
    no_slower: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False


STEPS = "--steps 35 --warm 20"
"""Schedules settle and graphs are captured before steps are counted."""
STAGE_2 = "--impl zeroweave-graphs-z2,fsdp2-ce-graphs-z2,zeroweave-z2,fsdp2-ce-z2,fsdp2-z2,compute-graphs"
STAGE_3 = STAGE_2.replace("-z2", "-z3")
EACH_WAY = "--hf --loop plain --impl zeroweave-graphs-z3,fsdp2-ce-graphs-z3,zeroweave-z3,fsdp2-ce-z3"
"""transformers' own model, trained by both with and without graphs."""
KEPT = f"--variant kept compile.memory_budget={54 << 30}"
"""On four GPUs 15 GiB more than Qwen3-8B with 1,024 tokens takes where nothing is kept: all parameters have room."""
CASES = {
    "hf-qwen3-8b-4096-z3": Case(
        f"--model qwen3-8b --seq 4096 {EACH_WAY} {STEPS}",
        speed={"zeroweave-graphs-z3": 1.1},
    ),
    "hf-qwen3-8b-4096-z2": Case(f"--model qwen3-8b --seq 4096 {EACH_WAY.replace('-z3', '-z2')} {STEPS}"),
    "hf-qwen3-8b-1024": Case(f"--model qwen3-8b --seq 1024 {EACH_WAY} {STEPS}"),
    "hf-qwen3-1.7b-2048": Case(f"--model qwen3-1.7b --seq 2048 --micro-batch 2 {EACH_WAY} {STEPS}"),
    "hf-qwen3-8b-lora": Case(f"--model qwen3-8b --seq 4096 --lora 16 {EACH_WAY} {STEPS}"),
    "hf-qwen3-8b-groups": Case(f"--model qwen3-8b --seq 4096 --group-size 2 {EACH_WAY} {STEPS}"),
    "hf-qwen3-14b-2048": Case(f"--model qwen3-14b --seq 2048 {EACH_WAY} {STEPS}"),
    "llama-1b-512": Case(
        f"--model llama-1b --seq 512 {STAGE_2} {STEPS}",
        speed={"zeroweave-graphs-z2": 3.5},
        host={"zeroweave-graphs-z2": 0.003},
    ),
    "qwen3-8b-1024": Case(
        f"--model qwen3-8b --seq 1024 {STAGE_3},zeroweave-fours-z3,compute {STEPS}",
        speed={"zeroweave-graphs-z3": 1.6, "zeroweave-z3": 1.15},
        host={"zeroweave-graphs-z3": 0.003, "zeroweave-z3": 0.1, "zeroweave-fours-z3": 0.1},
    ),
    "qwen3-8b-1024-kept": Case(
        f"--model qwen3-8b --seq 1024 {KEPT}"
        f" --impl zeroweave-graphs-kept-z3,zeroweave-kept-z3,fsdp2-ce-graphs-z3,fsdp2-ce-z3 {STEPS}",
        speed={"zeroweave-graphs-kept-z3": 1.6},
    ),
    "qwen3-8b-1024-gas-8": Case(
        f"--model qwen3-8b --seq 1024 --gas 8 {KEPT}"
        " --impl zeroweave-graphs-kept-z3,zeroweave-graphs-z3,fsdp2-ce-graphs-z3,fsdp2-ce-z3"
        " --steps 20 --warm 14",
        no_slower={"zeroweave-graphs-kept-z3": "zeroweave-graphs-z3"},
    ),
    "qwen3-8b-4096-z3": Case(
        f"--model qwen3-8b --seq 4096 {STAGE_3} {STEPS}",
        speed={"zeroweave-graphs-z3": 1.08},
        memory=1.0,
    ),
    "qwen3-8b-4096-z2": Case(
        f"--model qwen3-8b --seq 4096 {STAGE_2} {STEPS}",
        speed={"zeroweave-graphs-z2": 1.05},
        memory=1.0,
    ),
    "llama-1b-2048": Case(
        f"--model llama-1b --seq 2048 --micro-batch 2 {STAGE_3} {STEPS}",
        speed={"zeroweave-graphs-z3": 1.15},
    ),
}
