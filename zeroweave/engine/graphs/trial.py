"""A window that runs as ever, is captured when it is over, and is compared with its graphs, bit by bit.

    before      what the window will change is copied
    the window  runs as ever; what its calls are given and return is kept
    behind it   each call is captured · everything is as it was before the window · the graphs are replayed

Where the replay left what the window had left, the graphs stand in for later windows; see `judge`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from zeroweave._torch.autograd import leaves_behind
from zeroweave.comm.pending import Side
from zeroweave.engine.graphs.around import Modes
from zeroweave.engine.graphs.batch import Batch
from zeroweave.engine.graphs.capturer import Capturer, Graph, first_of
from zeroweave.engine.graphs.contents import (
    Contents,
    Copies,
    Print,
    Whereabouts,
    check,
    contents,
    different,
    digests,
    prints,
)
from zeroweave.engine.graphs.loop import Loop, LossFunction
from zeroweave.engine.graphs.nest import Uncapturable, copy, room_for
from zeroweave.engine.graphs.parts import CapturedWindow, Kind, Left, Outputs, Part
from zeroweave.engine.graphs.setting import Setting
from zeroweave.engine.parts import EngineParts
from zeroweave.engine.snapshot import Snapshot
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Block, Window
from zeroweave.optim.scaler import Scalars, Scaler
from zeroweave.schedule import Schedule

_ENGINES: Final = "parameters of ", "optimizer state of "
"""So begin the names of what the engine itself updates."""


@dataclass(frozen=True)
class Bench:
    """What a trial works with: the objects of one engine."""

    parts: EngineParts
    loop: Loop
    window: Window
    step: OptimizerStep
    scaler: Scaler
    scalars: Scalars
    capturer: Capturer
    side: Side | None
    """for what a graph computes beside the rest"""

    @property
    def device(self) -> torch.device:
        return self.parts.device

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Steps inside are run for graphs; what they do on the host is undone at the end, and counts for nothing."""
        parts, optimizer = self.parts, self.parts.optimizer
        assert optimizer is not None and optimizer.rates is not None
        before = Snapshot(parts, self.window, self.step, contents=False)
        found = self.scalars.found if self.scaler.checks else None
        try:
            with parts.transport.capturing(), self.scaler.on_device(self.scalars), optimizer.rates.holding(found):
                yield
        finally:
            with parts.transport.capturing():
                self.window.abort()
            before.restore()

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """What the device is given inside becomes the graph. Nothing is under way at its end."""
        runtime = self.parts.runtime
        try:
            with self.capturer.graph() as graph:
                yield graph
                # It is over for the capturing stream: a capture cannot end before, nor another graph wait for it.
                runtime.gradients.reductions.settle_all()
                for bucket in runtime.buckets.values():
                    bucket.wait()
        except BaseException:
            # Events of a capture that has failed never come: a stream that waits for one is an error.
            runtime.forget_pending()
            raise

    def copies(self, named: Contents) -> Copies:
        """Of what a window changes, where they have room."""
        return Copies(self.parts, named, self.capturer.spare(self.parts.transport.clock.peak()))

    def check_leaves(self, results: Sequence[torch.Tensor]) -> None:
        """Uncapturable where a backward of these would train something else than the engine's parameters.

        A graph leaves its gradient where it was in the capture, and not in the `grad` of somebody else's tensor.
        """
        known = {id(p) for bucket in self.parts.runtime.buckets.values() for p in bucket.real}
        if any(id(leaf) not in known for leaf in leaves_behind(results)):
            raise Uncapturable("a tensor that is no parameter of the model requires grad, and would get none")


@dataclass(frozen=True)
class Taken:
    """A call of the window. `given`: the tensors that it was given, in memory of their own.

    `batch`: of a forward or a whole micro-step. `which`: of a backward, the outputs that it had gradients of. `value`:
    the largest norm of a clipping. `random`: what was random on the device when it began. `defers`, `said`, `ends`: the
    block that it was made in, what the program had said of boundaries, and did its micro-step end the window? `modes`:
    what it ran under, which at the end of the window, where it is captured, may be something else.
    """

    kind: Kind
    key: object
    given: Sequence[torch.Tensor]
    random: torch.Tensor
    defers: Block | None
    said: bool | None
    ends: bool
    modes: Modes
    batch: Batch | None = None
    which: Sequence[int] = ()
    value: float = 0.0
    boundary: bool = False
    loss_fn: LossFunction | None = None


@dataclass(frozen=True)
class _Captured:
    """A part, and what it does: the state before it, that behind it, and the instructions in between."""

    part: Part
    does: tuple[object, object, object]

    def does_as(self, other: _Captured) -> bool:
        return (self.part.kind, self.part.key, self.does) == (other.part.kind, other.part.key, other.does)


