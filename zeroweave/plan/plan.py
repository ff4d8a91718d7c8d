"""Plans of several stages, worlds and schedules, and which of them to take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from zeroweave.config import Config
from zeroweave.plan.hardware import Hardware
from zeroweave.plan.model import Source
from zeroweave.plan.rank import Measured, Planned, PlannedRank
from zeroweave.report.tables import tables
from zeroweave.schedule import flats_of

_GIB: Final = 2**30
_MIB: Final = 2**20
_MEMORY: Final = "parameters", "optimizer", "gradients", "activations", "flats", "peak", "host"
"""The columns of bytes, as `Row` has them."""
ROOM: Final = 0.9
"""The share of a GPU's memory that a plan may fill: the rest is for the driver, libraries and fragmentation."""


@dataclass(frozen=True)
class Row:
    """One rank's step. Seconds and bytes.

    schedule: "prefetch 1", "auto" (what an engine follows by itself) or "keep auto" (stage 3: with as many buckets kept
    gathered as there is room for). exposed: seconds in which the computation waits for collectives and copies.
    parameters: shards and masters. gradients: the reduced ones, and what backwards that do not reduce have added up.
    flats: of parameters and of gradients in flight, at most. activations: what the forward leaves for the backward; if
    they are moved to host memory, what of it is still on the device at its end. peak: everything together, at most.
    fits: true if that is within the room. All of these are on the device. host: everything in host memory, at most.
    """

    stage: int
    world: int
    schedule: str
    seconds: float
    exposed: float
    parameters: int
    optimizer: int
    gradients: int
    flats: int
    activations: int
    peak: int
    fits: bool
    host: int = 0
    group_size: int | None = None

    @property
    def name(self) -> str:
        groups = "" if self.group_size is None else f"groups of {self.group_size}, "
        return f"stage {self.stage}, {groups}{self.schedule}"


@dataclass(frozen=True)
class Advice:
    """The row to take on a world, or None if none fits, and why."""

    world: int
    take: Row | None
    reason: str


@dataclass(frozen=True)
class Plans:
    """rows: by world, stage and schedule. eager: regions that cannot be compiled, with the reason. room: bytes."""

    rows: tuple[Row, ...]
    advice: tuple[Advice, ...]
    eager: dict[str, str]
    room: int


