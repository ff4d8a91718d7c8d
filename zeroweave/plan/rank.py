"""One rank of a world that is not there: the engine's own runtime, regions and optimizer, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from zeroweave._torch.fake import value_errors, without_memory
from zeroweave._torch.fx import map_tensors
from zeroweave.comm.wire import Wire
from zeroweave.compile.bind import Boxed
from zeroweave.compile.frames import keep_package_from_dynamo
from zeroweave.compile.lower import Kind, Lower
from zeroweave.compile.phases import Phases
from zeroweave.config import Config
from zeroweave.eager.access import Access
from zeroweave.eager.hooks import hook_gradients
from zeroweave.eager.shown import Shown
from zeroweave.engine.assembly import facts_of, policy_of
from zeroweave.engine.calls import Calls, arguments_of, loss_of
from zeroweave.engine.model import specs_of
from zeroweave.engine.settings import ScheduleSettings, settings_of
from zeroweave.engine.stats import Memory
from zeroweave.errors import EngineError
from zeroweave.layout import build_layout
from zeroweave.notices import Journal
from zeroweave.optim.states import States
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.parameters.places import rest
from zeroweave.parameters.stub import StubStatus
from zeroweave.plan.hardware import Hardware
from zeroweave.plan.meter import Meter, PlannedClock, PlannedTransport
from zeroweave.plan.work import Program
from zeroweave.runtime.backward import Observer
from zeroweave.runtime.runtime import Runtime
from zeroweave.runtime.timeline import Timeline
from zeroweave.schedule import Costs, Prediction, Schedule, compile_schedule, costs_of, simulate


class _Backwards(Observer):
    """Each backward ends a window."""

    def __init__(self, shown: Shown) -> None:
        self._shown = shown

    def backward_began(self) -> None:
        self._shown.show()

    def backward_ended(self, trained: bool) -> None:
        self._shown.hide()


@dataclass(frozen=True)
class Planned:
    """A schedule of one rank, and what is expected of it. Bytes.

    memory: the model state, as the tensors have it. activations: what the forward leaves for the backward.
    peak: everything on the device, at most.
    """

    schedule: Schedule
    prediction: Prediction
    memory: Memory
    activations: int
    peak: int


class PlannedRank:
    """Rank 0 of `world` ranks, with a model that lies on `meta` and is used up.

    `batch` is one as `Engine.train_step` takes it, on `meta`. `optimizer` makes one of parameters. EngineError for a
    config of what plans know nothing about.
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
        _refuse(config)
        self.config, self._model, self._hardware = config, model, hardware
        self._clock = PlannedClock()
        self._meter = Meter(self._clock, hardware)
        with ExitStack() as inside:
            self._fake = without_memory()
            inside.enter_context(self._fake)
            self._make(model, optimizer, world)
            self._batch = map_tensors(_on_cpu, batch)
            buffers = {id(b): _on_cpu(b) for b in model.buffers()}
            for module in model.modules():
                module._buffers.update({n: buffers[id(b)] for n, b in module._buffers.items() if b is not None})
        homes = [bucket.home for bucket in self.runtime.buckets.values()]
        held = [home.master for home in homes] + [home.source for home in homes] + list(buffers.values())
        map_tensors(held.append, self._batch)
        self._meter.hold(held)

    def _make(self, model: nn.Module, optimizer: Callable[[list[nn.Parameter]], Any], world: int) -> None:
        config = self.config
        named = dict(model.named_parameters())
        layouts = build_layout(
            specs_of(model, named, frozenset(), config), world, config.bucket.bytes, config.bucket.by_block
        )
        policy = policy_of(config, layouts)
        wire = Wire(PlannedTransport(world, self._clock, self._hardware), torch.device("cpu"), self._clock)
        self.runtime = runtime = Runtime(layouts, wire, policy)
        self._clock.attach(runtime.flats)
        self._wire = wire
        made = optimizer(list(model.parameters()))
        places = runtime.directory.places
        slot_of = {id(p): places[name] for name, p in named.items()}
        del named
        at = rest(model, StubStatus(), lambda name, _: runtime.buckets[places[name][0]].real[places[name][1]])
        self.optimizer = ShardedOptimizer(
            made, list(runtime.buckets.values()), slot_of, runtime.transfers, States(), moments_off=False, rates=None
        )
        self._facts = facts_of(config, layouts, policy, self.optimizer)
        access = Access(model, runtime)
        hook_gradients(runtime)
        shown = Shown(runtime, at, access)
        self.calls = Calls(model, runtime, config, access, shown, "cpu", 0, Journal(0), lambda: False, self._program)
        runtime.attach(_Backwards(shown))

    def _program(self, lower: Lower, graph: fx.GraphModule, inputs: Sequence[Any], kind: Kind, phases: Phases) -> Boxed:
        return Program(graph.graph, self._hardware, lower == "inductor", self._clock.spend, self._meter.program)

    # ------------------------------------------------------------------ steps
    def _step(self, schedule: Schedule | None) -> int:
        """A whole step that follows `schedule`, on demand without one. Bytes that the forward has left alive."""
        runtime, replay = self.runtime, self.runtime.replay
        runtime.next_window(schedule)
        begin = self._clock.allocated() - runtime.flats.now
        args, kwargs = arguments_of(self._batch)
        args, kwargs = self.calls.inputs(tuple(args), dict(kwargs))
        with self._fake, self._meter:
            with self.calls.compiling():
                with self.calls.session():
                    output = self._model(*args, **kwargs)
                loss = loss_of(output, self._batch, None)
                del output
            left = self._clock.allocated() - runtime.flats.now - begin
            loss.backward()
            del loss
            if not replay.arrive():
                replay.record.prune(replay.record.needed())
            gradients = runtime.gradients
            absent = gradients.absent(gradients.had_gradient())
            self._record = tuple(replay.record)
            replay.finish(
                self.optimizer.in_turn(gradients.take, absent, replay.update_order(frozenset(absent))),
                frozenset(absent),
            )
            for bucket in absent:
                runtime.buckets[bucket].renew()
        runtime.release_kept()
        return left

    def measure(self) -> None:
        """Two steps: one on demand, which is recorded, and one that follows the schedule of that and is timed.

        EngineError, which names the module, where the program asks for values, which no tensor has.
        """
        try:
            self._step(None)
        except value_errors() as error:
            where = innermost(error, self._model)
            raise EngineError(
                f"{where} needs values of tensors to go on ({str(error).splitlines()[0]}), and a plan has none: plan "
                "the model without it"
            ) from error
        self.first = compile_schedule(self._record, settings_of(self.config).facts(self._facts, None, None))
        timeline = Timeline(self._clock)
        self.runtime.next_window(self.first)
        self._clock.restart_peak()
        self.runtime.replay.executor.note_times(timeline)
        self._wire.time(timeline.collectives)
        self._activations = self._step(self.first)
        self._wire.time(None)
        self.runtime.replay.executor.note_times(None)
        self.memory = Memory.read(self.runtime, self.optimizer, 0)
        self.step = timeline.step(self.first)
        self.costs: Costs = costs_of([self.step], self._clock.peak())

    def plan(self, **changes: Any) -> Planned:
        """What the engine would follow with these settings of `compile`, once it has measured its steps."""
        settings: ScheduleSettings = replace(settings_of(self.config), **changes)
        costs = self.costs
        schedule = compile_schedule(self.first.record, settings.facts(self._facts, costs, self.first))
        expected = simulate(schedule, costs)
        peak = costs.peak - simulate(self.first, costs).peak + expected.peak  # as settings have it
        return Planned(schedule, expected, self.memory, self._activations, peak)


def innermost(error: BaseException, model: nn.Module) -> str:
    """The module of `model` in whose forward an exception was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    where, trace = "", error.__traceback__
    while trace is not None:
        where = names.get(id(trace.tb_frame.f_locals.get("self")), where)
        trace = trace.tb_next
    return repr(where) if where else "the model"


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype)


def _refuse(config: Config) -> None:
    """EngineError for what a plan would leave out."""
    unknown = {
        "offload": config.offload != type(config.offload)(),
        "gradient_accumulation_steps": config.gradient_accumulation_steps > 1,
        "gradient_clipping": config.gradient_clipping is not None,
        "experts": config.experts.parallel_size > 1,
        "compile.cuda_graphs": config.compile.cuda_graphs,
        "activations": config.activations.free_threshold_bytes is not None,
    }
    if named := [key for key, is_set in unknown.items() if is_set]:
        raise EngineError(f"a plan knows nothing about {', '.join(named)}: leave that out of the config")


keep_package_from_dynamo("zeroweave")
