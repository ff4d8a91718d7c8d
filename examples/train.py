"""Train a byte-level Llama with ZeRO: the loop of the README, on a real text.

On two processes:  zeroweave run --nproc-per-node 2 examples/train.py --stage 3
On one:            python examples/train.py
"""

import argparse

import torch

import zeroweave as zw
from zeroweave.demo import Llama, Text

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=3)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--config", help="a JSON or TOML file with the engine's settings")
options = parser.parse_args()

torch.manual_seed(0)
model = Llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
with zw.initialize(model, optimizer, config=options.config or {"stage": options.stage}) as engine:
    text = Text(rank=engine.rank, world=engine.world, device=engine.device)
    for step in range(options.steps):
        loss = engine(**text.step(step)).loss
        engine.backward(loss)
        engine.step()
        if engine.rank == 0 and (step % 10 == 0 or step == options.steps - 1):
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)

    weights = engine.state_dict()  # on rank 0; every rank takes part
    if engine.rank == 0:
        print(f"{sum(tensor.numel() for tensor in weights.values()):,} weights")
        print(engine.schedule.of("layers.1")[0])
