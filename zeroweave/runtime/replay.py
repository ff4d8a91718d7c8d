"""The executor of schedules: one cursor, moved by what the training program does.

The program's events (a call is entered or left, a bucket's gradients are ready) move the cursor through the
schedule; the instructions that it passes are executed. Without a schedule, or once a step departs from it,
each event generates the instructions that it needs at that moment, and they go through the same `Executor`.

At stage 3 a rank may leave out calls that other ranks make, for instance if its batch has no image. When an event
comes that the schedule has later in the same micro-step, the instructions of the calls in between are executed. So this
rank gathers with the others, and reduces zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from zeroweave.runtime.activations import Offloading
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.cursor import Cursor
from zeroweave.runtime.executor import Executor
from zeroweave.runtime.gradients import Gradients
from zeroweave.runtime.open_calls import OpenCall, OpenCalls
from zeroweave.runtime.timeline import Record
from zeroweave.schedule.build import Schedule
from zeroweave.schedule.instructions import (
    Call,
    End,
    Entered,
    Free,
    GatherAcross,
    Instruction,
    Left,
    Micro,
    Ready,
    Reduce,
    ReduceAcross,
    Reshard,
    Run,
    Settle,
    Unshard,
    Update,
    Wait,
)


class Replay:
    """Executes one window (the steps between two optimizer steps) and records its events.

    `kept_by_stage`: the buckets that stay unsharded until the window's end; `optional`: see `Policy`. `free`:
    what `Free` does; None: there is none. `offloading` moves activations; None: they stay. Counters are kept
    over windows.
    """

    def __init__(
        self,
        buckets: Mapping[int, Bucket],
        gradients: Gradients,
        kept_by_stage: frozenset[int],
        record: Record,
        free: Callable[[], None] | None = None,
        offloading: Offloading | None = None,
        optional: frozenset[int] = frozenset(),
    ) -> None:
        self._gradients, self.kept_by_stage, self._optional = gradients, kept_by_stage, optional
        self.keeps_all = bool(kept_by_stage - optional)
        """True at stages 1 and 2, where ranks may enter different calls"""
        self._frees, self._offloading = free is not None, offloading
        self.executor = Executor(buckets, gradients, free, offloading)
        self.lingering = self.executor.lingering
        self.record = record
        self.schedule: Schedule | None = None
        self._cursor = Cursor()
        self._depth = 1
        self.departures = self.on_demand = 0
        """`on_demand`: unshards that a schedule did not order although there was one"""
        self._begin()

    def remember(self) -> Callable[[], None]:
        """A function that resets the counters to their present values."""
        now = self.departures, self.on_demand

        def back() -> None:
            self.departures, self.on_demand = now

        return back

    def _begin(self) -> None:
        self.record.clear()
        self.following = self.schedule is not None
        """True while the window follows the schedule, until it departs"""
        self.departure: str | None = None
        """why it has departed; None: it has not"""
        self.reducing = False
        """True while a backward runs whose gradients are reduced"""
        self._cursor.restart()
        self._passed: dict[int, None] = {}
        """buckets whose turn has come in the present backward, in that order"""
        self.micro_step = 0
        """backwards of the window that have ended"""
        self._left_out: list[int] = []
        """indices in the record of calls that the program has left out"""
        self._open = OpenCalls()

    @property
    def executed(self) -> list[Instruction]:
        """The instructions of the window so far."""
        return self.executor.executed

    def is_used(self, bucket: int) -> bool:
        """True if an open call of the program needs the bucket's values. The schedule may hold more buckets."""
        return self._open.is_used(bucket)

    def limit_reductions(self, depth: int) -> None:
        """So many may be in flight from now on if no schedule says when they settle; at first it is one."""
        self._depth = depth

    # ------------------------------------------------------------------ events
    def hold_optional(self) -> None:
        """Makes optional buckets usable until the window's end, whether this rank will use them or not."""
        if all(map(self.executor.holds.__getitem__, self._optional)):
            return
        if self.following:
            self.executor.execute(self._cursor.to_waits(self._optional))
        else:
            self._gather_kept()
            self._execute(*map(Wait, sorted(self._optional)))

    def entered(self, call: Call, uses: tuple[int, ...], supposed: bool | None = None) -> int:
        """A call begins: makes the buckets whose values it needs usable. Returns its number among equal calls.

        `supposed`: the call is recorded only if this is True on some rank; None: in any case. See `Record.suppose`.
        """
        self.lingering.sweep()
        run = Run(call, uses)
        self._reach(run)
        index = self.record.add(Entered(call, uses))
        lasts = False
        if self._comes_next(run):
            self.executor.execute(self._cursor.to_event())
            assert self.schedule is not None
            lasts = self._cursor.index - 1 in self.schedule.lasting
        else:
            self._depart(run)
            for bucket in uses:
                self._acquire(bucket)
            self._execute(run)
        number = self._open.enter(OpenCall(call, uses, lasts, index, supposed))
        self.reduce_due()
        return number

    def left(self, call: Call) -> None:
        """A call ends: drops the holds that it does not need any more."""
        ended = self._open.last(call)
        if ended.lasts:
            self._reach(End(call))
        index = self.record.add(Left(call))
        if ended.supposed is not None:
            # A bucket that was not used yet may be used in a later step, on some ranks only.
            unused = any(map(self._gradients.is_unused, ended.uses))
            self.record.suppose(ended.entered, index, ended.supposed or unused)
        self._open.leave(ended)
        if self.following:
            if ended.lasts and not self._comes_next(End(call)):
                self._depart(End(call))
            else:
                if ended.lasts:
                    self.executor.execute(self._cursor.to_event())
                self.executor.execute(self._cursor.trail())
                self.reduce_due()
        else:
            self._execute(*(Reshard(bucket) for bucket in ended.uses if bucket not in self.kept_by_stage))
        self.lingering.sweep()

    def backward_began(self, reducing: bool) -> None:
        """A backward that accumulates gradients runs; `reducing`: True if they are reduced."""
        self.reducing = reducing

    def turn(self, bucket: int) -> None:
        """The rest of this backward does not use the bucket: its turn has come, if no schedule says when.

        Which buckets have a turn follows from the forward alone, so all ranks agree and reduce it now. Missing
        gradients are zeros. A gradient that comes later waits for another reduction.
        """
        if not self.reducing or not self._gradients.is_unissued(bucket) or bucket in self._optional:
            return  # the ranks come to optional buckets at different times: those are reduced at the end
        self._passed[bucket] = None
        if self.following:
            self.reduce_due()
        else:
            self.record.add(Ready(bucket))
            self._issue_in_turn()

    def forward_ended(self) -> None:
        """The outermost forward is over: every kept bucket has been gathered, used here or not."""
        if not self.following:
            self._gather_kept()

    def backward_ended(self, reduced: bool) -> None:
        """The outermost backward is over; incomplete buckets are reduced with the gradients that they have."""
        if reduced:
            while waiting := self._gradients.unissued():
                if (due := self._next_reduction()) is not None and due in waiting:
                    self._reduce_next(due)
                elif self._catches_up and any(isinstance(e, Reduce) and e.bucket in waiting for e in self._events()):
                    self._leave_out()
                else:
                    self._reduce_now(waiting[0])
            while self._catches_up and all(isinstance(e, Run | End) for e in self._events()) and any(self._events()):
                self._leave_out()
        self._passed.clear()
        self.micro_step += 1
        if self._offloading is not None:
            self._offloading.arrive()
        self.record.add(Micro())
        self.reducing = False

    def _reduce_now(self, bucket: int) -> None:
        """Reduces a bucket although it is not next in the schedule."""
        self._depart(Reduce(bucket))
        if not self._gradients.is_unissued(bucket):
            return  # the departure has issued it
        if bucket not in self._passed:
            self.record.add(Ready(bucket))
        self._issue(bucket)

    def reduce_late(self, buckets: Iterable[int]) -> None:
        """Reduces buckets again, before the optimizer step, whose turn came before all of their gradients."""
        for bucket in buckets:
            self._depart(Reduce(bucket))
            self._issue(bucket)

    def arrive(self) -> bool:
        """The window's computations are over. True if they followed the schedule to the end."""
        if self.following and isinstance(self._cursor.event, Run | End | Reduce):
            self._depart(None)
        return self.following

    def update_order(self, updates: frozenset[int]) -> tuple[int, ...]:
        """The order in which `finish` updates these buckets, if it is called now."""
        if self.following:
            assert self.schedule is not None
            return tuple(i.bucket for i in self.schedule.instructions if isinstance(i, Update))
        pending = self._gradients.reductions.in_flight
        return *sorted(updates - set(pending)), *dict.fromkeys(pending)

    def finish(self, update: Callable[[Sequence[int]], object], updates: frozenset[int]) -> None:
        """The optimizer step: settles, updates (`update(bucket ids)`), and drops the kept buckets."""
        if self.arrive():
            self.executor.finish(self._cursor.rest(), update)
        else:
            if self._frees:
                self._execute(Free())
            order = self.update_order(updates)
            self._execute(*map(Settle, self._gradients.reductions.in_flight))  # the first update allocates
            across = self._gradients.replicated
            self._execute(*map(ReduceAcross, across), *map(Settle, across))
            self.executor.finish(map(Update, order), update)
            self._execute(*map(GatherAcross, self._gradients.spread))
            self.executor.drop_holds()

    def clear(self) -> None:
        """Forgets recorded events and executed instructions; the holds of kept buckets stay."""
        self.record.clear()
        self.executor.clear()

    def next_window(self, schedule: Schedule | None) -> None:
        """Starts a window that follows `schedule` (None: on demand, in the default order)."""
        self.executor.next_window()
        if self._offloading is not None:
            self._offloading.next_window()
        if schedule is not self.schedule:
            self.schedule = schedule
            self._cursor = Cursor() if schedule is None else Cursor(schedule.instructions, schedule.micro_steps)
        self._begin()

    # ------------------------------------------------------------------ following the schedule
    def _next_reduction(self) -> int | None:
        """The bucket of the schedule's next event, if that is a reduction whose turn has come."""
        return self._cursor.reduction if self.following and not self._open.outlasted else None

    def reduce_due(self) -> None:
        """Reduces complete buckets while they are next in the schedule; one that is complete early waits."""
        while self.reducing and (due := self._next_reduction()) is not None:
            if due not in self._passed or not self._gradients.awaits_turn(due):
                return  # gradients that were announced are missing, or a later call uses it
            self._reduce_next(due)

    def _reduce_next(self, due: int) -> None:
        """Reduces the bucket of the schedule's next event, although announced gradients may be missing."""
        self.record.add(Ready(due))
        self.executor.execute(self._cursor.to_event())
        self.executor.execute(self._cursor.trail())

    @property
    def _catches_up(self) -> bool:
        """True if calls may be left out. Kept buckets need no help: their order does not depend on calls."""
        return self.following and not self._open.outlasted and not self.keeps_all

    def _events(self) -> Iterator[Instruction]:
        """The schedule's next events, up to the end of the micro-step."""
        return self._cursor.events(self.micro_step)

    def _reach(self, event: Instruction) -> None:
        """Executes the instructions before an event that happens now: reductions, and calls that are left out.

        Gradients may be missing on this rank only (a parameter that its batch did not use), and so may calls. The other
        ranks reduce and gather in turn, so this one must, too.
        """
        if not self.following or self._open.outlasted or self._cursor.event == event:
            return
        between = []
        for each in self._events():
            if each == event:
                break
            if isinstance(each, Reduce):
                possible = self.reducing
            else:
                possible = self._catches_up and not (isinstance(each, End) and self._open.lasts(each.call))
            if not possible:
                return
            between.append(each)
        else:
            return  # it does not come in this micro-step
        while self._cursor.event != event:
            self._leave_out()

    def _leave_out(self) -> None:
        """Carries out the schedule's next event without the program: it computes nothing, and reduces what there is."""
        assert self.schedule is not None
        match event := self._cursor.event:
            case Reduce(bucket):
                self._reduce_next(bucket)
            case Run(call, uses):
                self._left_out.append(self.record.add(Entered(call, uses)))
                self.executor.execute(self._cursor.to_event())
                if self._cursor.index - 1 not in self.schedule.lasting:
                    self._left_out.append(self.record.add(Left(call)))
            case End(call):
                self._left_out.append(self.record.add(Left(call)))
                self.executor.execute(self._cursor.to_event())
            case _:
                raise AssertionError(event)

    def _comes_next(self, event: Instruction) -> bool:
        """True if it is the schedule's next event."""
        return self.following and not self._open.outlasted and self._cursor.event == event

    def _depart(self, came: Instruction | None) -> None:
        """Leaves the schedule for the rest of the window; drops buckets gathered ahead. `came`: None: the end."""
        if not self.following:
            return
        self.following = False
        if isinstance(came, Run | End):
            self.record.drop(self._left_out)  # the program makes other calls than the schedule has
        self.departures += 1
        assert self.schedule is not None
        planned, instead = (self.schedule.describe(i) if i else "the step's end" for i in (self._cursor.event, came))
        self.departure = f"the step left its schedule: {instead} came, and {planned} was next"
        if self._offloading is not None:
            self._offloading.settle()
        needed = self._open.uses()
        for bucket, held in list(self.executor.holds.items()):
            if bucket not in self.kept_by_stage:
                self._execute(*[Reshard(bucket)] * (held - needed[bucket]))
                self._execute(*[Unshard(bucket)] * (needed[bucket] - held))
        for bucket in self._passed:
            if self._gradients.is_unissued(bucket):
                self.record.add(Ready(bucket))
        self._issue_in_turn()

    def plans(self, call: Call) -> bool:
        """True if a backward call begins now, by the schedule. Without one, each call that can begin does."""
        event = self._cursor.beyond(Reduce)
        return not self.following or (isinstance(event, Run) and event.call == call)

    def may_end(self, call: Call) -> bool:
        """True if the schedule lets an open call end before the next event: it has no other calls inside."""
        return self.following and not self._open.lasts(call)

    # ------------------------------------------------------------------ on demand
    def _acquire(self, bucket: int) -> None:
        if bucket in self.kept_by_stage:
            self._gather_kept(until=bucket)
        else:
            self.on_demand += self.schedule is not None
            self._execute(Unshard(bucket))
        self._execute(Wait(bucket))

    def _gather_kept(self, until: int | None = None) -> None:
        """Gathers kept buckets in the order that all ranks agreed on, used on this rank or not."""
        order = sorted(self.kept_by_stage)
        if self.schedule is not None:
            gathers = (i.bucket for i in self.schedule.instructions if isinstance(i, Unshard))
            order = [bucket for bucket in gathers if bucket in self.kept_by_stage]
        for bucket in order:
            if not self.executor.holds[bucket]:
                self.on_demand += self.schedule is not None
                self._execute(Unshard(bucket))
            if bucket == until:
                break

    def _issue_in_turn(self) -> None:
        # Kept buckets have one order on all ranks: nothing is gathered between their reductions.
        for bucket in self._gradients.unissued() if self.keeps_all else tuple(self._passed):
            if bucket in self._passed:
                if self._gradients.is_unissued(bucket):
                    self._issue(bucket)
            elif self.keeps_all:
                return

    def _issue(self, bucket: int) -> None:
        while flying := self._gradients.reductions.in_flight:
            if len(flying) < self._depth and bucket not in flying:
                break
            self._execute(Settle(flying[0]))
        self._execute(Reduce(bucket))

    def _execute(self, *instructions: Instruction) -> None:
        self.executor.execute(iter(instructions))

    def abort(self) -> None:
        """Drops every hold: after an exception, at any point."""
        self.following = False
        self._open.clear()
        self.executor.drop_holds()
        self.lingering.sweep()
