"""A script of which one rank is gone, without a word, while the others wait for it in a reduction by pulling.

python -m tests.gpu.missing RANK PORT        one for each of two ranks; none of them is anybody's child
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import Tensor, nn

import zeroweave as zw


class Leaving(nn.Module):
    """Its backward does not come back on rank 1 once `leaves`."""

    leaves = False

    def forward(self, x: Tensor) -> Tensor:
        if self.leaves:
            x.register_hook(self._leave)
        return x

    def _leave(self, gradient: Tensor) -> None:
        torch.cuda.synchronize()
        os._exit(5)


def main(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(0)
    leaving = Leaving()
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)) for _ in range(4)]
    model = nn.Sequential(blocks[0], blocks[1], leaving, *blocks[2:])
    settings = {
        "compile": {"enabled": False, "record_steps": 0},
        "transport": {"reductions": "pull"},
        "deadline_seconds": 20.0,
    }
    engine = zw.initialize(model, torch.optim.AdamW(model.parameters()), settings)
    for index in range(6):
        leaving.leaves = index == 4 and rank == 1
        loss = engine(torch.randn(8, 512, device=engine.device)).pow(2).mean()
        begin = time.monotonic()
        engine.backward(loss)
        engine.step()
        torch.cuda.synchronize()
        print(f"rank {rank} has made step {index} in {time.monotonic() - begin:.2f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