def make(
    source: Source,
    stages: Sequence[int],
    worlds: Sequence[int],
    settings: Mapping[str, Any],
    hardware: Hardware,
    tell: Callable[[str], object] = lambda _: None,
    group_sizes: Sequence[int | None] = (None,),
) -> Plans:
    """One rank of each world at each stage, with AdamW. `settings`: of a config, all but the stage.

    `group_sizes`: of sharding groups; of those that are no smaller than a world, one: all ranks.

    `tell` is called with what is being planned, before each.

    EngineError where the model cannot run without values, see `PlannedRank.measure`, and for settings of which plans
    know nothing.
    """
    room = int(hardware.gpu.memory * ROOM)
    rows: list[Row] = []
    eager: dict[str, str] = {}
    for world in worlds:
        for stage in stages:
            for size in dict.fromkeys(None if size is None or size >= world else size for size in group_sizes):
                config = Config.load({**settings, "stage": stage, "sharding": _sharding(settings, size)})
                groups = "" if size is None else f" in groups of {size}"
                tell(f"planning stage {stage} on {world} {'rank' if world == 1 else 'ranks'}{groups}")
                found = PlannedRank(*source(), adamw, config, world, hardware).measure(room)
                eager |= found.eager
                rows += [
                    _row(stage, world, size, name, found, found.plan(**changes), room)
                    for name, changes in _schedules(stage, room).items()
                ]
    return Plans(tuple(rows), tuple(advise([r for r in rows if r.world == w], w, room) for w in worlds), eager, room)


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of plans."""
    return torch.optim.AdamW(parameters, fused=True)


def _schedules(stage: int, room: int) -> dict[str, dict[str, Any]]:
    """What is planned at a stage, by the names of rows: settings of `compile`."""
    found: dict[str, dict[str, Any]] = {"prefetch 1": {"prefetch": 1, "keep": "none"}, "auto": {}}
    return found | ({"keep auto": {"memory_budget": room}} if stage == 3 else {})


def _row(
    stage: int, world: int, group_size: int | None, schedule: str, found: Measured, plan: Planned, room: int
) -> Row:
    memory = found.memory
    return Row(
        stage=stage,
        world=world,
        schedule=schedule,
        seconds=plan.seconds,
        exposed=sum(plan.prediction.waits.values()),
        parameters=memory.shards + memory.masters - memory.host_shards - memory.host_masters,
        optimizer=memory.optimizer - memory.host_optimizer,
        gradients=memory.gradients + memory.local_sums,
        flats=max(flats_of(plan.schedule), default=0),
        activations=found.activations,
        peak=plan.peak,
        fits=plan.peak <= room,
        host=found.host,
        group_size=group_size,
    )


def advise(rows: Iterable[Row], world: int, room: int) -> Advice:
    """The fastest of the rows that fit; of those within a hundredth of it, the one that takes least memory."""
    rows = tuple(rows)
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.peak)
        return Advice(
            world,
            None,
            f"none fits into {room / 2**30:.1f} GiB: {least.name} takes least, {least.peak / 2**30:.1f} GiB; take more "
            "ranks, a smaller micro-batch, shorter sequences, or offload",
        )
    best = min(row.seconds for row in fitting)
    take = min((row for row in fitting if row.seconds <= best * 1.01), key=lambda row: row.peak)
    others = [row for row in rows if not row.fits and row.seconds < take.seconds]
    reason = f"of the {len(fitting)} that fit, it is the smallest within a hundredth of the fastest"
    if others:
        reason += (
            f"; {', '.join(row.name for row in others)} would be faster and takes more than {room / 2**30:.1f} GiB"
        )
    if take.host:
        reason += f"; each rank takes {take.host / 2**30:.1f} GiB of host memory"
    return Advice(world, take, reason)


def config_of(row: Row, settings: Mapping[str, Any], room: int) -> dict[str, Any]:
    """The config with which an engine trains as `row` says; what is a default is left out, but for the stage."""
    compiled = {**settings.get("compile", {}), **_schedules(row.stage, room)[row.schedule]}
    sharding = _sharding(settings, row.group_size)
    config = Config.load({**settings, "stage": row.stage, "compile": compiled, "sharding": sharding})
    return {"stage": row.stage, **config.model_dump(mode="json", exclude_defaults=True)}


def _sharding(settings: Mapping[str, Any], group_size: int | None) -> dict[str, Any]:
    return {**settings.get("sharding", {}), "group_size": group_size}


def lines(plans: Plans) -> Iterator[str]:
    """A table, with its unit of memory, and what to take. Host memory is a column where something is in it."""
    unit, name = (_GIB, "GiB") if max(row.peak for row in plans.rows) >= _GIB else (_MIB, "MiB")
    memory = [column for column in _MEMORY if column != "host" or any(row.host for row in plans.rows)]
    cells = []
    for row in plans.rows:
        sizes = [f"{getattr(row, column) / unit:.2f}" for column in memory]
        sizes[memory.index("peak")] += "" if row.fits else " !"
        cells.append((row.name, row.world, *sizes, f"{row.seconds:.4f}", f"{row.exposed:.4f}"))
    yield f"memory of each rank in {name}"
    yield from tables(("schedule", "ranks", *memory, "step s", "exposed s"), cells, keep=2)
    yield ""
    for advice in plans.advice:
        what = f"take {advice.take.name}" if advice.take is not None else "nothing fits"
        yield f"{advice.world} ranks: {what}: {advice.reason}"
    for module, reason in plans.eager.items():
        yield f"{module or 'the model'} runs eagerly: {reason}"
