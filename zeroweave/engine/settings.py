"""What decides schedules: the settings of the config, and changes that are asked for later."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypedDict, Unpack

from zeroweave.config import Config
from zeroweave.errors import ConfigError, EngineError
from zeroweave.schedule import Costs, Facts, Pass, Schedule, simulate

Prefetch = int | Literal["auto"]
Keep = Literal["auto", "none", "all"] | Iterable[str]


@dataclass(frozen=True)
class ScheduleSettings:
    """What of the config decides schedules; see docs/schedule.md.

    `keep`: "auto", "none", "all", or names of buckets. `memory_budget`: bytes of device memory, None for no limit
    of its own. `stage`: has anybody asked for asynchronous saves?
    """

    prefetch: int | Literal["auto"]
    keep: Literal["auto", "none", "all"] | tuple[str, ...]
    memory_budget: int | None
    fuse: bool
    depth: int
    stage: bool = False

    def facts(self, base: Facts, costs: Costs | None, measured: Schedule | None) -> Facts:
        """`base` with these settings. `measured` is the schedule that `costs` were measured on."""
        memory = self.memory_budget
        if memory is not None and costs is not None and measured is not None and costs.peak:
            # What is allocated beside flats and activations does not change with the schedule.
            memory -= costs.peak - simulate(replace(measured, facts=replace(measured.facts, costs=costs)), costs).peak
        return replace(
            base,
            prefetch=self.prefetch,
            keep=self._kept(base),
            fuse=self.fuse,
            depth=self.depth,
            stage=self.stage,
            memory=memory,
            costs=costs,
        )

    def beside(self, before: ScheduleSettings) -> str:
        """What is not as `before`, in words; "" for nothing."""
        ours, theirs = asdict(self), asdict(before)
        return ", ".join(f"{name} {value}" for name, value in ours.items() if value != theirs[name])

    def _kept(self, base: Facts) -> frozenset[int] | Literal["auto"]:
        match self.keep:
            case "auto":
                return "auto" if self.memory_budget is not None else frozenset()
            case "none":
                return frozenset()
            case "all":
                return frozenset(base.by_id)
        known = {bucket.name: bucket.id for bucket in base.buckets}
        if unknown := [name for name in self.keep if name not in known]:
            raise EngineError(f"keep names buckets that do not exist: {unknown}; there are {sorted(known)}")
        return frozenset(known[name] for name in self.keep)


class PlanChanges(TypedDict, total=False):
    """What of the settings a user changes beside the prefetch; None is no change."""

    keep: Keep | None
    memory_budget: int | None
    fuse: bool | None
    depth: int | None


def changes_of(prefetch: Prefetch | None = None, **others: Unpack[PlanChanges]) -> dict[str, Any]:
    """What a user asks for, as `replace` of ScheduleSettings takes it. EngineError where it is no such setting."""
    asked = {"prefetch": prefetch, **others}
    changes: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    for name, least in (("prefetch", 0), ("memory_budget", 0), ("depth", 1)):
        value = changes.get(name, "auto")
        if value != "auto" and (not isinstance(value, int) or value < least):
            raise EngineError(f"{name} must be a whole number of at least {least}, not {value!r}")
    keep = changes.get("keep", "auto")
    if not isinstance(keep, str):
        changes["keep"] = tuple(keep)
    elif keep not in ("auto", "none", "all"):
        raise EngineError(f"keep must be 'auto', 'none', 'all' or names of buckets, not {keep!r}")
    return changes


def settings_of(config: Config) -> ScheduleSettings:
    """The settings that an engine begins with."""
    wanted = config.compile
    return ScheduleSettings(wanted.prefetch, wanted.keep, wanted.memory_budget, wanted.fuse, config.reduce.depth)


def passes_of(config: Config) -> list[Pass]:
    """The passes of one's own that a config names; ConfigError where they cannot be imported."""
    return [_import(name) for name in config.compile.passes]


def _import(name: str) -> Pass:
    """The function of "module:function"."""
    try:
        found = pkgutil.resolve_name(name) if ":" in name else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"compile.passes: {name!r} cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigError(f"compile.passes must be functions as 'module:function', not {name!r}")
    return found
