"""States in host memory: the same bits as without, at rest nothing on the device, one bucket ahead, moved by budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.optim.test_step import one_group, two_groups
from tests.optim.world import MakeOptimizer, Rank, World, build_net, random_gradients
from zeroweave.comm.rounding import cast
from zeroweave.optim.adaptive import Adaptive
from zeroweave.optim.fragments import moments_of
from zeroweave.optim.lion import Lion
from zeroweave.optim.scaler import Scaled
from zeroweave.runtime.copies import CopyStream
from zeroweave.runtime.shard import whole
from zeroweave.runtime.slack import Slack
from zeroweave.runtime.transfers import Download, Transfers, Upload

STEPS = 4


class Whole(torch.optim.AdamW):
    """Of a class that nobody knows: stepped as a whole."""


KINDS: dict[str, MakeOptimizer] = {
    "adamw": two_groups(torch.optim.AdamW),
    "amsgrad": one_group(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "momentum": one_group(torch.optim.SGD, lr=0.1, momentum=0.9),
    "no state": one_group(torch.optim.SGD, lr=0.1),
    "state from the start": one_group(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    "lion": two_groups(Lion, betas=(0.8, 0.95)),
    "as a whole": one_group(Whole, lr=0.01),
}


def trained(make: MakeOptimizer, offload: str, dtype: torch.dtype, split: bool = False) -> World:
    """Parameters without gradients in some steps, and one that has its first in the third."""
    world = World(build_net(), make, 3, dtype, offload, split=split)
    for step in range(STEPS):
        without = {"tiny"} if step < 2 else {"layers.1.weight", "scalar"} if step == 2 else set()
        world.step(random_gradients(world.ranks[0].model, step, without))
    return world


def states(rank: Rank) -> list[dict[str, Any]]:
    return [rank.sharded.state_of(b, i) for b, v in rank.views.items() if v.layout.trainable for i in slots(v)]


def slots(view: Any) -> range:
    return range(len(view.layout.slots))


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.oldest
@pytest.mark.parametrize(("dtype", "split"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("offload", ["optimizer", "params"])
@pytest.mark.parametrize("kind", KINDS)
def test_bit_equal_to_states_on_the_device(kind: str, offload: str, dtype: torch.dtype, split: bool) -> None:
    here, there = trained(KINDS[kind], "", dtype), trained(KINDS[kind], offload, dtype, split)
    assert equal(here.parameters(), there.parameters())
    for mine, theirs in zip(here.ranks, there.ranks, strict=True):
        assert all(equal(a, b) for a, b in zip(states(mine), states(theirs), strict=True))
        assert mine.sharded.memory() == theirs.sharded.memory()
        for view in theirs.views.values():
            home = view.home
            assert torch.equal(home.source, cast(whole(home.at_rest), dtype)), "what is gathered is out of date"
            assert home.is_split == (split and offload == "optimizer" and view.layout.trainable)
            assert bool(home.hosts) == (offload == "params" or (view.layout.trainable and dtype != torch.float32))


def test_at_rest_states_are_views_of_one_host_tensor_for_each_kind() -> None:
    world = trained(KINDS["adamw"], "optimizer", torch.bfloat16)
    one = world.ranks[0]
    before = {id(value) for state in states(one) for value in state.values() if value.dim()}
    world.step(random_gradients(one.model, 9))
    assert before == {id(value) for state in states(one) for value in state.values() if value.dim()}
    for bucket, view in one.views.items():
        if view.layout.trainable:
            found = moments_of(one.sharded._fragments[bucket], one.optimizer.state)
            storages = {moment.value.untyped_storage().data_ptr() for moment in found}
            assert len(storages) == 2 and {moment.kind[0] for moment in found} == {"exp_avg", "exp_avg_sq"}
            fragments = {p.untyped_storage().data_ptr() for p in one.sharded._fragments[bucket].parameters}
            assert fragments == {view.shard.untyped_storage().data_ptr()}
    assert one.sharded.offload.host_nbytes() == sum(v.nbytes for s in states(one) for v in s.values() if v.dim())


class Noting(Transfers):
    """Notes the copies in `log`: sizes of what goes up, with the sign of the direction."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[tuple[str, int]] = []

    def upload(self, hosts: Any) -> Upload:
        self.log.append(("up", sum(host.tensor.nbytes for host in hosts)))
        return super().upload(hosts)

    def download(self, copies: Any) -> None:
        if copies:
            self.log.append(("down", sum(copy.tensor.nbytes for copy in copies)))
        super().download(copies)


