"""The runtime: turns what eager hooks and compiled templates report into events of the replay.

    forward    session( enter(call) … leave(call) … )          the engine's call, or a submodule's
    backward   begin( enter … leave, deliver … ) end           from the first sign of a backward to its end

A *session* is the outermost forward. Both kinds of calls meet here: all code that computes with a bucket enters a
call first, and all code that produces a parameter's gradient delivers it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from zeroweave._torch.autograd import (
    accumulates,
    at_end_of_backward,
    current_graph_task,
    recomputing,
    saves_through_hooks,
)
from zeroweave._torch.modes import unseen
from zeroweave.comm.ledger import Gauge
from zeroweave.comm.registered_buffers import RegisteredBuffers
from zeroweave.comm.transport import Transport
from zeroweave.errors import EngineError
from zeroweave.layout import BucketLayout, SlotKey
from zeroweave.runtime.activations import Activations, Offloading
from zeroweave.runtime.backward_order import Observer, WayBack
from zeroweave.runtime.bucket import Bucket, Directory, SavedViews, assign_buffers
from zeroweave.runtime.call_graphs import CallGraphs
from zeroweave.runtime.copies import CopyStream
from zeroweave.runtime.delivery import Delivery
from zeroweave.runtime.gradients import Gradients
from zeroweave.runtime.inference import Inference
from zeroweave.runtime.policy import Policy
from zeroweave.runtime.replay import Replay
from zeroweave.runtime.shard import Shard
from zeroweave.runtime.tape import Frame
from zeroweave.runtime.timeline import Record
from zeroweave.runtime.transfers import Transfers
from zeroweave.runtime.writes import Writes
from zeroweave.schedule import Call, Schedule
from zeroweave.schedule.instructions import Phase


class Runtime:
    """Buckets, gradients and replay of one engine.

    `entering(name, back)` is called for each call before anything is gathered for it; `back`: True inside a backward.
    `issuing`: the scope of work that counts as a part of a gather. `trains`: True if a forward in grad mode belongs to
    a window; without an optimizer none does. `registered_buffers`: where schedules gather buckets. `streams`:
    see `Transfers`.
    """

    def __init__(
        self,
        layouts: Sequence[BucketLayout],
        transport: Transport,
        policy: Policy,
        entering: Callable[[str, bool], None] = lambda name, back: None,
        issuing: Callable[[], AbstractContextManager[None]] = nullcontext,
        trains: bool = True,
        registered_buffers: RegisteredBuffers | None = None,
        graphs: CallGraphs | None = None,
        streams: Callable[[torch.device], CopyStream] = CopyStream,
    ) -> None:
        self.registered_buffers = registered_buffers or RegisteredBuffers()
        self.graphs = graphs
        """of templates' executions; None: there are none"""
        self.transport, self.policy, self._entering, self._trains = transport, policy, entering, trains
        self._observer = Observer()
        self.flats = Gauge()
        """bytes of all flats that are unsharded"""
        device = transport.empty(0, torch.uint8).device
        self.transfers = Transfers(device, issuing, streams, policy.states_fill)
        off = policy.masters_off, policy.params_off
        kinds = {b.id: torch.int8 if b.id in policy.compact else policy.remainder for b in layouts}
        dtypes = {b.id: getattr(torch, b.dtype) for b in layouts}
        homes = {b.id: Shard(b, dtypes[b.id], transport, self.transfers, *off, kinds[b.id]) for b in layouts}
        self.buckets = {
            b.id: Bucket(b, dtypes[b.id], transport, self.flats, homes[b.id], device, self._doubt) for b in layouts
        }
        self.directory = Directory(self.buckets.values())
        self.find = self.directory.find
        self.gradients = Gradients(
            list(self.buckets.values()),
            transport,
            op=policy.op,
            reduce_dtype=policy.reduce_dtype,
            accumulate_dtype=policy.accumulate_dtype,
            keep_targets=policy.keep_gradient_targets,
            lend=None if graphs is None else graphs.lend,
        )
        if graphs is not None:
            # With one rank nothing is sharded: a flat that is dropped would only be copied again, to another address.
            for bucket_id in policy.kept_by_stage if transport.world > 1 else self.buckets:
                self.buckets[bucket_id].remain()
        record, threshold = Record(), policy.offload_threshold
        offloading = None if threshold is None else Offloading(threshold, streams(device), record.add)
        self.activations = Activations(policy.free_threshold, offloading)
        self._trained = [b for b in self.buckets.values() if b.layout.trainable]
        free = None if policy.free_threshold is None else self.activations.free
        kept = policy.kept_by_stage
        self.replay = Replay(self.buckets, self.gradients, kept, record, free, offloading, policy.optional)
        self.replay.lingering.stay(policy.stays)
        self._inference = Inference(self.buckets, self.gradients, kept, policy.optional)
        self.compiled_calls = self.eager_calls = 0
        self._frame: Frame | None = None
        self._backward: int | None = None
        self._training, self._accumulating = True, False
        self._examined = -1
        """the graph task that was last found to accumulate or not"""
        self._back = WayBack(self.replay, self.leave)
        self.delivery = delivery = Delivery(
            self.buckets, self.gradients, self.replay, device, self.note_backward, self._delivered
        )
        self.destinations, self.sums, self.deliver = delivery.destinations, delivery.sums, delivery.deliver
        self._optional: set[str] = set()
        """names of calls that use optional buckets alone: what they use is held, so no schedule has them"""
        self._session_reads: list[Frame] | None = None
        self._session: Frame | None = None
        self._backward_reads: list[Frame] = []
        self._loss_reads: dict[int, tuple[Frame, set[int]]] = {}
        """bucket id -> what holds the bucket for the loss, and the slots whose gradients have not come"""
        self.saved_views = SavedViews()
        self.writes = Writes(self.buckets.values(), lambda: self.in_session or self.in_backward)
        self.writable = False
        """True if the user may write parameters now; see `writing`"""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, the user may write parameters: no check raises when they change."""
        self.writable = True
        try:
            yield
        finally:
            self.writable = False

    def attach(self, observer: Observer) -> None:
        """`observer` is told of all windows from now on. Called once, not in `__init__`: its parts need a runtime."""
        self._observer = observer

    @property
    def frees_flats(self) -> bool:
        """True if values of parameters go with the calls that use them: False where all flats are shards."""
        return not all(bucket.is_shard for bucket in self.buckets.values())

    # ------------------------------------------------------------------ calls
    @property
    def in_backward(self) -> bool:
        return self._backward is not None

    @property
    def in_session(self) -> bool:
        return self._session_reads is not None

    @property
    def frame(self) -> Frame | None:
        """The innermost forward call that is running; between calls, the outermost forward itself.

        For a call that runs again, its first frame.
        """
        inner = self._frame
        return self._session if inner is None else inner.origin or inner

    @property
    def awaits_backward(self) -> bool:
        """True between a forward of the window and its backward."""
        return self._back.tape.waiting

    def begin_session(self, inputs: Hashable = None) -> None:
        """The outermost forward begins. In grad mode it belongs to the window, otherwise it is inference.

        `inputs`: differs between inputs of different shapes.
        """
        self.note_backward()
        self.delivery.begin_forward()
        self._training = self.in_backward or (self._trains and torch.is_grad_enabled())
        if first := self._training and not (self.in_backward or self.replay.record):
            self._observer.window_began()
        if not self.in_backward:
            self._observer.forward_began()
        if first or not self._training:
            self.watch_writes(fresh=False)
        self._forwards.hold_optional()
        if self.graphs is not None and not self.in_backward:
            kind = inputs, self._training, self.replay.micro_step
            self.graphs.begin(kind, settled=self.replay.schedule is not None)
        self._session_reads, self._session = [], Frame(Call("the model", "forward"), (), self.replay)
        self.activations.begin_forward()

    def _doubt(self, names: str, altered: torch.Tensor) -> bool:
        return self.writes.doubt(names, altered)

    def watch_writes(self, fresh: bool = True) -> None:
        """Starts to watch the forward that runs now; by default it has come to a new template that may write."""
        if not (self.writable or self.in_backward):
            self.writes.begin(fresh)

    def _leave_session(self) -> None:
        reads, self._session_reads, self._session = self._session_reads, None, None
        self._leave_reads(reads or [])

    def end_session(self) -> None:
        """The outermost forward is over, and with it the reads of parameters outside of any call."""
        self._leave_session()
        self.writes.end()
        if not self._training:
            self._inference.forward_over()
        elif not self.in_backward:
            self.replay.forward_ended()

    def abort_session(self) -> None:
        """The outermost forward ended with an exception, as a recomputation that has what it needs does, too."""
        self._leave_session()
        self.writes.end(failed=True)
        if self.graphs is not None and not self.in_backward:
            self.graphs.abort()
        self._frame = None
        if not self._training:
            self._inference.abort()

    def execute(self, run: Callable[[list[Any]], Any], args: list[Any], bound: Callable[[], Set[int]]) -> Any:
        """`run(args)` of a template, as a graph if there is one. See `CallGraphs.execute`."""
        return run(args) if self.graphs is None else self.graphs.execute(run, args, bound)

    def enter(self, name: str, phase: Phase, uses: tuple[int, ...], trains: bool = False) -> Frame:
        """A call begins: the values of the buckets `uses` are usable until it is left. `trains`: see `Frame`."""
        self.transfers.sweep()
        if phase == "backward":
            self.note_backward()
        self._entering(name, self.in_backward)
        if uses and self.policy.optional.issuperset(uses):
            self._optional.add(name)
        if name in self._optional:
            return self._enter_optional(name, phase)
        if phase == "backward":
            return self._back.enter(name, uses)
        frame = Frame(Call(name, "forward"), uses, self._forwards, self._frame, trains=trains)
        if not self._is_covered(frame):
            frame.acquire()
        self._frame = frame
        return frame

    def _enter_optional(self, name: str, phase: Phase) -> Frame:
        """A call whose buckets are held in any case is no event: other ranks may not make it."""
        frame = Frame(Call(name, phase), (), self.replay, self._frame, covered=True)
        if phase == "forward":
            self._frame = frame
        return frame

    @property
    def _forwards(self) -> Replay:
        """The replay that executes forward calls now."""
        return self.replay if self._training else self._inference

    def _is_covered(self, frame: Frame) -> bool:
        """Notes a forward call. True if the backward that runs it again holds its buckets already."""
        again = recomputing()
        self._back.recompute(frame, again)
        if self._training and not again:
            self._back.tape.entered(frame, silent=not torch.is_grad_enabled())
        return frame.covered

    def leave(self, frame: Frame) -> None:
        """A call ends, and with it the reads of parameters that happened inside."""
        self._leave_reads(frame.reads)
        if frame.call.phase == "forward":
            self._frame = frame.parent
            self.saved_views.clear()
            if frame.replay is self.replay and not frame.covered:
                self.activations.end_call(frame.call, frame.number)
        if not frame.covered:
            self._release(frame)
        elif frame.call.phase == "backward" and frame.origin is not None:
            self._back.left(frame)
        for bucket in map(self.buckets.__getitem__, frame.uses):
            # What was freed was checked then. What stays may be freed after the update only, which is too late.
            if bucket.resident and not self.writable:
                bucket.check_unchanged()
                bucket.check_alone()

    def _release(self, frame: Frame) -> None:
        self.writes.look(map(self.buckets.__getitem__, frame.uses))
        self._back.tape.left(frame)
        frame.replay.left(frame.call)

    def _leave_reads(self, reads: list[Frame]) -> None:
        while reads:
            self._release(reads.pop())

    def read(self, bucket: Bucket, slot: int) -> None:
        """Eager code reads a parameter, which may get a gradient by that.

        It is usable until the innermost call is left. Between a forward and its backward, where no call is open, it is
        usable until its gradient has come, or else until the end of the backward.
        """
        for_loss = not (self.in_session or self.in_backward)
        if bucket.real[slot].requires_grad and not self.in_backward and (for_loss or torch.is_grad_enabled()):
            self.gradients.read(bucket.id, slot)  # its gradient may come after that of compiled code
        if bucket.id in self._loss_reads:
            self._loss_reads[bucket.id][1].add(slot)
        if bucket.id in self.policy.optional:
            return  # held since the forward began
        if self.replay.is_used(bucket.id) or self._inference.is_used(bucket.id):
            return
        self.transfers.sweep()
        call = Call(f"{bucket.layout.name} (read)", "forward")
        replay = self.replay if for_loss else self._forwards
        frame = Frame(call, (bucket.id,), replay, self._frame, is_read=True)
        if not self._is_covered(frame):
            frame.acquire()
        if for_loss:
            self._back.tape.left(frame)
            self._loss_reads[bucket.id] = frame, {slot}
        elif self._frame is not None:
            self._frame.reads.append(frame)
        elif self._session_reads is not None:
            self._session_reads.append(frame)
        else:
            self._backward_reads.append(frame)

    def _delivered(self, bucket: int, slot: int) -> None:
        """An eager gradient has come. The loss reads the bucket no more once it has those of all slots that it read."""
        if bucket in self._loss_reads:
            frame, slots = self._loss_reads[bucket]
            slots.discard(slot)
            if not slots:
                del self._loss_reads[bucket]
                frame.replay.left(frame.call)

    def _leave_loss_reads(self) -> None:
        while self._loss_reads:
            frame, _ = self._loss_reads.popitem()[1]
            frame.replay.left(frame.call)

    # ------------------------------------------------------------------ saved tensors
    def saved(self, tensors: Iterable[tuple[torch.Tensor, SlotKey]], read: bool) -> None:
        """A compiled forward saves these views, each with its slot; its backward binds them itself, and may read."""
        if self._frame is not None and not self._frame.covered:
            self._frame.ran_compiled(read)
        if saves_through_hooks():
            for tensor, slot in tensors:
                self.saved_views.add(tensor, slot)

    def use_in_backward(self, bucket: Bucket, origin: Frame) -> None:
        """A node of the backward needs a tensor that the eager code of the call `origin` saved."""
        self.note_backward()
        self.transfers.sweep()
        if bucket.id not in self.policy.optional:
            self._back.use(bucket, origin)

    # ------------------------------------------------------------------ gradients
    def announce(self, parts: Sequence[SlotKey]) -> None:
        """The backward of the template that runs now will deliver these (bucket id, slot index)."""
        self.gradients.announce(parts)
        if self._frame is not None:
            self._frame.announced.update(parts)

    def template_ran(self) -> None:
        """Counts one execution of compiled code."""
        self.compiled_calls += 1

    def ran_eagerly(self) -> None:
        """Counts one call that did not run compiled code."""
        self.eager_calls += 1

    def remember(self) -> Callable[[], None]:
        """A function that resets the counters to their present values."""
        now = self.compiled_calls, self.eager_calls

        def back() -> None:
            self.compiled_calls, self.eager_calls = now

        return back

    # ------------------------------------------------------------------ backward
    def note_backward(self, trains: bool = False, *, accumulates: bool = False) -> None:
        """Called at every sign of a backward: the first one begins it.

        `trains`: it is known to be one that adds all gradients up, even if it reaches no parameter on this rank.
        `accumulates`: it has just accumulated one.
        """
        task = current_graph_task()
        if trains:
            self.delivery.accumulates_all(task)
        if self._backward is None:
            if task >= 0:
                self._backward, self._examined, self._accumulating = task, -1, False
                self._examine(task, trains or accumulates)
                at_end_of_backward(self._end_backward)
                with unseen():
                    self._observer.backward_began()
        elif task < 0:
            raise EngineError(
                "[ZW404] an earlier backward did not finish; call engine.zero_grad() and start the window again"
            )
        else:
            self._examine(task, trains or accumulates)

    def _examine(self, task: int, trains: bool) -> None:
        """Notes whether the backward accumulates: `trains`, or one of its nodes does.

        One that does not itself may run another one from a hook, which does.
        """
        if self._accumulating or (task == self._examined and not trains):
            return
        self._examined = task
        with unseen():
            if trains or any(accumulates(p) for b in self._trained for p in b.real):
                self._accumulating = True
                self.replay.backward_began(self._observer.reduces())
                if not self.in_session:
                    self._back.begin()

    def _end_backward(self) -> None:
        self._leave_reads(self._backward_reads)
        for bucket in self.buckets.values():
            if bucket.resident and not bucket.is_shard and bucket.written and not self.writable:
                bucket.check_unchanged()  # after the update the shard has other values
        self.writes.settle()
        if self._accumulating:
            self._leave_loss_reads()
        self._back.finish()
        if self._accumulating:
            reducing = self.replay.reducing
            if not reducing:
                self.gradients.fold(self.gradients.unissued())
            self.replay.backward_ended(reducing)
            self.gradients.end_backward(reducing)
        self._backward = None
        self.replay.lingering.sweep()
        self._observer.backward_ended(self._accumulating)

    def reduce_rest(self) -> bool:
        """Reduces what backwards without reduction have left, each bucket once. True if there was anything."""
        if not self.gradients.unreduced:
            return False
        self.replay.backward_ended(reduced=True)
        self.gradients.end_backward()
        return True

    # ------------------------------------------------------------------ window
    def next_window(self, schedule: Schedule | None) -> None:
        """After the step or `zero_grad`: the next window follows `schedule`, in its order of reductions."""
        self._back.clear()
        self._loss_reads.clear()
        self.gradients.reset()
        self.gradients.set_order(None if schedule is None else schedule.reduce_order)
        changes = schedule is not self.replay.schedule
        self.replay.next_window(schedule)
        if changes:  # once no bucket, which may have to move, is held; what does not stay is freed first
            self.replay.lingering.stay(self.policy.stays if schedule is None else schedule.stays)
            assign_buffers(self.buckets, self.registered_buffers, schedule)

    def restart_peaks(self) -> None:
        """Restarts the peaks of memory: the schedule has changed."""
        self.flats.restart()
        self.gradients.restart_peaks()

    def release_kept(self) -> None:
        """Drops what inference kept unsharded: the shards have changed."""
        self._inference.next_window(None)
        self.replay.lingering.sweep()
        self._inference.lingering.sweep()

    def abort(self) -> None:
        """Forgets the window and drops every hold: after an exception, or `zero_grad` in mid-window."""
        self._frame, self._backward, self._session_reads = None, None, None
        self.writes.forget()
        if self.graphs is not None:
            self.graphs.abort()
        self._back.clear()
        self._backward_reads.clear()
        self._loss_reads.clear()
        self.saved_views.clear()
        self.gradients.reset()
        self.replay.abort()
        self._inference.abort()
