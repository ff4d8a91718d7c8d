"""The verifier: an abstract interpreter that lets no wrong schedule near a device."""

from __future__ import annotations

from itertools import zip_longest

from zeroweave.errors import ScheduleError
from zeroweave.schedule.instructions import (
    Call,
    End,
    Free,
    GatherAcross,
    Instruction,
    OfBucket,
    OfCall,
    Offload,
    Reduce,
    ReduceAcross,
    Release,
    Reload,
    Reshard,
    Run,
    Settle,
    Stage,
    Unshard,
    Update,
    Wait,
    is_event,
    project,
    reduce_order,
)
from zeroweave.schedule.listing import Listing


def verify(schedule: Listing) -> None:
    """Raise ScheduleError, naming index and instruction, unless the schedule is right; linear in its length.

    Values: a call's buckets are unsharded and waited for when it runs and until it ends; no hold is dropped that was
    not taken, none while a call or a gather still needs the storage, and none is left at the end but on a bucket that
    stays and was waited for, which no update changes. A kept bucket is gathered exactly once in addition. All of that
    holds whether what stays is there at the start or not. Registered buffers: no other bucket is in a bucket's buffer
    while that is gathered. Gradients: only trainable buckets are reduced, each at least once; every reduction is
    settled before the bucket's next and before its update; at most ``depth`` are in flight, as `Facts.load` counts
    them, and none at an update unless ``update_by_bucket``; every trainable bucket is updated
    exactly once, and after the first update nothing is run, reduced or gathered. Replicated buckets: reduced across
    groups once, after all other reductions and in their order, when all of the window has settled; settled before the
    update; and gathered across groups once, after all updates and in the order of the layout.
    Activations: freed once at most, where ``free`` asks for it, after the last call, and the same holds after that.
    Moved, where ``offload`` asks for it, after the call and once: out, gone, and on the way back before the last event
    before their need. Checkpoints: where ``stage`` asks for it, every bucket is staged once, before the first update.
    Calls: ``Run``, ``End`` and ``Reduce`` are the record's, in its order. Buckets are known.
    """
    state = _State(schedule)
    for index, instruction in enumerate(schedule.instructions):
        try:
            state.step(index, instruction)
        except ScheduleError as error:
            raise ScheduleError(f"instruction {index}, {schedule.describe(instruction)}: {error}") from None
    try:
        state.finish()
    except ScheduleError as error:
        raise ScheduleError(f"instruction {len(schedule.instructions)}, end of the schedule: {error}") from None
    _match_record(schedule)


def _match_record(schedule: Listing) -> None:
    done = [(n, i) for n, i in enumerate(schedule.instructions) if is_event(i)]
    for found, expected in zip_longest(done, project(schedule.record)):
        if found is None:
            index, spelled = len(schedule.instructions), "end of the schedule"
        elif found[1] == expected:
            continue
        else:
            index, spelled = found[0], schedule.describe(found[1])
        wanted = "nothing more" if expected is None else schedule.describe(expected)
        raise ScheduleError(f"instruction {index}, {spelled}: the record has {wanted} here")


