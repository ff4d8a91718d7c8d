"""The optimizer's step alone: one pass over split masters, gradient and moments, beside torch's fused AdamW.

    python -m benchmarks.update --numel 4100000000

On one GPU. The floor is what a copy of as many bytes takes: it reads half of them and writes half.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch

_BYTES = 2 + 2 + 2 + 4 + 4 + 2 + 2 + 4 + 4
"""An element's shard, remainder, gradient and moments in; shard, remainder and moments out."""


def seconds(call: Callable[[], object], turns: int) -> float:
    """The median of so many calls, after three."""
    found = []
    for turn in range(turns + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 3:
            found.append(begin.elapsed_time(end) / 1000)
    return median(found)


def bandwidth(turns: int) -> float:
    """Bytes a second that a copy of 8 GiB reads and writes."""
    source, target = (torch.zeros(8 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), turns)


def one_pass(numel: int, turns: int) -> float:
    from zeroweave._triton import rules

    shard, gradient = (torch.zeros(numel, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    remainder = torch.zeros(numel, dtype=torch.int16, device="cuda")
    first, second = (torch.zeros(numel, device="cuda") for _ in range(2))
    factor = torch.ones((), device="cuda")

    def step() -> None:
        rules.adam[rules.programs(numel)](
            shard, remainder, gradient, first, second, second, factor, numel,
            0.9999, 1e-3, 0.5, 0.1, 0.1, 0.999, 0.001, 1e-8,
            SPLIT=True, FACTOR=2, COUPLED=False, AMSGRAD=False, MAXIMIZE=False,
            SIZE=rules.BLOCK,
        )  # fmt: skip

    return seconds(step, turns)


def fused(numel: int, turns: int) -> float:
    """AdamW of torch over float32 masters in tensors of 64 Mi elements, its gradients there already."""
    sizes = [min(1 << 26, numel - start) for start in range(0, numel, 1 << 26)]
    parameters = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return seconds(torch.optim.AdamW(parameters, fused=True).step, turns)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.update", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--numel", type=int, default=4_100_000_000)
    parser.add_argument("--turns", type=int, default=10)
    asked = parser.parse_args()
    speed = bandwidth(asked.turns)
    floor = _BYTES * asked.numel / speed
    mine = one_pass(asked.numel, asked.turns)
    torch.cuda.empty_cache()
    torchs = fused(asked.numel, asked.turns)
    print(f"copies: {speed / 1e12:.2f} TB/s; {asked.numel / 1e9:.2f} G parameters, {_BYTES} bytes each")
    print(f"floor {1000 * floor:.1f} ms, one pass {1000 * mine:.1f} ms ({mine / floor:.2f} x the floor)")
    print(f"torch's fused AdamW, float32 masters: {1000 * torchs:.1f} ms")


if __name__ == "__main__":
    main()
