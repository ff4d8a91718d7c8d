"""When the memory of gradients is there: reduce buckets until the backward is over, targets until they are released."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.dc_world import Ends, Named, World, draw
from tests.support.harness import Pools
from tests.support.marks import daily
from tests.support.reference import Expected, judge
from zeroweave import dc
from zeroweave.errors import EngineError

GRAPHS = {0: [0, 1], 1: [2], 2: [3, 4]}
ROWS = [(1, "cut"), (1, "taken"), (2, "cut"), (3, "cut")]


class Chain:
    """Three graphs in a row; the one called `empty` has no gradients to reduce, only those of its input."""

    def __init__(self, world: World, empty: int | None, release: bool | None = None) -> None:
        self.world, self.empty, self.release = world, empty, release
        self.gauge = world.ledger.gauge("reduce buckets")
        self.released_early: list[int] = []

    def end(self, graph_id: int) -> None:
        executor = self.world.runtime._parts.gradients
        self.world.runtime.end_backward(graph_id, self.release)
        if (self.gauge.now > 0) != bool(executor._reductions.in_flight):
            self.released_early.append(graph_id)

    def segment(self, h: Tensor, graph_id: int, micro: int, among: list[torch.nn.Parameter] | None) -> Tensor:
        """Through the parameters by name, or through those of `among`."""
        if among is None:
            h = Ends.apply(h, lambda: self.end(graph_id))
        h = h * 1.5
        for i in () if graph_id == self.empty else GRAPHS[graph_id]:
            p = Named.apply(self.world.mine[i], self.world.runtime, (graph_id, i)) if among is None else among[i]
            x = draw(1 + self.world.rank, micro, i, shape=p.shape).to(p.dtype)
            h = h + torch.tanh(p * x * h).sum()
        return h

    def backward(self, order: tuple[int, ...], micro: int, update: bool, whole: bool) -> None:
        """`whole`: one backward through all segments; else one for each, the last segment's first."""
        self.world.runtime.start_backward(update)
        for among in (None, self.world.plain, self.world.exact):
            inputs: list[Tensor] = []
            outputs: list[Tensor] = []
            dtype = torch.float64 if among is self.world.exact else torch.float32
            h = torch.ones((), dtype=dtype, requires_grad=True)
            for graph_id in order:
                inputs.append(h if whole else h.detach().requires_grad_())
                h = self.segment(inputs[-1], graph_id, micro, among)
                outputs.append(h)
            if whole:
                h.backward()
                continue
            grad = torch.ones((), dtype=dtype)
            for x, y in zip(reversed(inputs), reversed(outputs), strict=True):
                y.backward(grad)
                assert x.grad is not None
                grad = x.grad


def chained(stage: int, held: str, whole: bool) -> list[tuple[Any, ...]]:
    """Every order of the graphs, each of them empty; what is left of the buckets, early releases, the difference."""
    found = []
    with World(stage, held, graphs=GRAPHS) as world:
        for order in itertools.permutations(GRAPHS):
            for empty in (None, 0, 1, 2):
                chain = Chain(world, empty)
                chain.gauge.peak = 0
                for micro in (0, 1):
                    chain.backward(order, micro, update=micro == 1, whole=whole)
                    left = chain.gauge.now
                found.append((order, empty, left, chain.released_early, chain.gauge.peak > 0, world.difference()))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("whole", [True, False], ids=["one backward", "three backwards"])
@daily(("stage", "held"), ROWS[1:3], [ROWS[0], ROWS[3]])
def test_buckets_go_with_the_backward_whichever_graph_reduces(pools: Pools, stage: int, held: str, whole: bool) -> None:
    for found in pools(2).run(chained, stage, held, whole):
        assert len(found) == 24
        for order, empty, left, early, used, difference in found:
            assert (left, early, used) == (0, [], True), (order, empty)
            assert difference <= 1, (order, empty)


def inside(stage: int, release: bool | None) -> tuple[list[int], list[int], float]:
    """Bytes of the buckets just before and just after each end that is called inside one backward."""
    before, after = [], []
    with World(stage, "cut", graphs=GRAPHS, bucket=1) as world:
        chain = Chain(world, None, release)
        end = chain.end

        def watched(graph_id: int) -> None:
            before.append(chain.gauge.now)
            end(graph_id)
            after.append(chain.gauge.now)

        chain.end = watched  # type: ignore[method-assign]
        chain.backward((0, 1, 2), 0, update=True, whole=True)
        if release is False:
            assert chain.gauge.now > 0 and chain.released_early == []
            with pytest.raises(EngineError, match="was not ended"):
                world.runtime.start_backward(True)
            world.runtime.end_backward(0)
        assert chain.gauge.now == 0
        return before, after, world.difference()


