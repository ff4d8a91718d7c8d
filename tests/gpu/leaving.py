"""Gathers by copy engine, and ends in one of several ways without ending its engine, or its graphs.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.leaving WAY
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw

WAYS = ("plainly", "group", "exit", "graphs")


def main(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
    settings = {
        "compile": {"enabled": way == "graphs", "lower": "aot_eager", "cuda_graphs": way == "graphs"},
        "transport": {"gathers": "copy_engine"},
        "deadline_seconds": 60.0,
    }
    engine = zw.initialize(model, torch.optim.AdamW(model.parameters(), fused=True), settings)
    for _ in range(30 if way == "graphs" else 4):
        engine.backward(engine(torch.randn(8, 512, device=engine.device)).pow(2).mean())
        engine.step()
    assert engine.stats.memory.symmetric
    assert bool(engine.stats.graphed_calls) == (way == "graphs"), engine.stats.ungraphed_calls
    print(f"rank {engine.rank} leaves", flush=True)
    if way == "group":
        dist.destroy_process_group()
    if way == "exit":
        sys.exit(3)


if __name__ == "__main__":
    main(sys.argv[1])
