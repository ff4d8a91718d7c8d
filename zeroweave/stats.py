"""What an engine tells about itself: counters, traffic, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroweave.calls import Calls
from zeroweave.comm.ledger import Ledger, Traffic
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.runtime.runtime import Runtime


@dataclass(frozen=True)
class Memory:
    """Bytes of this rank's model state, measured on the tensors themselves.

    `shards`: in the dtype of the computation. `masters`: float32, of trained parameters that are computed with in
    a narrower dtype; they stand in for their shards, which are rounded from them when they are gathered. The
    peaks count all flats that were unsharded at once, and the gradient flats of all reductions in flight at once;
    a change of the schedule by measured times or by `engine.reschedule` begins them anew.
    """

    shards: int
    masters: int
    optimizer: int
    gradients: int
    flats_peak: int
    gradient_flats_peak: int


@dataclass(frozen=True)
class Stats:
    """A snapshot. Counters run from the start of the engine.

    `on_demand_unshards`: gathers that a schedule should have ordered and did not. `departures`: steps that
    left their schedule. `graphs`: captured by Dynamo. `templates`: lowered. `found_templates`: those of them that
    Inductor's cache had, from an earlier run or another rank. `compile_seconds`: by phase, see `compile.phases`,
    and what making schedules took. `eager_regions`: regions that Dynamo gave up on, with its reason.
    `freed_activations`: bytes that `activations.free_threshold_bytes` has freed. `last_step`, `total`: traffic by
    kind of collective.
    """

    compiled_calls: int
    eager_calls: int
    on_demand_unshards: int
    departures: int
    regions: int
    graphs: int
    templates: int
    found_templates: int
    compile_seconds: dict[str, float]
    eager_regions: dict[str, str]
    freed_activations: int
    last_step: dict[str, Traffic]
    total: dict[str, Traffic]
    memory: Memory

    @classmethod
    def read(
        cls,
        runtime: Runtime,
        ledger: Ledger,
        calls: Calls,
        optimizer: ShardedOptimizer | None,
        last_step: Mapping[str, Traffic],
        schedule_seconds: float,
    ) -> Stats:
        buckets = runtime.buckets.values()
        compiled = {} if calls.templates is None else calls.templates.phases.seconds
        return cls(
            compiled_calls=runtime.counts.compiled_calls,
            eager_calls=runtime.counts.eager_calls,
            on_demand_unshards=runtime.replay.on_demand,
            departures=runtime.replay.departures,
            regions=calls.regions,
            graphs=0 if calls.templates is None else calls.templates.graphs,
            templates=0 if calls.templates is None else calls.templates.templates,
            found_templates=0 if calls.templates is None else calls.templates.found,
            compile_seconds={**compiled, "schedule": schedule_seconds},
            eager_regions=dict(calls.eager_regions),
            freed_activations=runtime.activations.freed,
            last_step=dict(last_step),
            total=dict(ledger.totals()),
            memory=Memory(
                shards=sum(b.shard.nbytes for b in buckets if b.shard.dtype == b.dtype),
                masters=sum(b.shard.nbytes for b in buckets if b.shard.dtype != b.dtype),
                optimizer=0 if optimizer is None else optimizer.memory(),
                gradients=runtime.gradients.shards_peak,
                flats_peak=runtime.flats.peak,
                gradient_flats_peak=runtime.gradients.staging.peak,
            ),
        )
