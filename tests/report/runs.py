"""Runs to report about, made up: a stack of blocks whose steps went nearly as predicted, and an engine's words."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.schedule.measured import as_predicted
from tests.support.schedules import stack_with_needs
from zeroweave.comm.ledger import Traffic
from zeroweave.config import Config
from zeroweave.engine.samples import About
from zeroweave.engine.stats import Memory, Stats
from zeroweave.layout import ParameterSpec, build_layout
from zeroweave.schedule import (
    BucketFacts,
    Costs,
    End,
    Facts,
    Line,
    Measured,
    Reduce,
    Run,
    Schedule,
    compile_schedule,
)
from zeroweave.schedule.moves import moves_of

PARTS = (
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.o",
    "mlp.gate",
    "mlp.up",
    "mlp.down",
    "norm_1",
    "norm_2",
)


def schedule_of(blocks: int, micro_steps: int) -> Schedule:
    """One bucket a block, activations in host memory: something lies in each lane."""
    buckets = tuple(BucketFacts(i, f"layers.{i}", 96 << 20, True) for i in range(blocks))
    facts = Facts(buckets, frozenset(), depth=2, prefetch=1, update_by_bucket=True, offload=True)
    made = compile_schedule(stack_with_needs(blocks, micro_steps, 8 << 20), facts)
    return replace(made, facts=replace(facts, costs=_costs(made, 0)))


def _costs(schedule: Schedule, seed: int) -> Costs:
    rng = random.Random(seed)
    events = [i for i in schedule.instructions if isinstance(i, Run | End | Reduce)]
    seconds = {"forward": 1e-3, "backward": 2e-3}
    ids = [bucket.id for bucket in schedule.facts.buckets]
    return Costs(
        compute=tuple(rng.uniform(1, 1.3) * (seconds[e.call.phase] if isinstance(e, Run) else 1e-5) for e in events),
        update={bucket: rng.uniform(2e-4, 3e-4) for bucket in ids},
        gathers={bucket: rng.uniform(8e-4, 1.6e-3) for bucket in ids},
        reductions={bucket: rng.uniform(1e-3, 2.2e-3) for bucket in ids},
        gather=Line(1e-4, 1e-11),
        reduce=Line(1e-4, 1e-11),
        activations=tuple(rng.randrange(1 << 20, 8 << 20) for _ in events),
        resident=1 << 32,
        copy=Line(1e-5, 2e-10),
        moves=moves_of(schedule.record),
    )


def measured(blocks: int, micro_steps: int, about: About | None = None) -> Measured:
    """Three steps: the median one, the fastest and the slowest."""
    schedule = schedule_of(blocks, micro_steps)
    steps = []
    for seed in (1, 2, 3):
        own = replace(schedule, facts=replace(schedule.facts, costs=_costs(schedule, seed)))
        steps.append(replace(as_predicted(own, before=1 << 30).step, schedule=schedule))
    fastest, median, slowest = sorted(steps, key=lambda step: step.seconds)
    assert schedule.costs is not None
    seconds = {"dynamo": 1.5, "aot": 0.75, "partition": 0.125, "wait": 0.0, "lower": 9.25, "schedule": 0.5}
    told = None if about is None else about.told()
    return Measured(median, schedule.costs, seconds, (fastest, slowest), told)


def about(blocks: int) -> About:
    """What the engine of such a run might tell."""
    specs = [
        ParameterSpec(f"layers.{i}.{part}.weight", (64, 64), "bfloat16", 2, True, f"layers.{i}")
        for i in range(blocks)
        for part in PARTS
    ]
    traffic = {"all_gather": Traffic(2 * blocks, blocks << 20, blocks << 19), "reduce_scatter": Traffic(blocks, 8, 4)}
    return About(
        rank=0,
        world=2,
        model="Llama",
        device="cuda:0, an accelerator",
        versions={"zeroweave": "0.1.0", "PyTorch": "2.13.0"},
        config=Config.load({"stage": 3, "gradient_clipping": 1.5, "compile": {"cuda_graphs": False}}).model_dump(
            mode="json"
        ),
        buckets=build_layout(specs, 2, 1 << 30, True, {}),
        stats=Stats(
            compiled_calls=720,
            eager_calls=20,
            on_demand_unshards=3,
            departures=1,
            regions=blocks,
            graphs=2,
            templates=4,
            found_templates=1,
            compile_seconds={},
            eager_regions={f"layers.{i}": "call of unsupported function breaks the graph." for i in (1, 2)},
            eager_modules=("embed", "head"),
            graphed_calls=0,
            ungraphed_calls={"the calls are others": 2},
            graph_difference=0.0,
            written_gradients=0,
            freed_activations=0,
            offloaded_activations=0,
            offloaded_peak=0,
            on_demand_reloads=0,
            gathers="by copy engine from 4 MiB on: they cost least",
            last_step=traffic,
            total=traffic,
            memory=Memory(1 << 30, 1 << 31, 1 << 32, 1 << 20, 0, 1 << 28, 1 << 27),
        ),
        seconds=tuple((number, 0.1 + 0.05 / number) for number in range(2, 30)),
        losses=tuple((number, 2.0 + 3.0 / number) for number in range(1, 30)),
    )
