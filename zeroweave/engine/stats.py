"""What an engine tells about itself: counters, traffic, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zeroweave.comm.ledger import Traffic
from zeroweave.engine.calls import Calls
from zeroweave.engine.context import EngineContext
from zeroweave.engine.scheduler import Scheduler
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.runtime.runtime import Runtime


@dataclass(frozen=True)
class Memory:
    """Bytes of this rank's model state, measured on the tensors themselves.

    `shards`: in the dtype of the computation, with what sharding groups gather from. `masters`: of trained parameters
    that are computed with in a narrower dtype; they stand in for their shards, which are rounded from them when they
    are gathered. At most at once, since the last change of the schedule by measured times or by `engine.reschedule`:
    `gradients`, the reduced ones; `local_sums`, what backwards without a reduction have added up; `flats_peak`, all
    flats that were unsharded; `gradient_flats_peak`, the gradient flats of reductions in flight. `symmetric`: the
    registered buffers; flats are stored there, and they stay. `graphs`: what CUDA graphs hold for their replays,
    besides the tensors that are stored there. With offload, what is gathered of a master in host memory
    counts as a shard; `host_…` is what of the same figures is in host memory.
    """

    shards: int
    masters: int
    optimizer: int
    gradients: int
    local_sums: int
    flats_peak: int
    gradient_flats_peak: int
    symmetric: int = 0
    graphs: int = 0
    host_shards: int = 0
    host_masters: int = 0
    host_optimizer: int = 0

    @property
    def host(self) -> int:
        """Bytes of shards, masters and optimizer state in host memory."""
        return self.host_shards + self.host_masters + self.host_optimizer

    @property
    def device(self) -> int:
        """Bytes of shards, masters and optimizer state on the device."""
        return self.shards + self.masters + self.optimizer - self.host

    @classmethod
    def read(cls, runtime: Runtime, optimizer: ShardedOptimizer | None, graphs: int) -> Memory:
        homes = [bucket.home for bucket in runtime.buckets.values()]
        near = [bucket.near for bucket in runtime.buckets.values() if bucket.near is not None]
        masters = [home for home in homes if home.wider]
        sources = [home for home in homes if not home.wider or (home.hosts and not home.is_split)]
        return cls(
            shards=sum(home.source.nbytes for home in sources) + sum(each.values.nbytes for each in near),
            masters=sum(tensor.nbytes for home in masters for tensor in home.at_rest),
            optimizer=0 if optimizer is None else optimizer.memory(),
            gradients=runtime.gradients.settled.peak,
            local_sums=runtime.gradients.local_peak,
            flats_peak=runtime.flats.peak,
            gradient_flats_peak=runtime.gradients.flats.peak,
            symmetric=runtime.registered_buffers.nbytes,
            graphs=graphs,
            host_shards=sum(home.source.nbytes for home in sources if home.source_on_host),
            host_masters=sum(host.tensor.nbytes for home in masters for host in home.hosts),
            host_optimizer=0 if optimizer is None else optimizer.offload.host_nbytes(),
        )


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of everything that PyTorch has on the device of this rank; 0 where PyTorch does not count.

    At most so far: `allocated`, for tensors, and `reserved`, of the device. `foreseen`: allocated at most in a step
    that follows the present schedule, by what was measured; 0 before that. `budget`: what of it flats, reductions
    in flight and activations may fill; None: as much as without a budget.
    """

    allocated: int = 0
    reserved: int = 0
    foreseen: int = 0
    budget: int | None = None


@dataclass(frozen=True)
class Stats:
    """A snapshot. Counters run from the start of the engine.

    `on_demand_unshards`: gathers that a schedule should have ordered and did not. `departures`: steps that
    left their schedule. `graphs`: captured by Dynamo. `templates`: lowered. `found_templates`: those of them that
    Inductor's cache had, from an earlier run or another rank. `compile_seconds`: see `compile.progress.Phases`,
    and what making schedules took. `eager_regions`: regions that are not compiled, with the reason.
    `eager_modules`: modules with parameters outside of all regions, which always run eagerly.
    With `compile.cuda_graphs`, `graphed_calls`: executions of templates that were launched as graphs;
    `ungraphed_calls`: why others were not, and how often. `graph_difference`: with `debug.check_graphs`, the largest
    difference between what a graph has computed and what its code computes.
    `written_gradients`: those that backwards wrote, or added, where they are reduced from: nothing copied them.
    `freed_activations`: bytes that `activations.free_threshold_bytes` has freed. `offloaded_activations`: bytes that
    the last step has moved to host memory, `offloaded_peak` how many were there at most so far; `on_demand_reloads`:
    storages among them that a backward asked for before its schedule had brought them back. `gathers`: by kernel or by
    copy engine, and why. `last_step`, `total`: traffic by kind of collective. `memory`: of the model state; `device`:
    of everything.
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
    eager_modules: tuple[str, ...]
    written_gradients: int
    freed_activations: int
    offloaded_activations: int
    offloaded_peak: int
    on_demand_reloads: int
    gathers: str
    last_step: dict[str, Traffic]
    total: dict[str, Traffic]
    memory: Memory
    graphed_calls: int
    ungraphed_calls: dict[str, int]
    graph_difference: float
    device: DeviceMemory = DeviceMemory()

    @classmethod
    def read(
        cls, context: EngineContext, calls: Calls, last_step: Mapping[str, Traffic], scheduler: Scheduler
    ) -> Stats:
        runtime, templates, graphs = context.runtime, calls.templates, context.runtime.graphs
        offloading = runtime.activations.offloading
        compiled = {} if templates is None else templates.phases.seconds
        return cls(
            compiled_calls=runtime.compiled_calls,
            eager_calls=runtime.eager_calls,
            on_demand_unshards=runtime.replay.on_demand,
            departures=runtime.replay.departures,
            regions=calls.regions,
            graphs=0 if templates is None else templates.graphs,
            templates=0 if templates is None else templates.templates,
            found_templates=0 if templates is None else templates.found,
            compile_seconds={**compiled, "schedule": scheduler.seconds},
            eager_regions=dict(calls.eager_regions),
            eager_modules=calls.eager_modules,
            graphed_calls=0 if graphs is None else graphs.launched,
            ungraphed_calls={} if graphs is None else dict(graphs.why),
            graph_difference=0.0 if graphs is None else graphs.difference,
            written_gradients=runtime.gradients.written,
            freed_activations=runtime.activations.freed,
            offloaded_activations=0 if offloading is None else offloading.moved_before,
            offloaded_peak=0 if offloading is None else offloading.host.peak,
            on_demand_reloads=0 if offloading is None else offloading.on_demand,
            gathers=_gathers(context),
            last_step=dict(last_step),
            total=dict(context.progress.ledger.totals()),
            memory=Memory.read(runtime, context.optimizer, 0 if graphs is None else graphs.nbytes),
            device=DeviceMemory(
                allocated=context.transport.clock.peak(),
                reserved=context.transport.clock.reserved(),
                foreseen=scheduler.foreseen,
                budget=None if scheduler.schedule is None else scheduler.schedule.facts.memory,
            ),
        )


def _gathers(context: EngineContext) -> str:
    refused = context.runtime.registered_buffers.refused
    if refused is None or context.gathers.least is None:
        return str(context.gathers)
    return f"{context.gathers}; by kernel from {refused / (1 << 20):g} MiB on, as there was no memory left"