def noted(make: MakeOptimizer) -> tuple[Rank, Noting]:
    rank, transfers = Rank(build_net(), make, 0, 1, torch.float32, "optimizer"), Noting()
    offload = rank.sharded.offload
    offload._transfers = transfers
    for moments in offload._moments.values():
        moments._transfers = transfers
    return rank, transfers


def step(rank: Rank, seed: int, without: frozenset[int] = frozenset()) -> None:
    world = World.__new__(World)
    world.layouts = tuple(view.layout for view in rank.views.values())
    shards = world.shards(random_gradients(rank.model, seed), 0)
    order = sorted(shards, reverse=True)
    update = rank.sharded.in_turn(
        lambda bucket: None if bucket in without else Scaled(shards[bucket]), {b: frozenset() for b in order}, order
    )
    for bucket in order:
        update([bucket])


def test_each_bucket_comes_one_turn_ahead_and_goes_after_it() -> None:
    rank, transfers = noted(KINDS["momentum"])
    step(rank, 0)
    transfers.log.clear()
    step(rank, 1)
    sizes = [rank.sharded.offload.nbytes(b) for b in sorted(rank.views, reverse=True) if rank.views[b].layout.trainable]
    assert len(sizes) >= 3
    directions = [direction for direction, _ in transfers.log]
    assert directions == ["up", *["up", "down"] * (len(sizes) - 1), "down"]
    assert len([each for each in transfers.log if each[0] == "down"]) == len(sizes)


class Ahead:
    """A rank whose device counts memory: `calls` bytes are in use as a call begins, besides states on their way.

    `kind`: as of KINDS; or "compact", which is AdamW.
    """

    def __init__(self, kind: str, counts: bool = True, fills: bool = False) -> None:
        made = KINDS["adamw" if kind == "compact" else kind]
        self.rank = Rank(build_net(), made, 0, 1, torch.bfloat16, "optimizer", compact=kind == "compact")
        self.offload, self.transfers, self.calls = self.rank.sharded.offload, Noting(), 0
        self.capacity = 1 << 30
        if counts:
            self.transfers.slack = slack = Slack(lambda: self.calls + slack.states, lambda: self.capacity, fills)
        self.offload._transfers = self.transfers
        for moments in self.offload._moments.values():
            moments._transfers = self.transfers
        for view in self.rank.views.values():
            view.home._transfers = self.transfers
        step(self.rank, 0)
        self.order = [b for b in sorted(self.rank.views, reverse=True) if self.rank.views[b].layout.trainable]
        self.sizes = [self.offload._nbytes(bucket) for bucket in self.order]
        self.backward([0] * 8)
        self.call(1 << 20)  # at the end of a forward
        self.transfers.log.clear()

    def backward(self, in_use: Sequence[int], whole: bool = True) -> None:
        """One whose calls find so many bytes in use, and which no update follows. Not `whole`: an exception ends it."""
        self.offload.run_ahead()
        for each in in_use:
            self.call(each)
        if whole:
            self.offload.stand()
        self.offload.recall()

    def call(self, in_use: int) -> list[int]:
        """A call begins; returns the buckets whose uploads it has begun."""
        before, self.calls = set(self.offload._lifted), in_use
        self.transfers.sweep()
        return [bucket for bucket in self.order if bucket in self.offload._lifted and bucket not in before]

    def values(self) -> list[torch.Tensor]:
        self.offload.finish()
        masters = [view.home.values() for view in self.rank.views.values()]
        return masters + [value for state in states(self.rank) for value in state.values()]


@pytest.mark.parametrize("kind", ["adamw", "compact"])
def test_with_slack_buckets_come_in_the_backward_and_never_take_more(kind: str) -> None:
    ahead, other = Ahead(kind), Ahead(kind, counts=False)
    first, second, third = ahead.sizes[:3]
    assert ahead.call(0) == [], "no backward that an update follows"
    ahead.offload.run_ahead()
    assert ahead.call(1 << 20) == []
    assert ahead.call((1 << 20) - first + 1) == []
    assert ahead.call((1 << 20) - first - second) == ahead.order[:2]
    assert ahead.transfers.slack.states == first + second
    assert ahead.call((1 << 20) - first - second - third + 1) == []
    ahead.offload.stand()
    assert ahead.call(0) == [], "the backward is over"
    for one in (ahead, other):
        step(one.rank, 1)
    assert sum(size for direction, size in ahead.transfers.log if direction == "up") == sum(ahead.sizes)
    assert all(map(torch.equal, ahead.values(), other.values()))
    assert ahead.transfers.slack.states == 0 and not ahead.offload._lifted