class _State:
    """What is known of every bucket and call after some instructions."""

    def __init__(self, schedule: Listing) -> None:
        self.facts = schedule.facts
        self.lasting = schedule.lasting
        self.registered_buffers = schedule.registered_buffers
        self.gathered_in: dict[int, int] = {}  # registered buffer -> the bucket that is there
        self.open_calls: dict[Call, list[tuple[int, ...]]] = {}
        self.holds = dict.fromkeys(self.facts.by_id, 0)
        self.readers = dict.fromkeys(self.facts.by_id, 0)  # open calls that use the bucket
        self.gathers = dict.fromkeys(self.facts.by_id, 0)
        self.waited: set[int] = set()
        self.reduced: set[int] = set()
        self.in_flight: set[int] = set()
        self.crossed: dict[int, bool] = {}  # replicated buckets -> is the reduction across groups settled?
        self.spread: set[int] = set()  # buckets that were gathered across groups
        self.across = tuple(b for b in reduce_order(schedule.record) if b in self.facts.replicated)
        self.updated: set[int] = set()
        self.staged: set[int] = set()
        self.freed = False
        self.moves = _Moves(schedule)

    def step(self, index: int, instruction: Instruction) -> None:
        """Apply one instruction; ScheduleError, which says why, where it is wrong."""
        buckets = (instruction.bucket,) if isinstance(instruction, OfBucket) else getattr(instruction, "uses", ())
        if unknown := [bucket for bucket in buckets if bucket not in self.facts.by_id]:
            raise ScheduleError(f"unknown bucket {unknown[0]}")
        behind = Settle | ReduceAcross | Update | GatherAcross | Reshard
        if (self.updated or self.freed) and not isinstance(instruction, behind):
            raise ScheduleError(f"the step is over: {'an Update' if self.updated else 'a Free'} has come before it")
        if is_event(instruction):
            self.moves.event()
        match instruction:
            case Unshard(bucket):
                self._unshard(bucket)
            case Wait(bucket):
                if not self.holds[bucket]:
                    raise ScheduleError("nobody has unsharded the bucket")
                self.waited.add(bucket)
            case Run(call, uses):
                self._run(call, uses, lasts=index in self.lasting)
            case End(call):
                if not self.open_calls.get(call):
                    raise ScheduleError("the call is not running")
                for bucket in self.open_calls[call].pop():
                    self.readers[bucket] -= 1
            case Reshard(bucket):
                self._reshard(bucket)
            case Reduce(bucket):
                self._reduce(bucket)
            case Settle(bucket):
                if bucket in self.in_flight:
                    self.in_flight.remove(bucket)
                elif self.crossed.get(bucket) is False:
                    self.crossed[bucket] = True
                else:
                    raise ScheduleError("settled without a reduction in flight")
            case ReduceAcross(bucket):
                self._reduce_across(bucket)
            case GatherAcross(bucket):
                self._gather_across(bucket)
            case Update(bucket):
                self._update(bucket)
            case Stage(bucket):
                if not self.facts.stage:
                    raise ScheduleError("nothing asks for copies for checkpoints")
                if bucket in self.staged:
                    raise ScheduleError("staged twice")
                self.staged.add(bucket)
            case Free():
                if not self.facts.free:
                    raise ScheduleError("nothing asks for activations to be freed")
                if any(self.open_calls.values()):
                    raise ScheduleError("a call is still running")
                self.freed = True
            case OfCall():
                self.moves.move(index, instruction)

    def _unshard(self, bucket: int) -> None:
        if not self.holds[bucket]:
            if self.gathers[bucket] and bucket in self.facts.kept_by_stage:
                raise ScheduleError("the bucket is kept and must be gathered once")
            self.gathers[bucket] += 1
            self.waited.discard(bucket)
            number = self.registered_buffers.get(bucket)
            if number is not None and self.gathered_in.setdefault(number, bucket) != bucket:
                raise ScheduleError(f"{self.facts.name(self.gathered_in[number])} is in registered buffer {number}")
        self.holds[bucket] += 1

    def _run(self, call: Call, uses: tuple[int, ...], lasts: bool) -> None:
        for bucket in uses:
            if not self.holds[bucket]:
                raise ScheduleError(f"{self.facts.name(bucket)} is used but not unsharded")
            if bucket not in self.waited:
                raise ScheduleError(f"{self.facts.name(bucket)} is used before it was waited for")
        if lasts:
            self.open_calls.setdefault(call, []).append(uses)
            for bucket in uses:
                self.readers[bucket] += 1

    def _reshard(self, bucket: int) -> None:
        if not self.holds[bucket]:
            raise ScheduleError("no hold is left to drop")
        if self.holds[bucket] == 1:
            if self.readers[bucket]:
                raise ScheduleError("the last hold is dropped while the bucket is in use")
            if bucket not in self.waited:
                raise ScheduleError("the last hold is dropped while the bucket is being gathered")
            if bucket in self.registered_buffers:
                del self.gathered_in[self.registered_buffers[bucket]]
        self.holds[bucket] -= 1

    def _reduce(self, bucket: int) -> None:
        if not self.facts.by_id[bucket].trainable:
            raise ScheduleError("the bucket is not trainable")
        if bucket in self.in_flight:
            raise ScheduleError("reduced again before the last reduction was settled")
        if self.crossed:
            raise ScheduleError("reduced behind a reduction across groups: ranks that depart come to those later")
        if self.facts.load((*self.in_flight, bucket)) > self.facts.depth:
            raise ScheduleError(f"more than {self.facts.depth} reductions in flight, beside slight ones")
        self.in_flight.add(bucket)
        self.reduced.add(bucket)

    def _reduce_across(self, bucket: int) -> None:
        if bucket not in self.facts.replicated:
            raise ScheduleError("the bucket is not replicated")
        if bucket in self.crossed:
            raise ScheduleError("reduced across groups twice")
        if bucket not in self.reduced or self.in_flight:
            raise ScheduleError("reduced across groups before what was reduced inside was settled")
        if bucket != (expected := self.across[len(self.crossed)]):
            raise ScheduleError(f"reduced across groups before {self.facts.name(expected)}")
        self.crossed[bucket] = False

    def _gather_across(self, bucket: int) -> None:
        if bucket not in self.facts.spread:
            raise ScheduleError("the bucket's shards do not lie in several groups")
        if bucket not in self.updated:
            raise ScheduleError("gathered across groups before its update")
        if bucket in self.spread:
            raise ScheduleError("gathered across groups twice")
        if self.spread and bucket < max(self.spread):
            raise ScheduleError("gathered across groups behind a bucket that comes later in the layout")
        self.spread.add(bucket)

    def _update(self, bucket: int) -> None:
        if bucket in self.updated:
            raise ScheduleError("updated twice")
        if bucket not in self.reduced:
            raise ScheduleError("updated but never reduced")
        if bucket in self.in_flight or (bucket in self.facts.replicated and not self.crossed.get(bucket)):
            raise ScheduleError("updated before its reduction was settled")
        if self.spread:
            raise ScheduleError("updated behind a gather across groups, which may wait for the update")
        if (self.in_flight or not all(self.crossed.values())) and not self.facts.update_by_bucket:
            raise ScheduleError("updated before all reductions were settled, and buckets are not updated one by one")
        self.updated.add(bucket)

    def finish(self) -> None:
        """ScheduleError for what is missing at the end."""
        self.moves.finish()
        for bucket in self.facts.buckets:
            if self.holds[bucket.id] > (not bucket.trainable):
                raise ScheduleError(f"{bucket.name} is still unsharded")
            if self.holds[bucket.id] and bucket.id not in self.waited:
                raise ScheduleError(f"{bucket.name} stays, and is still being gathered")
            if bucket.id in self.in_flight:
                raise ScheduleError(f"a reduction of {bucket.name} was never settled: its gradient is lost")
            if bucket.trainable and bucket.id not in self.reduced:
                raise ScheduleError(f"{bucket.name} was never reduced: its gradient is lost")
            if bucket.id in self.facts.spread and bucket.id not in self.spread:
                raise ScheduleError(f"{bucket.name} was never gathered across groups")
            if bucket.trainable and bucket.id not in self.updated:
                raise ScheduleError(f"{bucket.name} was never updated")
            if self.facts.stage and bucket.id not in self.staged:
                raise ScheduleError(f"{bucket.name} is never staged")
            if bucket.id in self.facts.kept_by_stage and not self.gathers[bucket.id]:
                raise ScheduleError(f"{bucket.name} is kept but was never gathered")