def _shared(captured: Sequence[_Captured]) -> list[Part]:
    """The parts of a window. Micro-steps in its middle that do the same with the same memory are one.

    A forward and its backward go together: the one saves activations where the other reads them.
    """
    chosen: list[int] = []
    for index, each in enumerate(captured):
        size = {"train_step": 1, "forward": 2, "backward": 0}.get(each.part.kind, 1)
        earlier = (
            at
            for at in range(index)
            if size and all(a.does_as(b) for a, b in zip(captured[at:], captured[index : index + size], strict=False))
        )
        if size:
            found = next(earlier, index)
            chosen += range(found, found + size)
    assert len(chosen) == len(captured)
    return [captured[index].part for index in chosen]


class Played:
    """The calls of a trial, made once more: what goes from one to the next.

    `whole`: what a call gives the device is one graph, of which all happens or nothing.
    """

    def __init__(self, bench: Bench, whole: bool) -> None:
        self._bench, self._whole = bench, whole
        self._forward: Outputs | None = None

    @property
    def trained(self) -> list[int]:
        """The indices of the last forward's outputs that a backward can come to."""
        return [] if self._forward is None else self._forward.trained

    def __call__(self, taken: Taken, given: Sequence[torch.Tensor]) -> Outputs:
        """Makes the call with these tensors; what it returns, without a way back."""
        bench, loop, result, boundary = self._bench, self._bench.loop, None, taken.boundary
        bench.window.set_boundary(taken.said)
        with bench.window.deferring(taken.defers), taken.modes.again():
            match taken.kind:
                case "train_step":
                    assert taken.batch is not None
                    loss = loop.loss(taken.batch.of(given), taken.loss_fn)
                    bench.check_leaves([loss])
                    with bench.step.certain(bench.side) if self._whole and boundary else nullcontext():
                        loop.backward(loss)
                        result, boundary = loss.detach(), loop.step()
                case "forward":
                    assert taken.batch is not None
                    args, kwargs = taken.batch.of(given)
                    self._forward = Outputs(loop.forward(args, kwargs))
                    bench.check_leaves(self._forward.tensors)
                    return self._forward.detached()
                case "backward":
                    assert self._forward is not None
                    trained = self._forward.trained
                    roots = [self._forward.tensors[trained[index]] for index in taken.which]
                    self._forward = None
                    with torch.enable_grad():  # as `edge.go_on` has it
                        bench.window.backward_from(roots, given)
                case "reduce":
                    loop.reduce()
                case "clip":
                    result = bench.step.clip(taken.value)
                case "step":
                    boundary = loop.step()
        if boundary != taken.boundary:
            raise Uncapturable("the window ends elsewhere")
        return Outputs(result)