@pytest.mark.parametrize(
    ("kind", "written"),
    [("adamw", each) for each in ("moment", "another moment", "state", "master")]
    + [("compact", each) for each in ("codes", "other codes", "moment", "emptied", "state", "master")],
)
def test_what_is_written_between_its_upload_and_its_update_counts(kind: str, written: str) -> None:
    ahead, other = Ahead(kind), Ahead(kind, counts=False)
    ahead.offload.run_ahead()
    assert ahead.call(0) == ahead.order
    for one in (ahead, other):
        bucket = one.order[1]
        fragment, view = one.rank.sharded._fragments[bucket].parameters[0], one.rank.views[bucket]
        held = one.rank.optimizer.state[fragment]
        match written:
            case "codes":
                one.offload.compact[bucket].coded["exp_avg"].scales.mul_(3)
            case "other codes":
                coded = one.offload.compact[bucket].coded
                coded["exp_avg"] = coded["exp_avg"]._replace(scales=coded["exp_avg"].scales * 3)
            case "emptied":
                held.clear()
            case "moment" if kind == "compact":
                held["exp_avg"] = torch.full_like(fragment, 0.5)
            case "moment":
                held["exp_avg"].mul_(3)
            case "another moment":
                held["exp_avg"] = held["exp_avg"] * 3
            case "state":
                value = one.rank.sharded.state_of(bucket, 0)["exp_avg_sq"]
                one.rank.sharded.set_state(bucket, 0, "exp_avg_sq", value * 5)
            case _:
                view.home.put(view.home.values() * 2)
        step(one.rank, 1)
    assert all(map(torch.equal, ahead.values(), other.values()))
    assert ahead.transfers.slack.states == 0


def test_what_later_calls_of_the_backward_will_need_stays_free() -> None:
    """With recomputation, gradients take more than a backward frees: memory in use grows to its end."""
    ahead = Ahead("adamw")
    first, second = ahead.sizes[:2]
    most = (1 << 20) + first + second
    ahead.backward([0, 0, most - first, most - first - second])
    ahead.backward([0, 0, 0], whole=False)
    ahead.call(most)
    ahead.offload.run_ahead()
    assert ahead.call(0) == ahead.order[:1], "a later call needs all but this"
    assert ahead.call(0) == []
    assert ahead.call(0) == []
    assert ahead.call(0) == ahead.order[1:2]
    assert ahead.call(0) == [], "the backward before had fewer calls"


def test_the_first_backward_says_what_the_second_will_need() -> None:
    """Nothing has been downloaded before the first update."""
    transfers, in_use = Noting(), [0]
    transfers.slack = Slack(lambda: in_use[-1], lambda: 1 << 20)
    rooms: list[int] = []

    def noting() -> bool:
        rooms.append(transfers.slack.lasting_room)
        return True

    for _ in range(2):
        transfers.run_ahead(noting)
        for nbytes in (100, 60, 20):
            in_use.append(nbytes)
            transfers.sweep()
        transfers.stand(whole=True)
    assert rooms == [0, 0, 0, 0, 40, 80]


class Mark:
    """An event of the device, at a time. Everything is over."""

    def __init__(self, at: float) -> None:
        self.at = at

    def wait(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Mark) -> float:
        return end.at - self.at