@pytest.mark.parametrize("release", [None, True, False])
@daily("stage", [2], [1, 3])
def test_release_by_hand(pools: Pools, stage: int, release: bool | None) -> None:
    """True settles and releases at once, whatever is to come; False leaves it to another end."""
    for before, after, difference in pools(2).run(inside, stage, release):
        assert all(before) and len(after) == 3, (before, after)
        assert not any(after) if release else all(after), (before, after)
        assert difference <= 1


def at_the_optimizer(stage: int, gas: int) -> dict[str, Any]:
    """Bytes of the accounts at registration, and from the updating backward until the partition is released."""
    with World(stage, "taken", bucket=1000) as world:
        runtime = world.runtime
        names = ("gradients", "reduce buckets", "flats")

        def bytes_now() -> list[int]:
            return [world.ledger.gauge(name).now for name in names]

        registered = bytes_now() + [world.ledger.gauge(name).peak for name in names]
        handed_in: list[StorageWeakRef] = []
        for micro in range(gas):
            runtime.start_backward(micro == gas - 1)
            for i, p in enumerate(world.mine):
                grad = draw(1, world.rank, micro, i, shape=p.shape)
                handed_in.append(StorageWeakRef(grad.untyped_storage()))
                runtime.reduce_grad(grad, 0, i)
                del grad
        runtime.end_backward(0)
        waiting = bytes_now()
        partition = runtime.take_gradients()
        taken, size = bytes_now(), partition.flat.untyped_storage().nbytes()
        gc.collect()
        alive = sum(not storage.expired() for storage in handed_in)
        view, flat = partition.view(0), weakref.ref(partition.flat)
        padded = sum(-(-4 * numel // 128) * 128 for _, _, numel in partition.slices.values())
        partition.release()
        partition.release()  # a second time does nothing
        freed = view.untyped_storage().nbytes()
        del partition, view
        gc.collect()
        return {
            "registered": registered,
            "waiting": waiting,
            "taken": taken,
            "size": (size, padded),
            "left": (bytes_now(), freed, alive, flat() is None),
        }


@daily("gas", [3], [1])
@daily("stage", [1, 3], [2])
def test_at_the_optimizer_there_is_the_partition_alone(pools: Pools, stage: int, gas: int) -> None:
    for found in pools(2).run(at_the_optimizer, stage, gas):
        size, padded = found["size"]
        assert found["registered"] == [0] * 6
        assert size == padded and found["waiting"] == found["taken"] == [size, 0, 0]
        # Released, it has no storage although a view lives; the runtime refers neither to it nor to any gradient.
        assert found["left"] == ([0, 0, 0], 0, 0, True)


def local_sums(gas: int) -> list[tuple[int, int]]:
    """Bytes of gradients and of buckets after each backward of ZeRO-1."""
    found = []
    with World(1, "cut") as world:
        for micro in range(gas):
            world.micro_step(micro, update=micro == gas - 1)
            found.append((world.ledger.gauge("gradients").now, world.ledger.gauge("reduce buckets").now))
    return found


def test_local_sums_are_counted_while_they_last(pools: Pools) -> None:
    numels = 35 + 7 + 150 + 1 + 3
    assert pools(2).run(local_sums, 3) == [[(4 * numels, 0), (4 * numels, 0), (0, 0)]] * 2


class Wrapper:
    """The smallest optimizer wrapper: SGD on a float32 copy of this rank's parts."""

    def __init__(self, lr: float) -> None:
        self.lr, self.masters = lr, {}
        self.seen: list[int] = []

    def take_gradients(self, partition: dc.GradientPartition) -> None:
        for ds_id in partition.slices:
            self.masters[ds_id] = -self.lr * partition.view(ds_id)
        partition.release()


def handed_over() -> float:
    wrapper = Wrapper(0.5)
    with World(1, "taken") as world:
        world.micro_step(0, update=True)
        wrapper.take_gradients(partition := world.runtime.take_gradients())
        assert world.ledger.gauge("gradients").now == 0
        expected: list[dict[str, Tensor]] = []
        for copies in (world.plain, world.exact):
            expected.append({})
            for i, p in enumerate(copies):
                assert p.grad is not None
                torch.distributed.all_reduce(p.grad)
                _, start, numel = partition.slices[i]
                expected[-1][str(i)] = -0.25 * p.grad.flatten()[start : start + numel]
        return judge({str(i): values for i, values in wrapper.masters.items()}, Expected(*expected))[0]


def test_an_optimizer_wrapper_takes_the_partition(pools: Pools) -> None:
    assert max(pools(2).run(handed_over)) <= 1
