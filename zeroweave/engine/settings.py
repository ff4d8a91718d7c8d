"""What the config decides: for the runtime, and for schedules, with the changes that are asked for later."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypedDict, Unpack

import torch
from pydantic import ValidationError
from torch.distributed.device_mesh import DeviceMesh

from zeroweave.config import Config
from zeroweave.config.messages import findings
from zeroweave.config.sections import CompileConfig, ReduceConfig
from zeroweave.errors import ConfigError, EngineError
from zeroweave.layout import BucketLayout, ParameterSpec, build_layout
from zeroweave.optim.scaler import checks
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.runtime.policy import Policy
from zeroweave.schedule import (
    PASSES,
    BucketFacts,
    Costs,
    Event,
    Facts,
    Pass,
    Schedule,
    budget,
    compile_schedule,
    lowered,
)

Prefetch = int | Literal["auto"]
Keep = Literal["auto", "none", "all"] | Iterable[str]


_REMAINDERS: Final = {"split": torch.int16, "float32": None}


def policy_of(
    config: Config, layouts: Sequence[BucketLayout], updated: Set[str], optional: Set[str] = frozenset()
) -> Policy:
    """What of a config the runtime follows.

    `updated`: the names of the parameters that the optimizer has in its groups; `optional`: of those in modules that
    some ranks may leave out.
    """
    precision = config.precision
    few = layouts if precision.optimizer == "compact" else ()
    at_times = [b for b in layouts if config.stage == 3 and any(slot.name in optional for slot in b.slots)]
    kept = at_times if config.stage == 3 else tuple(layouts)
    return Policy(
        kept_by_stage=frozenset(b.id for b in kept),
        optional=frozenset(b.id for b in at_times),
        stays=frozenset(b.id for b in kept if not b.trainable),
        op=config.reduce.op,
        reduce_dtype=None if precision.reduce is None else getattr(torch, precision.reduce),
        accumulate_dtype=getattr(torch, precision.accumulate),
        masters_off=config.offload.optimizer != "none" or config.offload.params,
        params_off=config.offload.params,
        states_fill=config.offload.optimizer == "all" and all(b.world == b.groups == 1 for b in layouts),
        remainder=_REMAINDERS[precision.master],
        compact=frozenset(b.id for b in few if any(slot.name in updated for slot in b.slots)),
        keep_gradient_targets=config.debug.keep_gradient_targets,
        free_threshold=config.activations.free_threshold_bytes,
        offload_threshold=config.offload.activations_threshold_bytes if config.offload.activations else None,
    )


def sharded_as(config: Config, mesh: DeviceMesh, ranks: Sequence[int]) -> Config:
    """`config` with the group size of a mesh ("replicate", "shard") of all `ranks`; ConfigError for any other mesh."""
    if mesh.mesh_dim_names != ("replicate", "shard") or mesh.mesh.flatten().tolist() != list(ranks):
        raise ConfigError(
            f"[ZW103] a mesh with dimensions {mesh.mesh_dim_names} of the ranks {mesh.mesh.tolist()}: make one of "
            f'{len(ranks)} ranks in order, with mesh_dim_names=("replicate", "shard")'
        )
    size = mesh.size(1)
    if config.sharding.group_size not in (None, size):
        raise ConfigError(
            f"[ZW103] sharding.group_size is {config.sharding.group_size}, and the mesh shards over {size} ranks: "
            "leave one out"
        )
    return config.model_copy(update={"sharding": config.sharding.model_copy(update={"group_size": size})})


def replicas_of(config: Config, world: int) -> int:
    """How many groups of `sharding.group_size` the ranks fall into; ConfigError where ranks are left over."""
    size = config.sharding.group_size or world
    if size > world or world % size:
        raise ConfigError(
            f"[ZW103] sharding.group_size {size} does not divide the {world} ranks: every rank belongs to a group of "
            "that many"
        )
    if size < world and config.experts.parallel_size > 1:
        raise ConfigError(
            "[ZW103] sharding.group_size and experts.parallel_size exclude each other: experts are sharded over the "
            "ranks that have the same ones; leave sharding.group_size out"
        )
    return world // size


def layouts_of(
    config: Config, specs: Iterable[ParameterSpec], world: int, groups: Mapping[str, int] | None = None
) -> tuple[BucketLayout, ...]:
    """The buckets of a config; see `build_layout`."""
    bucket, copied = config.bucket, config.sharding.states == "group"
    return build_layout(specs, world, bucket.bytes, bucket.by_block, groups, replicas_of(config, world), copied)


def facts_of(
    config: Config,
    layouts: Iterable[BucketLayout],
    policy: Policy,
    optimizer: ShardedOptimizer | None,
    least: int | None = None,
    fixed: bool = False,
    there: Set[int] = frozenset(),
) -> Facts:
    """What schedules are made from, before the settings are put in.

    `there`: the buckets whose flat is their shard: they are always gathered, and that takes no memory. `least`: copy
    engines gather buckets of at least so many bytes, each in a registered buffer; None: they gather none. `fixed`: all
    buckets have fixed addresses, which CUDA graphs need; those that the stage keeps have them without one.
    """
    layouts = tuple(layouts)
    whole = config.gradient_clipping is not None or checks(config, layouts)
    registered = frozenset(
        b.id
        for b in layouts
        if b.world > 1 and ((least is not None and b.nbytes >= least) or (fixed and b.id not in policy.kept_by_stage))
    )
    in_turn = optimizer is not None and optimizer.by_bucket
    return Facts(
        tuple(BucketFacts(b.id, b.name, 0 if b.id in there else b.nbytes, b.trainable) for b in layouts),
        kept_by_stage=policy.kept_by_stage,
        depth=config.reduce.depth,
        prefetch=1,
        update_by_bucket=in_turn and not whole,
        free=policy.free_threshold is not None,
        offload=policy.offload_threshold is not None,
        registered=registered,
        copied=frozenset() if least is None else registered,  # NCCL registers the memory of all buffers then
        replicated=frozenset(b.id for b in layouts if b.crosses and b.trainable),
        spread=frozenset(b.id for b in layouts if b.replicas > 1 and b.trainable),
    )


@dataclass(frozen=True)
class ScheduleSettings:
    """What of the config decides schedules; see docs/schedule.md.

    `keep`: "auto", "none", "all", or names of buckets. `memory_budget`: bytes of device memory, "auto" as
    `schedule.budget` has it, "none": no budget is computed, and `keep` "auto" keeps nothing. `stage`: true if
    asynchronous saves have been asked for.
    """

    prefetch: int | Literal["auto"]
    keep: Literal["auto", "none", "all"] | tuple[str, ...]
    memory_budget: int | Literal["auto", "none"]
    depth: int
    stage: bool = False

    def schedule(
        self,
        record: tuple[Event, ...],
        base: Facts,
        costs: Costs | None,
        measured: Schedule | None,
        passes: Sequence[Pass] = PASSES,
    ) -> Schedule:
        """That of a record, from `base` and these settings. `measured` is what `costs` were measured on."""
        memory = self.memory(costs, measured)
        while True:
            made = compile_schedule(record, self.facts(base, costs, memory), passes)
            if self.memory_budget != "auto" or memory is None or costs is None or measured is None:
                return made
            before, memory = memory, lowered(memory, made, costs, measured)
            if memory == before:
                return made

    def facts(self, base: Facts, costs: Costs | None = None, memory: int | None = None) -> Facts:
        """`base` with these settings. `memory`: see `Facts.memory`. EngineError for a bucket that does not exist."""
        return replace(
            base,
            prefetch=self.prefetch,
            keep=self._kept(base, memory),
            depth=self.depth,
            stage=self.stage,
            memory=memory,
            costs=costs,
        )

    def changes(self, before: ScheduleSettings) -> str:
        """What is not as `before`, in words; "" for nothing."""
        ours, theirs = asdict(self), asdict(before)
        return ", ".join(f"{name} {value}" for name, value in ours.items() if value != theirs[name])

    def memory(self, costs: Costs | None, measured: Schedule | None) -> int | None:
        """What `schedule` begins with as `Facts.memory`; it may end with less."""
        asked = self.memory_budget
        if costs is None or measured is None:
            return asked if isinstance(asked, int) else None
        match asked:
            case "auto":
                return budget(costs, measured)
            case int(most):
                return most - costs.resident
        return None

    def _kept(self, base: Facts, memory: int | None) -> frozenset[int] | Literal["auto"]:
        match self.keep:
            case "auto":
                return "auto" if memory is not None else frozenset()
            case "none":
                return frozenset()
            case "all":
                return frozenset(base.by_id)
        known = {bucket.name: bucket.id for bucket in base.buckets}
        if unknown := [name for name in self.keep if name not in known]:
            raise EngineError(f"keep names buckets that do not exist: {unknown}; there are {sorted(known)}")
        return frozenset(known[name] for name in self.keep)


class PlanChanges(TypedDict, total=False):
    """What of the settings a user changes besides the prefetch; None is no change."""

    keep: Keep | None
    memory_budget: int | Literal["auto", "none"] | None
    depth: int | None


def changes_of(prefetch: Prefetch | None = None, **others: Unpack[PlanChanges]) -> dict[str, Any]:
    """What a user asks for, as `replace` of ScheduleSettings takes it. EngineError where it is no such setting.

    What a setting may be is as in the config.
    """
    asked = {"prefetch": prefetch, **others}
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    changes: dict[str, Any] = {}
    for name, value in given.items():
        section = ReduceConfig if name == "depth" else CompileConfig
        try:
            changes[name] = getattr(section.model_validate({name: value}), name)
        except ValidationError as error:
            raise EngineError("; ".join(findings(error, section))) from None
    return changes


def settings_of(config: Config) -> ScheduleSettings:
    """The settings that an engine begins with."""
    wanted, depth = config.compile, config.reduce.depth
    # The optimizer's states take what room there is: both would take the same.
    shared = wanted.memory_budget == "auto" and config.offload.optimizer == "adaptive"
    most = "none" if shared else wanted.memory_budget
    return ScheduleSettings(wanted.prefetch, wanted.keep, most, depth)


def passes_of(config: Config) -> list[Pass]:
    """The user's passes that a config names; ConfigError where they cannot be imported."""
    passes: list[Pass] = []
    for name in config.compile.passes:
        try:
            found = pkgutil.resolve_name(name) if ":" in name else None
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"[ZW107] compile.passes: {name!r} cannot be imported: {error}") from None
        if not callable(found):
            raise ConfigError(f"compile.passes must be functions as 'module:function', not {name!r}")
        passes.append(found)
    return passes