class _Moves:
    """Where the activations of forward calls are. A call is named as in the instructions, with its number."""

    def __init__(self, schedule: Listing) -> None:
        self.wanted = schedule.facts.offload
        self.calls = schedule.calls
        self.needs = {call: move.until for call, move in schedule.moves.items()}
        self.needed: dict[int, list[tuple[Call, int]]] = {}  # by the last event before the need
        for call, event in self.needs.items():
            self.needed.setdefault(event - 1, []).append(call)
        self.events = 0
        self.last: dict[tuple[Call, int], OfCall] = {}

    def event(self) -> None:
        """The next event: activations must be where it needs them."""
        for call in self.needed.get(self.events, ()):
            if not isinstance(self.last.get(call), Reload | None):
                raise ScheduleError(f"what {call[0].name} has saved is needed behind this, and not on its way back")
        self.events += 1

    def move(self, index: int, instruction: OfCall) -> None:
        """Activations begin to leave, are gone, or begin to come back."""
        key = instruction.call, instruction.number
        before, self.last[key] = self.last.get(key), instruction
        match instruction:
            case Release() if not isinstance(before, Offload):
                raise ScheduleError("nothing was copied that could be released")
            case Reload() if not isinstance(before, Release):
                raise ScheduleError("nothing was released that could come back")
            case Offload() if not self.wanted:
                raise ScheduleError("nothing asks for activations to be moved")
            case Offload() if before is not None:
                raise ScheduleError("moved out twice")
            case Offload() if self.calls.get(key, (0, index))[1] >= index:
                raise ScheduleError("the call is not over")
            case Offload() if key not in self.needs:
                raise ScheduleError("no backward needs what the call has saved")
            case Offload() if self.needs[key] <= self.events:
                raise ScheduleError("a backward has needed it before")

    def finish(self) -> None:
        """Everything must be back at the end."""
        for (call, _), instruction in self.last.items():
            if not isinstance(instruction, Reload):
                raise ScheduleError(f"what {call.name} has saved never comes back")
