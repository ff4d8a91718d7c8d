"""zeroweave, by `engine.train_step` or by the ordinary loop, in any of its settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.models import Shape
from benchmarks.peers.common import Options, Trainer, adamw, mean
from benchmarks.peers.subject import Subject

BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "graphs": {"compile": {"cuda_graphs": True}},
    "keeps": {"compile": {"memory_budget": "auto"}},
    "fours": {"bucket": {"by_block": 4, "bytes": 4 << 30}},
}
"""The variants that need no words on the command line."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; nested tables are merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if nested else value
    return merged


def configuration(stage: int, variants: Sequence[str], options: Options) -> dict[str, Any]:
    """The config of one setting: zeroweave's own for this comparison, the command line's, then each variant's."""
    lowering: dict[str, Any] = {"enabled": False} if options.lower == "none" else {"lower": options.lower}
    lowering["memory_budget"] = "none"  # memory is compared with that of peers, which fill none that is free
    lowering["cuda_graphs"] = False  # a variant turns them on
    config: dict[str, Any] = {
        "stage": stage,
        "gradient_accumulation_steps": options.gas,
        "precision": {"params": "bfloat16", "reduce": "bfloat16"},
        "compile": lowering,
        **({"sharding": {"group_size": options.group_size}} if options.group_size else {}),
    }
    for over in (options.zeroweave, *({**BUILT_IN, **options.variants}[name] for name in variants)):
        config = merge(config, over)
    return config


def scheduled(schedule: Any) -> dict[str, int] | None:
    """Bytes of all flats that one step gathers and reduces by its schedule; None without one."""
    if schedule is None:
        return None
    found = Counter({"all_gather": 0, "reduce_scatter": 0})
    for kind, bucket in schedule.collectives():
        found[kind] += schedule.facts.sizes[bucket]
    return dict(found)


def build(stage: int, variants: Sequence[str], shape: Shape, device: torch.device, options: Options) -> Trainer:
    import zeroweave as zw

    config = configuration(stage, variants, options)
    subject = Subject(shape, options.hf, options.lora)
    model = subject.build(device, torch.bfloat16)
    optimizer = adamw((p for p in model.parameters() if p.requires_grad), device)
    engine = zw.initialize(model, optimizer, config)

    def train_step(tokens: Tensor) -> Tensor:
        return engine.train_step(subject.batch(tokens))

    def plain(tokens: Tensor) -> Tensor:
        loss = subject.loss(engine(**subject.batch(tokens)))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    micro_step = {"train_step": train_step, "plain": plain}[options.loop]

    def step(batches: Sequence[Tensor]) -> Tensor:
        return mean(map(micro_step, batches), len(batches))

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
            "compile_seconds": stats.compile_seconds,
            "eager_regions": dict(stats.eager_regions),
            "graphed_calls": stats.graphed_calls,
            "ungraphed_calls": dict(stats.ungraphed_calls),
            "traffic": {
                kind: {"calls": traffic.calls, "payload": traffic.payload, "wire": traffic.wire}
                for kind, traffic in stats.last_step.items()
            },
            "memory": asdict(stats.memory),
            "schedule": engine.schedule.text() if engine.schedule is not None else None,
            "scheduled": scheduled(engine.schedule),
        }

    def held() -> int:
        memory = engine.stats.memory
        return memory.graphs + memory.symmetric if engine.stats.graphed_calls else 0

    return Trainer(step, details, lambda: engine.destroy(optimizer_state=False), held)
