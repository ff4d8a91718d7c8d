"""From a user's model and optimizer to an engine: checked, broadcast, sharded, swapped, installed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from zeroweave._triton import kernels
from zeroweave.comm.copy_engine import Choice
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import take_device
from zeroweave.comm.registered_buffers import RegisteredBuffers, fixed_buffers
from zeroweave.comm.wrappers import Grouped, Paired, Wire, fenced
from zeroweave.compile.regions import matching
from zeroweave.config import Config
from zeroweave.eager.access import Access
from zeroweave.eager.hooks import hook_gradients
from zeroweave.eager.parameter_visibility import ParameterVisibility
from zeroweave.engine import Engine
from zeroweave.engine.agreements import Agreements
from zeroweave.engine.calls import Calls
from zeroweave.engine.checkpoints.checkpoints import Checkpoints
from zeroweave.engine.context import EngineContext
from zeroweave.engine.guard import Guard, Progress
from zeroweave.engine.headroom import SHORT, Headroom, ranks_beside
from zeroweave.engine.logs.log import AfterStep, Log, is_asked_for, refuse_missing, sinks_of
from zeroweave.engine.logs.sinks import Sink
from zeroweave.engine.model import agree_on, fill, share_buffers, specs_of
from zeroweave.engine.parameter_access import ParameterAccess
from zeroweave.engine.samples import Samples
from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.settings import (
    facts_of,
    layouts_of,
    passes_of,
    policy_of,
    replicas_of,
    settings_of,
    sharded_as,
)
from zeroweave.engine.stats import Stats
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.transports import Communicators, gather_by
from zeroweave.engine.window import Window
from zeroweave.errors import ConfigError, EngineError, ParameterError
from zeroweave.experts import find_experts, groups_of
from zeroweave.layout import WORLD, BucketLayout
from zeroweave.notices import Journal, warn
from zeroweave.optim.adaptive import Adaptive
from zeroweave.optim.compact import refuse_compact
from zeroweave.optim.groups import serve_modes
from zeroweave.optim.matrices import Whole
from zeroweave.optim.multi_optimizer import Schedulers, WholeMatrices, as_one, given, members_of
from zeroweave.optim.optimizer_check import check_optimizers, in_no_group
from zeroweave.optim.rules import Kernels
from zeroweave.optim.scaler import Scaler, checks, loss_scale_of
from zeroweave.optim.state_dict import StateDicts, weak
from zeroweave.optim.states import States, agree, take
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.parameters.foreign import foreign_parameters, move, own_parameters
from zeroweave.parameters.module_parameters import rest
from zeroweave.parameters.structure_check import check_structure
from zeroweave.parameters.stub import StubStatus
from zeroweave.parameters.weights import Buffers, Weights, WeightsLike, weights_of
from zeroweave.ranks.alarm import Alarm
from zeroweave.ranks.control import Control
from zeroweave.ranks.faults import Fault, Faults
from zeroweave.ranks.signals import NUMBERS, Notes, check_thread, listen
from zeroweave.ranks.start import start_process_group
from zeroweave.runtime.call_graphs import CallGraphs
from zeroweave.runtime.cuda_capture import capture_for
from zeroweave.runtime.runtime import Runtime
from zeroweave.schedule import Facts

Optimizers = torch.optim.Optimizer | WholeMatrices | Sequence[torch.optim.Optimizer | WholeMatrices]
OptimizerLike = Optimizers | Callable[[list[nn.Parameter]], Optimizers]
SchedulerLike = LRScheduler | Sequence[LRScheduler]


def initialize(
    model: nn.Module,
    optimizer: OptimizerLike | None = None,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    lr_scheduler: SchedulerLike | Callable[[torch.optim.Optimizer], SchedulerLike] | None = None,
    process_group: dist.ProcessGroup | None = None,
    weights: WeightsLike | None = None,
    mesh: DeviceMesh | None = None,
) -> Engine:
    """Shards `model` and its optimizer over the ranks of `process_group` and returns the engine.

    Collective. Without a process group one is started from the environment (torchrun's variables), a world
    of 1 without those; it stays for later engines and ends with the process. Rank 0's weights and buffers are
    taken on all ranks; of experts that not all ranks share (`experts` of the config) those of the first rank that has
    them. Where the group has NCCL the model moves to `cuda:LOCAL_RANK`, or to the only GPU that the process sees, which
    becomes the current device; else it stays.

    `optimizer`: an element-wise torch.optim optimizer over `model.parameters()`, a callable from the
    parameters to one, or None for evaluation only. It stays the user's object, with its groups. State that it has is
    taken like the weights: rank 0's on all ranks. `torch.optim.Muon`, and what is marked by `WholeMatrices`, gets
    whole parameters, each on one rank. A list of optimizers without a parameter in common steps as one, which is then
    the engine's.

    `lr_scheduler`: a learning-rate scheduler of that optimizer, a list of them, or a callable from
    the optimizer to either; each optimizer step that is not skipped moves it.

    `weights`: what the parameters are to begin with, instead of the values that they have: a safetensors file, a folder
    of them, of which each rank reads its part, or a function `fill(name, tensor)`, which rank 0 calls. So a model that
    was made under `with torch.device("meta"):` is never whole anywhere. Without `weights` its modules initialise
    themselves, on rank 0, as `reset_parameters` has it.

    `mesh`: of all ranks, with dimensions ("replicate", "shard"); the size of the latter is `sharding.group_size`.

    Raises ConfigError for a wrong config and ParameterError or EngineError for a model or an optimizer
    that is refused; nothing has been changed then.
    """
    try:
        asked: _Arguments | Exception = _checked(model, optimizer, config, lr_scheduler, weights)
    except Exception as error:
        asked = error  # raised when the ranks have met: the others may not have it, and must not wait for this one
    settings = Config() if isinstance(asked, Exception) else asked.settings
    ends = ExitStack()
    try:
        if process_group is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            start_process_group(settings.deadline_seconds)
        group = process_group or (dist.group.WORLD if dist.is_initialized() else None)
        device = take_device(group)
        control = Control.over(group, settings.deadline_seconds)
        ends.callback(control.close)
        ledger = Ledger(control.world, control.rank, gathers_on_entry=settings.stage == 3)
        progress = Progress(ledger)
        alarm = Alarm(control, ledger, lambda: progress.step)  # from here on no rank waits for one that has failed
        ends.callback(alarm.close)
        guard = Guard(alarm, progress)
        with guard("initialize"):
            if isinstance(asked, Exception):
                raise asked
            if mesh is not None:
                ranks = [0] if group is None else dist.get_process_group_ranks(group)
                asked = replace(asked, settings=sharded_as(asked.settings, mesh, ranks))
            return _assemble(model, asked, group, device, control, guard, ends)
    except BaseException:
        ends.close()
        raise


@dataclass(frozen=True)
class _Arguments:
    """What `initialize` was asked for, checked on one rank alone. `experts`: see `specs_of`."""

    settings: Config
    optimizer: torch.optim.Optimizer | None
    whole: frozenset[int]
    """by `id`, the parameters that are updated as wholes"""
    scheduler: Any
    experts: frozenset[int]
    weights: Weights
    buffers: Buffers
    fault: Fault | None


def _checked(
    model: nn.Module, optimizer: OptimizerLike | None, config: Any, lr_scheduler: Any, weights: WeightsLike | None
) -> _Arguments:
    """Raises what `initialize` does for arguments that are refused."""
    settings, fault = Config.load(config), Fault.asked_for()
    if settings.checkpoint.save_on_signal is not None:
        check_thread()
    passes_of(settings)
    refuse_missing(settings)
    check_structure(model)
    experts = find_experts(model, settings.experts)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(own_parameters(model).values()))
    passed = [] if optimizer is None else given(optimizer)
    check_optimizers(passed, model)
    one = as_one([each.optimizer for each in passed]) if passed else None
    whole = frozenset(
        id(p) for each in passed if each.whole for group in each.optimizer.param_groups for p in group["params"]
    )
    source = weights_of(model, weights)
    scheduler = _scheduler_of(lr_scheduler, one)
    return _Arguments(settings, one, whole, scheduler, experts, source, Buffers(model, source), fault)


def _scheduler_of(passed: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """The scheduler itself, made here if a callable was given. EngineError for anything that is none."""
    if passed is None:
        return None
    if optimizer is None:
        raise EngineError("[ZW305] lr_scheduler needs an optimizer: pass both to zeroweave.initialize, or neither")
    made = passed(optimizer) if callable(passed) and not _is_scheduler(passed) else passed
    schedulers = list(made) if isinstance(made, list | tuple) and made else [made]
    for each in schedulers:
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise EngineError("[ZW305] ReduceLROnPlateau needs a metric: step it yourself after engine.step()")
        if not _is_scheduler(each):
            what = "what the callable made is" if made is not passed else "it is"
            raise EngineError(
                "[ZW305] lr_scheduler must be a scheduler such as those of torch.optim.lr_scheduler, a list of them, "
                "or a callable from the optimizer to either, for instance "
                f"lambda optimizer: CosineAnnealingLR(optimizer, T_max=100); {what} of type {type(each).__name__}"
            )
        if getattr(each, "optimizer", optimizer) not in (optimizer, *members_of(optimizer)):
            raise EngineError(
                "[ZW305] lr_scheduler moves the learning rates of another optimizer than the one that was passed"
            )
    return made if made is schedulers[0] else Schedulers(schedulers)


def _is_scheduler(value: Any) -> bool:
    return callable(getattr(value, "step", None)) and not isinstance(value, type | torch.optim.Optimizer)


def _assemble(
    model: nn.Module,
    asked: _Arguments,
    group: dist.ProcessGroup | None,
    device: torch.device,
    control: Control,
    guard: Guard,
    ends: ExitStack,
) -> Engine:
    """`ends` ends what was started for the engine, and what is started here."""
    ledger = guard.progress.ledger
    settings, optimizer, experts = asked.settings, asked.optimizer, asked.experts
    sinks = sinks_of(settings, ends) if control.rank == 0 and optimizer is not None else []
    named, foreign = own_parameters(model), foreign_parameters(model)
    if foreign:
        warn(f"frozen parameters stay as each rank has them, whole, and are not saved: {foreign}", control.rank)
    own = experts if settings.experts.parallel_size > 1 else frozenset()
    specs = specs_of(model, named, own, settings, optimizer)
    agree_on(control, model, specs, settings)
    told = agree(control, optimizer, named, asked.whole)
    if optimizer is not None and (left := in_no_group(optimizer, named)):
        warn(left, control.rank)
    groups, replicas = groups_of(settings.experts, control.world), replicas_of(settings, control.world)
    layouts = layouts_of(settings, specs, control.world, groups)
    has = set() if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    outside = [m for _, m in matching(model, settings.sharding.optional, "sharding.optional")]
    optional = {id(p) for module in outside for p in module.parameters()}
    updated, at_times = ({name for name, p in named.items() if id(p) in ids} for ids in (has, optional))
    policy = policy_of(settings, layouts, updated, at_times)
    if compact := settings.precision.optimizer == "compact":
        refuse_compact(optimizer, layouts)
    _refuse_experts(layouts, {name for name, parameter in named.items() if id(parameter) in asked.whole})
    try:
        settings_of(settings).facts(facts_of(settings, layouts, policy, None))
    except EngineError as error:  # it names buckets that the layout does not have
        raise ConfigError(f"[ZW106] compile.{error}") from None
    ledger.names.update((b.id, b.name) for b in layouts)
    journal = Journal(control.rank)
    communicators = Communicators(group, control, device, ledger, groups, ends, replicas)
    transports = communicators.transports()
    registered, choice = RegisteredBuffers(), Choice("nothing is trained, and so no schedule says where")
    if optimizer is not None:
        registered, choice = gather_by(settings.transport.gathers, transports, communicators, layouts, journal)
    meeting = fenced(Grouped(transports) if len(transports) > 1 else transports[WORLD], device, settings.debug)
    ways_differ = ledger.gathers_on_entry and device.type == "cpu" and control.world > 1
    paired = partial(Paired, control=control, ledger=ledger) if ways_differ else None
    transport = Wire(meeting, device, paired=paired)
    trains = optimizer is not None
    capture = capture_for(device) if settings.compile.enabled and settings.compile.cuda_graphs else None
    call_graphs = None
    if capture is not None:
        call_graphs = CallGraphs(
            device,
            capture,
            lambda why: journal.tell("fallback", f"compile.cuda_graphs: {why}"),
            settings.debug.check_graphs,
        )
        ends.callback(call_graphs.close)
        if choice.least is None and control.world > 1:
            registered = fixed_buffers(device, ledger.gauge("registered buffers"))
    runtime = Runtime(
        layouts, transport, policy, ledger.entering, transport.issuing, trains, registered, graphs=call_graphs
    )
    fill(runtime, named, asked.weights)
    runtime.transfers.finish()
    asked.buffers.give()
    move(model, device)
    runtime.writes.watch()
    share_buffers(model, device, runtime)
    buckets, moments_off, states = list(runtime.buckets.values()), settings.offload.optimizer != "none", States()
    if optimizer is not None:
        home = torch.device("cpu") if moments_off else device
        states = take(optimizer.state, buckets, named, told, transport, device, lambda _: home)

    keys = runtime.directory.slots
    original = {name: p.dtype for name, p in named.items()}
    slot_of = {id(p): keys[name] for name, p in named.items()}
    del named
    stubs = StubStatus()
    module_parameters = rest(model, stubs, lambda name, old: runtime.buckets[keys[name][0]].real[keys[name][1]])
    sharded = None
    if optimizer is not None:
        whole = Whole(asked.whole, transport, control) if asked.whole else None
        fast = cast(Kernels | None, kernels("rules", device.type))
        sharded = ShardedOptimizer(
            optimizer, buckets, slot_of, runtime.transfers, states, moments_off, whole, fast, compact
        )
        states.clear()
    context = EngineContext(
        model=model,
        config=settings,
        runtime=runtime,
        transport=transport,
        control=control,
        progress=guard.progress,
        guard=guard,
        journal=journal,
        agreements=Agreements(control, transport, guard.progress, Notes((*NUMBERS, SHORT))),
        module_parameters=module_parameters,
        stubs=stubs,
        optimizer=sharded,
        original_dtypes=original,
        device=device,
        gathers=choice,
        ends=ends,
    )
    faults = Faults(asked.fault, control.rank, control.world, lambda: guard.progress.step)
    there = frozenset(bucket.id for bucket in buckets if bucket.is_shard)
    facts = facts_of(settings, layouts, runtime.policy, sharded, choice.least, call_graphs is not None, there)
    return _compose(context, facts, asked.scheduler, faults, sinks)


def _refuse_experts(layouts: Iterable[BucketLayout], whole: Set[str]) -> None:
    """ParameterError for parameters that are to be updated as wholes, and are not the same on all ranks."""
    if names := [slot.name for b in layouts if b.groups > 1 for slot in b.slots if slot.name in whole]:
        raise ParameterError(
            f"[ZW304] {', '.join(names)}: ranks have experts of their own there, whose matrices are not put together; "
            "give them to an element-wise optimizer, and the others to the one that computes with whole matrices"
        )


def _compose(context: EngineContext, facts: Facts, lr_scheduler: Any, faults: Faults, sinks: Sequence[Sink]) -> Engine:
    """The engine, of objects that each know those before them."""
    settings, runtime = context.config, context.runtime
    sharing = ranks_beside(context.control, context.device)
    scheduler = Scheduler(context, facts, Headroom(context.transport, context.agreements, sharing))
    access = Access(context.model, runtime)
    for handle in hook_gradients(runtime, context.module_parameters.names):
        context.ends.callback(handle.remove)
    shown = ParameterVisibility(runtime, context.module_parameters, access)
    context.stubs.attach(shown.read)
    calls = Calls(
        context.model,
        runtime,
        settings,
        access,
        shown,
        context.device.type,
        context.control.rank,
        context.journal,
        lambda: context.progress.step == 0,
    )
    layouts = [b.layout for b in runtime.buckets.values()]
    scaler = Scaler(
        runtime.gradients,
        loss_scale_of(settings, layouts),
        checks(settings, layouts),
        context.transport,
        context.device,
    )
    window = Window(context, scaler, scheduler, shown)
    runtime.attach(faults.before(window, "backward_began", "backward"))
    if settings.gather_after_step:
        shown.open()
    updating = faults.before(scaler, "take", "update")
    adaptive, budget, clock = None, settings.offload.memory_budget, context.transport.clock
    if budget is not None and context.optimizer is not None:
        adaptive = Adaptive(context.optimizer.offload, budget, clock.peak, clock.restart_peak)
    step = OptimizerStep(context, window, updating, scheduler, shown, adaptive, lr_scheduler)
    parameter_access = ParameterAccess(context, window, scaler, shown)
    checkpoints = Checkpoints(context, window, step, scheduler, parameter_access, faults)
    if context.optimizer is not None:
        served = StateDicts(
            context.optimizer, context.module_parameters.names, context.transport, context.control, checkpoints.alone
        )
        context.ends.callback(served.close)
        shows = weak(parameter_access.optimizer_shown)
        serve_modes(context.optimizer.optimizer, context.optimizer.groups, shows, context.ends)
    if settings.checkpoint.save_on_signal is not None:
        context.ends.callback(listen(context.agreements.notes).close)

    def stats() -> Stats:
        return Stats.read(context, calls, step.traffic, scheduler)

    samples = Samples.asked_for(context, scheduler, step, stats)
    log = Log(context, scheduler, step, sinks) if is_asked_for(settings) and context.optimizer is not None else None
    after_step = AfterStep(context.transport, log, samples)
    running = faults.before(calls, "forward", "forward")
    return Engine(context, running, scheduler, window, step, parameter_access, checkpoints, after_step, stats)