@dataclass
class Trial:
    """Begins between two windows. `add` is called before each call, or as its gradients come; `returned` behind it."""

    bench: Bench
    schedule: Schedule
    taken: list[Taken] = field(default_factory=list)
    results: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._before: list[Copies] = []
        self._kept: dict[str, list[torch.Tensor]] = {}
        """what has a copy there, by name"""
        self._buffers: dict[str, int] = {}
        self._updated: dict[str, int] = {}
        """of what the engine updates, before the window"""
        self._modules = tuple(self.bench.parts.model.modules())
        self.setting = Setting(self.bench.parts)

    def begin(self) -> None:
        """Keeps what the window will change. Uncapturable, or RuntimeError, where that cannot be done."""
        check(self.bench.parts)
        self.bench.scalars.take(self.bench.scaler.loss_scale.value)
        self._buffers = self._buffers_now()
        self._keep()
        self._updated = self._updated_now()

    def _updated_now(self) -> dict[str, int]:
        return digests({name: tensors for name, tensors in self._contents().items() if name.startswith(_ENGINES)})

    def _keep(self) -> None:
        """Keeps what is not kept so far of what the calls that are known may change."""
        named = {name: tensors for name, tensors in self._contents().items() if name not in self._kept}
        if named:
            self._kept |= named
            self._before.append(self.bench.copies(named))

    @property
    def _functions(self) -> tuple[LossFunction | None, ...]:
        return tuple(taken.loss_fn for taken in self.taken)

    def _contents(self) -> dict[str, list[torch.Tensor]]:
        return contents(self.bench.parts, self._functions)

    def add(self, kind: Kind, key: object, given: Sequence[torch.Tensor] = (), **more: Any) -> None:
        """A call is about to be made, with these tensors; `more`: see `Taken`."""
        random, window, modes = self.bench.capturer.random, self.bench.window, Modes(self._modules, self.bench.device)
        ends = window.is_boundary()
        self.taken.append(Taken(kind, key, given, random, window.defers, window.said, ends, modes, **more))
        self.results.append([])
        self.setting.look(loss_fn := more.get("loss_fn"))
        if loss_fn is not None:
            self._keep()

    def returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """What the last call has returned. Uncapturable if it has written into its batch, as no replay does."""
        self.results[-1] = [tensor.detach().clone() for tensor in tensors]
        taken = self.taken[-1]
        if taken.batch is not None and digests({"": taken.batch.tensors}) != digests({"": taken.given}):
            raise Uncapturable("the model, or its loss, writes into the batch")

    @property
    def changed_places(self) -> bool:
        """Is something that the window has changed kept nowhere, as it has come into being in the window?"""
        now = self._contents()
        return any(
            name.startswith(_ENGINES) and list(map(id, now.get(name, ()))) != list(map(id, tensors))
            for name, tensors in self._kept.items()
        )

    @property
    def changed_nothing(self) -> bool:
        """Is what this rank updates what it was before the window? Then it tells nothing about gradients."""
        return self._updated_now() == self._updated

    # ------------------------------------------------------------------ behind the window
    def capture(self, first: bool) -> CapturedWindow:
        """Uncapturable where it cannot be done. Executes nothing on the device. Local.

        `first`: see `Capturer.alone`.
        """
        bench, parts = self.bench, self.bench.parts
        parts.runtime.replay.lingering.wait()  # a capture cannot wait for what it does not hold
        departures, now = parts.runtime.replay.departures, self._buffers_now()
        with self.setting.as_before(), bench.capturer.alone(first), bench.trying():
            play = Played(bench, whole=True)
            try:
                captured = [self._captured(taken, play) for taken in self.taken]
            except Uncapturable:
                raise
            except Exception as error:
                reason = first_of(error)
                lines = [line.strip() for line in str(reason).splitlines() if line.strip()] or [""]
                words = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
                raise Uncapturable(f"{type(reason).__name__}: {words}") from error
            if parts.runtime.replay.departures != departures:
                raise Uncapturable("the window does not follow its schedule")
            executed = bench.step.executed
            norm = None if parts.config.gradient_clipping is None else bench.scaler.norm
        changed = different(self._buffers, now)
        buffers = [buffer for name, buffer in parts.model.named_buffers() if name in changed]
        with self.setting.as_before():
            shared, there = _shared(captured), Whereabouts(parts, self._functions)
        constants = self.setting.attributes.constants()
        return CapturedWindow(self.schedule, there, constants, shared, executed, norm, buffers)

    def _buffers_now(self) -> dict[str, int]:
        return digests({name: [buffer] for name, buffer in self.bench.parts.model.named_buffers()})

    def _captured(self, taken: Taken, play: Played) -> _Captured:
        """A call as a graph."""
        bench, runtime = self.bench, self.bench.parts.runtime
        before, ran = self._state(), len(runtime.replay.executed)
        inputs = room_for(taken.given)
        graph: Graph | None = None
        with bench.parts.progress.ledger.aside() as collectives:
            if taken.kind == "step" and not taken.boundary:
                outputs = play(taken, inputs)
            else:
                copy(inputs, taken.given)
                with bench.capture() as graph:
                    outputs = play(taken, inputs)
        left = None if taken.boundary else Left.of(runtime, bench.scaler)
        part = Part(taken.kind, taken.key, graph, inputs, outputs, collectives, left, play.trained)
        return _Captured(part, (before, self._state(), runtime.replay.executed[ran:]))

    def _state(self) -> object:
        """What one call leaves to the next, and where."""
        runtime = self.bench.parts.runtime
        flats = [(bucket.id, bucket.flat.data_ptr()) for bucket in runtime.buckets.values() if bucket.resident]
        return Left.of(runtime, self.bench.scaler), flats

    def left(self, results: Sequence[Sequence[torch.Tensor]]) -> dict[tuple[str, int], Print]:
        """What a window leaves; see `prints`."""
        named = self._contents()
        for index, (taken, tensors) in enumerate(zip(self.taken, results, strict=True)):
            if tensors:
                named[f"the result of {taken.kind} {index + 1}"] = list(tensors)
        return prints(named)

    def rewind(self) -> None:
        """Tensors are what they were before the window."""
        for copies in self._before:
            copies.restore()

    def replayed(self, window: CapturedWindow) -> list[list[torch.Tensor]]:
        """Runs the graphs; what they return."""
        results = []
        for taken, part in zip(self.taken, window.parts, strict=True):
            self.bench.capturer.resume_random(taken.random)
            part.replay(taken.given)
            results.append(part.results())
        return results

    def rerun(self) -> list[list[torch.Tensor]]:
        """Makes the calls once more as ever, as far as the device goes; what they return. Collective."""
        results, play = [], Played(self.bench, whole=False)
        with self.setting.as_before(), self.bench.trying(), self.bench.parts.progress.ledger.aside():
            for taken in self.taken:
                self.bench.capturer.resume_random(taken.random)
                results.append([tensor.clone() for tensor in play(taken, taken.given).tensors])
        return results

    def forget(self) -> None:
        """The copies go."""
        self._before.clear()
        self.bench.capturer.forget()
