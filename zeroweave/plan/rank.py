"""One rank of a world that is not there: the engine's own runtime, regions and optimizer, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from zeroweave._torch.fx import map_tensors, run_random_plainly
from zeroweave._torch.modes import fake_tensors, value_errors
from zeroweave.comm.wrappers import Wire
from zeroweave.compile.bind import Boxed
from zeroweave.compile.frames import keep_package_from_dynamo
from zeroweave.compile.lower import Kind, Lower
from zeroweave.compile.progress import Phases
from zeroweave.config import Config
from zeroweave.eager.access import Access
from zeroweave.eager.hooks import hook_gradients
from zeroweave.eager.parameter_visibility import ParameterVisibility
from zeroweave.engine.calls import Calls, arguments_of, loss_of
from zeroweave.engine.model import specs_of
from zeroweave.engine.settings import ScheduleSettings, facts_of, layouts_of, policy_of, replicas_of, settings_of
from zeroweave.engine.stats import Memory
from zeroweave.errors import EngineError
from zeroweave.layout import BucketLayout
from zeroweave.notices import Journal
from zeroweave.optim.compact import refuse_compact
from zeroweave.optim.scaler import Scaler, checks
from zeroweave.optim.states import States
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.parameters.foreign import own_parameters
from zeroweave.parameters.module_parameters import rest
from zeroweave.parameters.stub import StubStatus
from zeroweave.plan.device import Meter, PlannedClock, PlannedCopies, PlannedKernels, PlannedTransport
from zeroweave.plan.hardware import Hardware
from zeroweave.plan.work import Program
from zeroweave.runtime.backward_order import Observer
from zeroweave.runtime.runtime import Runtime
from zeroweave.runtime.timeline import Timeline
from zeroweave.schedule import (
    Costs,
    Event,
    Facts,
    Line,
    Prediction,
    Reduce,
    Schedule,
    Step,
    Unshard,
    costs_of,
    simulate,
)


class _Backwards(Observer):
    """The backwards of one window after another, as the engine's has it."""

    def __init__(self, shown: ParameterVisibility, stage: int, optimizer: ShardedOptimizer) -> None:
        self._shown, self._stage, self._optimizer = shown, stage, optimizer
        self._ends = True

    def expect(self, ends: bool) -> None:
        """The next one ends its window, or does not."""
        self._ends = ends

    def reduces(self) -> bool:
        return self._stage > 1 or self._ends

    def backward_began(self) -> None:
        self._shown.show()
        if self._ends:
            self._optimizer.offload.run_ahead()

    def backward_ended(self, trained: bool) -> None:
        self._shown.hide()
        self._optimizer.offload.stand()


@dataclass(frozen=True)
class Planned:
    """A schedule of one rank, and what is expected of it.

    seconds: of the step, with what collectives take from concurrent computation. peak: bytes on the device, at most.
    """

    schedule: Schedule
    prediction: Prediction
    seconds: float
    peak: int


@dataclass(frozen=True)
class Measured:
    """A step that a rank has carried out, under the schedule `first` of its record, and what it took. Bytes.

    memory: the model state, as the tensors have it. activations: what the forward leaves for the backward. host:
    everything in host memory, at most. eager: regions that cannot be compiled, with the reason.
    """

    first: Schedule
    step: Step
    costs: Costs
    memory: Memory
    activations: int
    host: int
    eager: dict[str, str]
    _settings: ScheduleSettings
    _facts: Facts
    _collective: Line
    _beside: float

    def plan(self, **changes: Any) -> Planned:
        """What the engine would follow with these settings of `compile`, once it has measured its steps."""
        settings, costs = replace(self._settings, **changes), self.costs
        schedule = settings.schedule(self.first.record, self._facts, costs, self.first)
        expected = simulate(schedule, costs)
        seconds = expected.seconds + self._beside * self._hidden(expected, schedule)
        return Planned(schedule, expected, seconds, costs.resident + expected.peak)

    def _hidden(self, expected: Prediction, schedule: Schedule) -> float:
        """Seconds of collectives, without uploads before them, for which no call waits."""
        sent = 0.0
        for span in expected.spans:
            instruction = schedule.instructions[span.index]
            if isinstance(instruction, Unshard | Reduce):
                longest = self._collective(schedule.facts.sizes[instruction.bucket])
                sent += min(span.stop - span.start, longest) if span.lane != "compute" else 0.0
        return max(0.0, sent - sum(expected.waits.values()))


