"""ZeRO by hand: every gradient is reduced by name, from hooks, into buffers that this script owns.

    torchrun --nproc-per-node 2 examples/dc_zero2.py [--stage 1|2|3] [--partitioned]

Four micro-steps are accumulated; the gradients are compared with those of plain data parallelism.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from zeroweave import dc

MICRO_STEPS = 4


def model_and_copy() -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 7)))
    return models[0], models[1]


def register(parameters: list[nn.Parameter], stage: int, partitioned: bool) -> torch.Tensor:
    """Registers every parameter; returns the one gradient buffer, whole or this rank's part of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = sum(p.numel() for p in parameters)
    size = -(-total // world)  # a rank's part of all parameters, one after the other
    first, last = (rank * size, min((rank + 1) * size, total)) if partitioned else (0, total)
    if stage == 3:
        buffer = torch.zeros(sum(-(-p.numel() // world) for p in parameters))
    else:
        buffer = torch.zeros(max(last - first, 0))
    offset = 0
    for i, p in enumerate(parameters):
        if stage == 3:
            part = -(-p.numel() // world)
            padded = torch.zeros(part * world)
            padded[: p.numel()] = p.detach().flatten()
            shard = padded.view(world, part)[rank].clone()
            dc.register_z3_param(
                ds_id=i, ds_shape=list(p.shape), ds_tensor=shard, grad_buffer=buffer[offset : offset + part]
            )
            offset += part
        elif partitioned:
            # the part of this parameter between first and last, and where it begins inside the parameter
            start, stop = max(offset, first), max(min(offset + p.numel(), last), max(offset, first))
            dc.register_param(
                ds_id=i,
                ds_shape=list(p.shape),
                ds_tensor=p,
                grad_buffer=buffer[start - first : stop - first],
                offset=start - offset,
            )
            offset += p.numel()
        else:
            whole = buffer[offset : offset + p.numel()]
            dc.register_param(
                ds_id=i, ds_shape=list(p.shape), ds_tensor=p, grad_buffer=whole.view(p.shape), offset=offset
            )
            offset += p.numel()
    return buffer


def expected(parameters: list[nn.Parameter], stage: int, partitioned: bool) -> torch.Tensor:
    """What `register`'s buffer must hold: the averaged gradients, laid out likewise."""
    rank, world = dist.get_rank(), dist.get_world_size()
    grads = []
    for p in parameters:
        assert p.grad is not None
        dist.all_reduce(p.grad)
        grads.append(p.grad.flatten() / world)
    if stage == 3:
        return torch.cat([nn.functional.pad(g, (0, -len(g) % world)).view(world, -1)[rank] for g in grads])
    flat = torch.cat(grads)
    size = -(-len(flat) // world)
    return flat[rank * size : (rank + 1) * size] if partitioned else flat


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--partitioned", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        train(options.stage, options.partitioned)
    finally:
        dc.cleanup()
        dist.destroy_process_group()


def train(stage: int, partitioned: bool) -> None:
    model, plain = model_and_copy()
    parameters, others = list(model.parameters()), list(plain.parameters())
    dc.init(dist.group.WORLD, {"double_buffer": True}, initial_reduce_bucket_size=400)
    buffer = register(parameters, stage, partitioned)
    register_graph = {1: dc.register_graph_z1, 2: dc.register_graph_z2, 3: dc.register_graph_z3}[stage]
    register_graph(graph_id=0, ds_ids=range(len(parameters)))

    def reduce(ds_id: int, p: torch.Tensor) -> None:
        assert p.grad is not None
        dc.reduce_grad(p.grad, 0, ds_id)
        p.grad = None

    for i, p in enumerate(parameters):
        p.register_post_accumulate_grad_hook(partial(reduce, i))

    flat = nn.Parameter(torch.zeros_like(buffer))  # what the optimizer steps; here it stands for the masters
    flat.grad = buffer
    optimizer = torch.optim.SGD([flat], lr=0.1)

    for micro in range(MICRO_STEPS):
        is_last = micro == MICRO_STEPS - 1
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * micro + dist.get_rank()))
        dc.start_forward()
        loss = model(x).pow(2).mean() / MICRO_STEPS
        dc.end_forward()
        dc.start_backward(update=is_last)
        loss.backward()
        if is_last:
            dc.end_backward(graph_id=0)
        (plain(x).pow(2).mean() / MICRO_STEPS).backward()

    wanted = expected(others, stage, partitioned)
    error = float((buffer - wanted).norm() / max(wanted.norm(), torch.tensor(1e-12)))
    optimizer.step()
    assert error <= 1e-6, error
    assert torch.equal(flat, -0.1 * buffer)
    print(f"rank {dist.get_rank()}: stage {stage}, relative difference {error:.1e}")


if __name__ == "__main__":
    main()