@pytest.mark.parametrize("kind", ["adamw", "compact"])
@pytest.mark.parametrize("reads", [False, True])
def test_what_came_before_the_update_goes_after_it(kind: str, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets come in the backward, of which one is there when the update begins: so one goes in the forward."""
    ahead, other = Ahead(kind), Ahead(kind, counts=False)
    upload, times = ahead.transfers.upload, iter([1.0, 5.0])

    def timed(hosts: Any) -> Upload:
        made = upload(hosts)
        made.event = Mark(next(times, 9.0))  # type: ignore[assignment]
        return made

    monkeypatch.setattr(ahead.transfers, "upload", timed)
    monkeypatch.setattr(ahead.transfers, "now", lambda: Mark(3.0))
    least = max(ahead.sizes)
    for number in (1, 2):
        ahead.offload.run_ahead()
        ahead.call((1 << 20) - 2 * least)
        ahead.offload.stand()
        ahead.transfers.log.clear()
        for one in (ahead, other):
            step(one.rank, number)
        down = sum(direction == "down" for direction, _ in ahead.transfers.log)
        late = len(ahead.offload._late)
        assert down == len(ahead.order) - late
        assert late == (number > 1)
        if reads:
            ahead.offload.finish()
        else:
            for sent in (down, *range(down + 1, len(ahead.order) + 1)):
                ahead.call(0)
                assert sum(direction == "down" for direction, _ in ahead.transfers.log) == sent
        assert sum(direction == "down" for direction, _ in ahead.transfers.log) == len(ahead.order)
        assert ahead.transfers.slack.states == 0
    assert all(map(torch.equal, ahead.values(), other.values()))


@pytest.mark.parametrize("kind", ["adamw", "compact"])
def test_states_may_fill_what_no_step_has_needed(kind: str) -> None:
    ahead, other = Ahead(kind, fills=True), Ahead(kind, counts=False)
    first, second, third = ahead.sizes[:3]
    ahead.capacity = math.ceil(((1 << 20) + first + second + third) / 0.85)
    ahead.offload.run_ahead()
    assert ahead.call((1 << 20) + third) == ahead.order[:2]
    assert ahead.call((1 << 20) + 1) == [], "fifteen hundredths are left"
    assert ahead.call(1 << 20) == ahead.order[2:3]
    for one in (ahead, other):
        step(one.rank, 1)
    assert all(map(torch.equal, ahead.values(), other.values()))


@pytest.mark.parametrize("kind", ["adamw", "compact"])
def test_a_part_of_the_device_stays_free(kind: str) -> None:
    ahead = Ahead(kind)
    ahead.capacity = ahead.sizes[0] + ahead.sizes[1]
    ahead.offload.run_ahead()
    assert ahead.call(0) == ahead.order[:1]


@pytest.mark.parametrize("kind", ["adamw", "compact"])
def test_a_forward_takes_back_what_no_update_has_followed(kind: str) -> None:
    ahead, other = Ahead(kind), Ahead(kind, counts=False)
    ahead.offload.run_ahead()
    assert ahead.call(0) == ahead.order
    ahead.offload.stand()
    ahead.offload.recall()
    assert not ahead.offload._lifted and ahead.transfers.slack.states == 0
    assert ahead.call(0) == []
    for one in (ahead, other):
        step(one.rank, 1)
    assert all(map(torch.equal, ahead.values(), other.values()))


@pytest.mark.parametrize("kind", ["adamw", "compact"])
def test_no_memory_in_one_piece_leaves_uploads_to_the_update(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead, other = Ahead(kind), Ahead(kind, counts=False)
    ahead.offload.run_ahead()

    def upload(hosts: Any) -> Upload:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(ahead.transfers, "upload", upload)
        assert ahead.call(0) == [] and ahead.transfers.slack.states == 0
    assert ahead.call(0) == [], "once was enough"
    for one in (ahead, other):
        step(one.rank, 1)
    assert all(map(torch.equal, ahead.values(), other.values()))


def test_a_bucket_without_gradient_is_not_written() -> None:
    rank, transfers = noted(KINDS["momentum"])
    step(rank, 0)
    transfers.log.clear()
    skipped = next(bucket for bucket, view in rank.views.items() if view.layout.trainable)
    before = rank.views[skipped].shard.clone()
    step(rank, 1, frozenset({skipped}))
    ups, downs = ([d for d, _ in transfers.log].count(direction) for direction in ("up", "down"))
    assert ups - downs <= 1 and torch.equal(before, rank.views[skipped].shard)
    assert not rank.sharded.offload._lifted
    step(rank, 2)
    assert not torch.equal(before, rank.views[skipped].shard)


def test_after_an_exception_in_the_optimizer_states_are_where_they_were() -> None:
    rank = Rank(build_net(), KINDS["adamw"], 0, 1, torch.bfloat16, "optimizer")
    step(rank, 0)
    good = rank.optimizer.param_groups[0].pop("betas")
    with pytest.raises(KeyError):
        step(rank, 1)
    rank.optimizer.param_groups[0]["betas"] = good
    for bucket, view in rank.views.items():
        if view.layout.trainable:
            assert all(p.grad is None for p in rank.sharded._fragments[bucket].parameters)
            for moment in moments_of(rank.sharded._fragments[bucket], rank.optimizer.state):
                assert moment.value is rank.sharded.offload._moments[bucket]._views[moment.slot, moment.kind]
    step(rank, 2)


@pytest.mark.parametrize(
    ("dtype", "offload", "masters"),
    [
        (torch.bfloat16, "optimizer", {}),
        (torch.bfloat16, "optimizer", {"split": True}),
        (torch.bfloat16, "optimizer", {"compact": True}),
        (torch.float32, "params", {}),
    ],
)
def test_moving_changes_no_value(dtype: torch.dtype, offload: str, masters: dict[str, bool]) -> None:
    here, there = (World(build_net(), KINDS["adamw"], 2, dtype, each, **masters) for each in ("", offload))
    for index in range(6):
        for world in (here, there):
            world.step(random_gradients(world.ranks[0].model, index))
        for one in there.ranks:
            states_of = one.sharded.offload
            total = one.sharded.memory()
            for bucket in states_of.on_host(index % 2 == 0):
                states_of.move(bucket, on_host=index % 2 == 1)
            assert one.sharded.memory() == total
            moments = sum(v.nbytes for state in states(one) for v in state.values() if v.dim())
            moments = sum(each.nbytes for each in states_of.compact.values()) or moments
            assert states_of.host_nbytes() == (moments if index % 2 == 1 else 0)
    assert equal(here.parameters(), there.parameters())
    for mine, theirs in zip(here.ranks, there.ranks, strict=True):
        assert all(equal(a, b) for a, b in zip(states(mine), states(theirs), strict=True))


class Device:
    """A device with `base` bytes in use beside the states of `rank`."""

    def __init__(self, rank: Rank, base: int) -> None:
        self.offload, self.base, self.restarts = rank.sharded.offload, base, 0

    def here(self) -> int:
        return sum(self.offload.nbytes(bucket) for bucket in self.offload.on_host(False))

    def peak(self) -> int:
        return self.base + self.here() if self.base else 0

    def restart(self) -> None:
        self.restarts += 1


@pytest.mark.parametrize("base", [0, 1000])
def test_adaptive_fills_the_budget_and_never_exceeds_it(base: int) -> None:
    rank = Rank(build_net(), KINDS["adamw"], 0, 1, torch.bfloat16, "optimizer")
    step(rank, 0)
    offload = rank.sharded.offload
    buckets = offload.on_host()
    sizes = [offload.nbytes(bucket) for bucket in buckets]
    moments = sum(value.nbytes for state in states(rank) for value in state.values() if value.dim())
    assert len(set(sizes)) > 1 and sum(sizes) == moments + 2 * sum(rank.views[b].shard.numel() for b in buckets)
    device = Device(rank, base)
    adaptive = Adaptive(offload, base + sum(sizes) // 2, device.peak, device.restart)
    for settled in (False, False, True, True):
        adaptive.step_ended(settled)
        assert not offload.on_host(False), "nothing has been measured yet"
    adaptive.step_ended(True)
    held = device.here()
    assert 0 < held <= sum(sizes) // 2
    assert min(offload.nbytes(bucket) for bucket in offload.on_host()) > sum(sizes) // 2 - held, "room is left"
    step(rank, 1)
    adaptive.step_ended(True)
    assert device.here() == held
    if base:  # something else needs the memory
        device.base += 1
        adaptive.step_ended(True)
        device.base += sum(sizes) // 2 - device.here()
        adaptive.step_ended(True)
        assert device.peak() <= base + sum(sizes) // 2
        device.base = base
        for settled in (False, True, True, True):  # another schedule
            adaptive.step_ended(settled)
        assert device.here() == held
    step(rank, 2)


def test_adaptive_with_no_room_moves_nothing() -> None:
    rank = Rank(build_net(), KINDS["adamw"], 0, 1, torch.bfloat16, "optimizer")
    step(rank, 0)
    device = Device(rank, 1000)
    adaptive = Adaptive(rank.sharded.offload, 10, device.peak, device.restart)
    for _ in range(5):
        adaptive.step_ended(True)
    assert device.here() == 0


class Streamed(CopyStream):
    """Has marks, as a GPU's has. Its device counts no memory, so there is never room."""

    def mark(self) -> Any:
        return Mark(0.0)

    def wait(self, mark: Any) -> None:
        pass

    def current(self) -> Any:
        return self

    def wait_event(self, event: Any) -> None:
        pass


def test_late_downloads_begin_in_order_where_there_is_no_room() -> None:
    transfers = Transfers(torch.device("cpu"), streams=Streamed)
    host = transfers.zeros(1, torch.float32)
    for value in range(5):
        transfers.download_later([Download(torch.full((1,), float(value)), host)])
    assert transfers.slack.states == 20 and host.tensor.item() == 0
    transfers.make_room(4, most=1)
    assert transfers.slack.states == 4, "one download is under way"
    assert host.tensor.item() == 4, "the last one began last"
    transfers.finish()
    assert transfers.slack.states == 0


def test_copies_in_host_memory() -> None:
    transfers = Transfers(torch.device("cpu"))
    host = transfers.zeros(4, torch.float32)
    transfers.download([Download(torch.ones(2), host, 1), Download(torch.full((1,), 7.0), host)])
    (copy,) = transfers.upload([host]).wait()
    assert copy.tolist() == [7, 1, 1, 0] and copy.data_ptr() != host.tensor.data_ptr()
    transfers.sweep(), transfers.finish()
