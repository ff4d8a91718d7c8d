"""The implementations: each builds the decoder its own way and gives a function that trains it one step.

| name | what it is |
|---|---|
| `zeroweave-z1`, `-z2`, `-z3` | zeroweave at that stage |
| `fsdp2-z3` | FSDP2 that reshards after the forward |
| `fsdp2-z2` | FSDP2 that does not: the parameters stay gathered until the backward is over |
| `compute` | a floor: no communication, the whole model on each GPU, the optimizer over 1/N of it |

All keep bfloat16 parameters in the computation, fp32 masters, bfloat16 reductions and AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import Decoder, Shape, build, initialize_weights

NAMES = ("zeroweave-z3", "zeroweave-z2", "zeroweave-z1", "fsdp2-z3", "fsdp2-z2", "compute")
LEARNING_RATE = 1e-5


@dataclass(frozen=True, slots=True)
class Options:
    """How to build an implementation; `zeroweave` is merged over zeroweave's own config."""

    lower: Literal["inductor", "aot_eager", "none"] = "inductor"
    compile_embedding: bool = False
    zeroweave: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trainer:
    """`step(tokens)` is one whole training step and returns the detached loss; `details()` comes last."""

    step: Callable[[Tensor], Tensor]
    details: Callable[[], dict[str, Any]] = dict
    close: Callable[[], None] = lambda: None


def make(name: str, shape: Shape, device: torch.device, options: Options) -> Trainer:
    """Builds implementation `name`; the default process group exists already."""
    if name not in NAMES:
        raise ValueError(f"unknown implementation {name!r}; there are {', '.join(NAMES)}")
    family, _, stage = name.partition("-z")
    if family == "zeroweave":
        return _zeroweave(int(stage), shape, device, options)
    if family == "fsdp2":
        return _fsdp2(stage == "3", shape, device, options)
    return _compute(shape, device, options)


def _optimizer(parameters: Any, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=device.type == "cuda")


def _compile(module: nn.Module, options: Options) -> None:
    if options.lower != "none":
        module.compile(backend=options.lower)


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; nested tables are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged


def _zeroweave(stage: int, shape: Shape, device: torch.device, options: Options) -> Trainer:
    import zeroweave as zw

    lowering: dict[str, Any] = {"enabled": False} if options.lower == "none" else {"lower": options.lower}
    config = _merge(
        {"stage": stage, "precision": {"params": "bfloat16", "reduce": "bfloat16"}, "compile": lowering},
        options.zeroweave,
    )
    model = build(shape, device, torch.bfloat16)
    engine = zw.initialize(model, _optimizer(model.parameters(), device), config)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def details() -> dict[str, Any]:
        stats = engine.stats
        return {
            "config": config,
            "compiled_calls": stats.compiled_calls,
            "eager_calls": stats.eager_calls,
            "on_demand_unshards": stats.on_demand_unshards,
            "departures": stats.departures,
            "templates": stats.templates,
            "graphs": stats.graphs,
            "eager_regions": dict(stats.eager_regions),
            "traffic": {
                kind: {"calls": traffic.calls, "payload": traffic.payload, "wire": traffic.wire}
                for kind, traffic in stats.last_step.items()
            },
            "memory": asdict(stats.memory),
            "schedule": engine.schedule.text() if engine.schedule is not None else None,
        }

    return Trainer(step, details, engine.destroy)


def _fsdp2(reshard: bool, shape: Shape, device: torch.device, options: Options) -> Trainer:
    """The strongest recipe known: embedding, blocks and tail sharded apart, blocks and tail compiled.

    The tail is used again at once, so it is never resharded after the forward.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Every block compiles the same code; a limit of eight would leave some of them eager without a word.
    torch._dynamo.config.recompile_limit = 64
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with torch.device("meta"):
        model = Decoder(shape)
    if options.compile_embedding:
        _compile(model.embed, options)
    fully_shard(model.embed, mp_policy=precision, reshard_after_forward=reshard)
    for block in model.layers:
        _compile(block, options)
        fully_shard(block, mp_policy=precision, reshard_after_forward=reshard)
    _compile(model.tail, options)
    fully_shard(model.tail, mp_policy=precision, reshard_after_forward=False)
    fully_shard(model, mp_policy=precision, reshard_after_forward=reshard)
    model.to_empty(device=device)
    initialize_weights(model)
    optimizer = _optimizer(model.parameters(), device)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens, tokens)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Trainer(step)


def _compute(shape: Shape, device: torch.device, options: Options) -> Trainer:
    """What a step costs without communication: real weights, all kernels, the optimizer's 1/N share.

    The updated masters are cast but not written back, so the loss does not fall. Needs memory for the whole
    model and its gradients.
    """
    world = dist.get_world_size()
    model = build(shape, device, torch.bfloat16)
    modules = [model.embed, *model.layers, model.tail]
    for module in modules[0 if options.compile_embedding else 1 :]:
        _compile(module, options)
    owned = [[(p, p.numel() // world) for p in module.parameters()] for module in modules]
    masters = [torch.cat([p.detach().view(-1)[:share] for p, share in group]).float() for group in owned]
    shards = [master.to(torch.bfloat16) for master in masters]
    optimizer = _optimizer(masters, device)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens, tokens)
        torch.autograd.backward(loss)
        for master, group in zip(masters, owned, strict=True):
            parts = [p.grad.view(-1)[:share] for p, share in group if p.grad is not None]
            master.grad = torch.cat(parts).float()
            for p, _ in group:
                p.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for shard, master in zip(shards, masters, strict=True):
            shard.copy_(master)
        return loss.detach()

    return Trainer(step)