class PlannedRank:
    """Rank 0 of `world` ranks, with a model that is on `meta` and is used up.

    `batch` is one as `Engine.train_step` takes it, on `meta`: that of every micro-step. `optimizer` makes one of
    parameters. EngineError for settings that plans do not know.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        config: Config,
        world: int,
        hardware: Hardware,
    ) -> None:
        self._config, self._model, self._hardware = config, model, hardware
        self._clock = clock = PlannedClock()
        self._meter = meter = Meter(clock, hardware)
        named, cpu = own_parameters(model), torch.device("cpu")
        layouts = layouts_of(config, specs_of(model, named, frozenset(), config, None), world)
        self._group_size = world // replicas_of(config, world)
        _refuse(config, layouts)
        policy, moments_off = policy_of(config, layouts, named.keys()), config.offload.optimizer != "none"
        compact = config.precision.optimizer == "compact"
        self._fake = fake_tensors()
        with self._fake:
            self._wire = wire = Wire(PlannedTransport(world, clock, hardware, self._group_size), cpu, clock)
            self._runtime = runtime = Runtime(
                layouts, wire, policy, issuing=wire.issuing, streams=lambda _: PlannedCopies(meter, clock, hardware)
            )
            offloading = runtime.activations.offloading
            clock.attach(runtime.flats, None if offloading is None else offloading.away)
            made, keys = optimizer(list(own_parameters(model).values())), runtime.directory.slots
            slot_of = {id(p): keys[name] for name, p in named.items()}
            del named
            at = rest(model, StubStatus(), lambda name, _: runtime.buckets[keys[name][0]].real[keys[name][1]])
            buckets = list(runtime.buckets.values())
            if compact:
                refuse_compact(made, layouts)
            fast = PlannedKernels(clock, hardware)
            self._optimizer = ShardedOptimizer(
                made, buckets, slot_of, runtime.transfers, States(), moments_off, kernels=fast, compact=compact
            )
            self._scaler = Scaler(runtime.gradients, None, False, wire, cpu)
            there = frozenset(bucket.id for bucket in buckets if bucket.is_shard)
            self._facts = facts_of(config, layouts, policy, self._optimizer, there=there)
            access = Access(model, runtime)
            hook_gradients(runtime, {})
            shown = ParameterVisibility(runtime, at, access)
            self._calls = Calls(
                model, runtime, config, access, shown, "cpu", 0, Journal(0), lambda: False, self._program
            )
            self._backwards = _Backwards(shown, config.stage, self._optimizer)
            runtime.attach(self._backwards)
            self._batch = map_tensors(_on_cpu, batch)
            meter.hold(self._held(model, buckets))

    def _held(self, model: nn.Module, buckets: Sequence[Any]) -> list[torch.Tensor]:
        """What is always on the device; the model's buffers among it, which are put there."""
        homes = [bucket.home for bucket in buckets]
        held = [tensor for home in homes for tensor in home.on_device]
        held += [home.source for home in homes if not home.source_on_host]
        held += [bucket.near.values for bucket in buckets if bucket.near is not None]
        buffers = {id(b): _on_cpu(b) for b in model.buffers()}
        for module in model.modules():
            module._buffers.update({n: buffers[id(b)] for n, b in module._buffers.items() if b is not None})
        held += buffers.values()
        map_tensors(held.append, self._batch)
        return held

    def _program(self, lower: Lower, graph: fx.GraphModule, inputs: Sequence[Any], kind: Kind, phases: Phases) -> Boxed:
        run_random_plainly(graph)
        return Program(graph.graph, self._hardware, lower == "inductor", self._clock.spend, self._meter.program)

    # ------------------------------------------------------------------ steps
    def _step(self, schedule: Schedule | None) -> tuple[tuple[Event, ...], int]:
        """A whole step that follows `schedule`, on demand without one: its record, and what forwards leave at most."""
        runtime, replay, gradients = self._runtime, self._runtime.replay, self._runtime.gradients
        runtime.next_window(schedule)
        steps = self._config.gradient_accumulation_steps
        with self._fake, self._meter:
            left = max(self._micro_step(number + 1 == steps) for number in range(steps))
            if not replay.arrive():
                replay.record.prune(replay.record.needed())
            absent, record = gradients.absent(gradients.had_gradient()), tuple(replay.record)
            updates = frozenset(absent)
            if self._config.gradient_clipping is not None:
                self._scaler.clip(self._config.gradient_clipping)
            optimizer = self._optimizer
            update = optimizer.in_turn(self._scaler.take, absent, replay.update_order(updates))
            replay.finish(update, updates)
            for bucket in absent:
                runtime.buckets[bucket].renew()
        self._scaler.next_window()
        runtime.release_kept()
        return record, left

    def _micro_step(self, ends: bool) -> int:
        """Bytes that the forward has left alive. `ends`: the window does with it."""
        runtime, steps, begin = self._runtime, self._config.gradient_accumulation_steps, self._meter.made
        args, kwargs = arguments_of(self._batch)
        output = self._calls.forward(args, kwargs)
        loss = loss_of(output, self._batch, None)
        del output
        offloading = runtime.activations.offloading
        away = runtime.transfers.staged.now + (0 if offloading is None else offloading.away.now)
        left = self._meter.alive(begin) - away
        self._backwards.expect(ends)
        (loss / steps if steps > 1 else loss).backward()
        return left

    def measure(self, room: int = 0) -> Measured:
        """A step on demand, which is recorded, and one that follows the schedule of that and is timed.

        Between them are two more where states travel: these come and go at other times than in their first step.

        `room`: bytes of the device that may be in use at most, for schedules that fill what is free; 0: unknown.

        EngineError, which names the module, if the program asks for values: no tensor has any.
        """
        try:
            record, _ = self._step(None)
        except value_errors() as error:
            where = innermost(error, self._model)
            raise EngineError(
                f"[ZW901] {where} needs values of tensors to go on ({str(error).splitlines()[0]}), and a plan has "
                "none: plan the model without it"
            ) from error
        settings, executor = settings_of(self._config), self._runtime.replay.executor
        first = settings.schedule(record, self._facts, None, None)
        timeline = Timeline(self._clock)
        if self._config.offload.optimizer != "none":
            for _ in range(2):
                self._step(first)
        self._runtime.next_window(first)
        self._clock.restart_peak()
        executor.note_times(timeline)
        self._wire.time(timeline.collectives)
        _, left = self._step(first)
        self._wire.time(None)
        executor.note_times(None)
        step, offloading = timeline.step(first), self._runtime.activations.offloading
        memory = Memory.read(self._runtime, self._optimizer, graphs=0)
        return Measured(
            first,
            step,
            costs_of([step], room),
            memory,
            left,
            memory.host + (0 if offloading is None else offloading.host.peak),
            dict(self._calls.eager_regions),
            settings,
            self._facts,
            self._hardware.collective(self._group_size),
            self._hardware.efficiency.contention,
        )


def innermost(error: BaseException, model: nn.Module) -> str:
    """The module of `model` in whose forward an exception was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    where, trace = "", error.__traceback__
    while trace is not None:
        where = names.get(id(trace.tb_frame.f_locals.get("self")), where)
        trace = trace.tb_next
    return repr(where) if where else "the model"


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _refuse(config: Config, layouts: Sequence[BucketLayout]) -> None:
    """EngineError for what a plan would leave out."""
    unknown = {
        "offload.optimizer 'adaptive', whose share is measured on the GPU ('none' and 'all' are its bounds)": (
            config.offload.optimizer == "adaptive"
        ),
        "experts": config.experts.parallel_size > 1,
        "activations": config.activations.free_threshold_bytes is not None,
        "precision.loss_scale or on_nonfinite": checks(config, layouts),
    }
    if named := [key for key, is_set in unknown.items() if is_set]:
        raise EngineError(f"[ZW902] a plan knows nothing about {', '.join(named)}: leave that out of the config")


keep_package_from_dynamo("zeroweave")
