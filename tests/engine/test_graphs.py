"""Steps as CUDA graphs, as far as no GPU is needed: what a graph can serve, what is compared, and who is told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import zeroweave as zw
from zeroweave.comm.clock import Clock
from zeroweave.engine.graphs.away import Away
from zeroweave.engine.graphs.batch import Batch, Uncapturable
from zeroweave.engine.graphs.contents import Copies, Whereabouts, contents, different, digests
from zeroweave.engine.graphs.graphs import Graphs
from zeroweave.engine.values import Values
from zeroweave.optim.rates import Rates, why_not_captured

CPU = torch.device("cpu")


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def loss_fn(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return output.square().mean()


def signature(batch: Any) -> object:
    return Batch(batch, CPU).signature


# ---------------------------------------------------------------------- batches


def test_one_graph_serves_batches_that_are_nested_alike() -> None:
    ids = torch.arange(6).view(2, 3)
    one = {"ids": ids, "labels": ids, "scale": 2.0}
    other = ids + 1
    assert signature(one) == signature({"ids": other, "labels": other, "scale": 2.0})
    assert signature({"ids": ids}) == signature({"ids": ids + 1})
    assert signature(one) != signature({**one, "labels": ids.clone()})  # the same tensor twice, or two
    assert signature(one) != signature({**one, "scale": 3.0})
    assert signature([ids]) != signature((ids,))
    assert signature(ids) != signature(ids[:, :2]) != signature(ids.int())
    assert signature(ids.t()) != signature(ids.t().contiguous())


def test_a_batch_is_put_together_again_from_other_tensors() -> None:
    ids = torch.arange(6).view(2, 3)
    batch = Batch({"ids": ids.t(), "more": [ids.t(), None, "x"]}, CPU)
    copies = batch.copies()
    assert [c.stride() for c in copies] == [t.stride() for t in batch.tensors]
    again = batch.of(copies)
    assert again["more"][1:] == [None, "x"] and torch.equal(again["ids"], ids.t()) and again["ids"] is copies[0]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ([torch.zeros(2, requires_grad=True)], "requires grad"),
        ([torch.zeros(2, device="meta")], "move batches to cpu"),
        ([object()], "a object"),
        ([torch.eye(2).to_sparse()], "layout torch.sparse_coo"),
    ],
)
def test_what_no_graph_can_read(batch: Any, why: str) -> None:
    with pytest.raises(Uncapturable, match=why):
        Batch(batch, CPU)


# ---------------------------------------------------------------------- contents


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_digests_see_each_bit_and_its_place(dtype: torch.dtype) -> None:
    a = torch.arange(1001).to(dtype)
    changed, swapped = a.clone(), a.clone()
    changed[1000] = 0 if changed[1000] else 1
    swapped[[0, 999]] = swapped[[999, 0]]
    found = digests({"a": [a], "same": [a.clone()], "changed": [changed], "swapped": [swapped], "none": []})
    assert found["a"] == found["same"] != found["changed"] and found["none"] == 0
    assert (found["a"] == found["swapped"]) == torch.equal(a, swapped)
    # two tensors are told apart from one, and minus zero from zero
    assert different(digests({"x": [a, changed]}), digests({"x": [changed, a]})) == {"x"}
    zero = torch.zeros(3)
    assert digests({"x": [zero]}) != digests({"x": [-zero]})


@pytest.mark.parametrize("spare", [0, 300, 1 << 20, None])
def test_copies_lie_beside_the_tensors_as_long_as_there_is_room(spare: int | None, monkeypatch: Any) -> None:
    model, went = tiny(), list[int]()
    copy = Away.copy
    monkeypatch.setattr(Away, "copy", lambda self, tensor: went.append(tensor.nbytes) or copy(self, tensor))
    with zw.initialize(model, torch.optim.AdamW(model.parameters()), {"compile": {"enabled": False}}) as engine:
        engine.train_step(torch.ones(4, 8), loss_fn)
        named = contents(engine._parts)
        before, copies = digests(named), Copies(engine._parts, named, spare)
        engine.train_step(torch.ones(4, 8), loss_fn)
        copies.restore()
        assert digests(contents(engine._parts)) == before
        sizes = [tensor.nbytes for tensors in named.values() for tensor in tensors]
        assert sum(sizes) - sum(went) <= (sum(sizes) if spare is None else spare)
        assert bool(went) == (spare in (0, 300)) and (spare != 0 or sum(went) == sum(sizes))


def test_graphs_give_their_memory_back_before_the_state_is_gathered(monkeypatch: Any) -> None:
    """Where they hold what a step takes, whole parameters' state would have to go to host memory."""
    order, model = list[str](), tiny()
    close, whole = Graphs.close, Values.whole
    monkeypatch.setattr(Graphs, "close", lambda self: order.append("graphs") or close(self))
    monkeypatch.setattr(Values, "whole", lambda self, state: order.append("state") or whole(self, state))
    zw.initialize(model, torch.optim.AdamW(model.parameters()), {"compile": {"enabled": False}}).destroy()
    assert order[:2] == ["graphs", "state"]


def test_what_a_step_changes_is_known_by_name_and_by_address() -> None:
    model = tiny()
    engine = zw.initialize(model, torch.optim.AdamW(model.parameters()), {"compile": {"enabled": False}})
    engine.train_step(torch.ones(4, 8), loss_fn)
    parts = engine._parts
    before, copies, there = digests(contents(parts)), Copies(parts, contents(parts)), Whereabouts(parts)
    engine.train_step(torch.ones(4, 8), loss_fn)
    changed = different(before, digests(contents(parts)))
    assert {"buffer 1.running_mean", "buffer 1.num_batches_tracked"} < changed
    assert len([name for name in changed if name.startswith(("parameters", "optimizer state"))]) >= 2
    copies.restore()
    assert digests(contents(parts)) == before and there.hold()
    engine.optimizer.param_groups[0]["weight_decay"] = 0.5
    assert not there.hold()
    there = Whereabouts(parts)
    engine.set_full("0.weight", torch.ones(8, 8), "exp_avg")  # into the tensor that is there
    assert there.hold()
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    assert not there.hold()
    there, model[1].running_mean = Whereabouts(parts), torch.zeros(8)
    assert not there.hold()
    engine.destroy()


def test_where_the_optimizer_has_its_tensors_is_all_that_matters_of_its_state() -> None:
    model = tiny()
    engine = zw.initialize(model, torch.optim.AdamW(model.parameters()), {"compile": {"enabled": False}})
    engine.train_step(torch.ones(4, 8), loss_fn)
    there, state = Whereabouts(engine._parts), engine.optimizer.state
    first, *_ = fragments = list(state)
    state["stats"] = {"steps": 1}  # of the optimizer's own
    assert there.hold()
    state["stats"]["steps"], state["count"] = 2, 1
    assert there.hold()
    state[first] = state.pop(first)  # another order
    assert there.hold()
    state[first]["exp_avg"] = state[first].pop("exp_avg")
    state[first]["more"] = torch.zeros(1)
    assert there.hold()
    state[first]["exp_avg"], state[first]["exp_avg_sq"] = state[first]["exp_avg_sq"], state[first]["exp_avg"]
    assert not there.hold()
    there = Whereabouts(engine._parts)
    state[fragments[-1]]["step"] = state[fragments[-1]]["step"].clone()
    assert not there.hold()
    there = Whereabouts(engine._parts)
    state[first] = dict(state[first])
    assert not there.hold()
    there = Whereabouts(engine._parts)
    del state[first]
    assert not there.hold()
    engine.destroy(optimizer_state=False)


@pytest.mark.parametrize("opened", [2, 3, 4])
def test_a_recording_has_no_hold_in_it(opened: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although steps whose schedule is still to be made are held in their middle, which the recording comes into."""
    held: list[int] = []
    monkeypatch.setattr(Clock, "hold", lambda self, seconds: held.append(timed()))
    model = tiny()
    config = {"compile": {"enabled": False, "cuda_graphs": True}}
    with warnings.catch_warnings(), zw.initialize(model, torch.optim.Adam(model.parameters()), config) as engine:
        warnings.simplefilter("ignore")  # there are no graphs on a CPU

        def timed() -> int:
            timeline = engine._scheduler.timing._timeline
            assert timeline is not None
            return len(timeline._marked)

        for _ in range(opened):
            engine.train_step(torch.ones(4, 8), loss_fn)
        middles = held[:]
        with engine.record() as recording:
            for _ in range(2):
                engine.train_step(torch.ones(4, 8), loss_fn)
        assert len(set(middles)) == len(middles) == opened - 2  # each at another place
        assert held[len(middles) :] == [0, 0] and len(recording.steps) == 2


# ---------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("make", "looks", "why"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), True, None),
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), True, None),
        (lambda p: torch.optim.AdamW(p, capturable=True), False, None),
        (lambda p: torch.optim.AdamW(p, capturable=True), True, "cannot skip"),
        (lambda p: torch.optim.AdamW(p), False, "make it with fused=True"),
        (lambda p: torch.optim.SGD(p, lr=0.1), False, "make it with fused=True"),
        (lambda p: torch.optim.Adagrad(p), False, "capturable=True"),
    ],
)
def test_which_optimizers_a_graph_can_hold(make: Any, looks: bool, why: str | None) -> None:
    found = why_not_captured(make([nn.Parameter(torch.ones(3))]), looks)
    assert found is None if why is None else why in str(found)


def test_rates_are_read_from_the_device_and_given_back() -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.5}, {"params": [other], "lr": 0.25}], fused=True)
    rates = Rates(optimizer, CPU)
    one.grad, other.grad = torch.ones(3), torch.ones(3)
    rates.take()
    with rates.in_groups():
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert one.tolist() == [0.5] * 3 and other.tolist() == [0.75] * 3
    optimizer.param_groups[0]["lr"] = 0.125
    found = torch.ones(())
    with rates.holding(found):  # as in a graph: the rates of the last take, and nothing where `found` is 1
        rates.take()
        with rates.in_groups():
            optimizer.step()
        found.zero_()
        with rates.in_groups():
            optimizer.step()
    assert one.tolist() == [0.0] * 3 and not hasattr(optimizer, "found_inf")
    rates.take()
    with rates.in_groups():
        optimizer.step()
    assert one.tolist() == [-0.125] * 3


# ---------------------------------------------------------------------- engines


def test_where_no_graph_can_be_steps_run_as_ever_and_it_is_told_once() -> None:
    losses: dict[bool, list[float]] = {}
    for graphs in (False, True):
        model = tiny()
        config = {"compile": {"enabled": False, "cuda_graphs": graphs}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.1), config)
            losses[graphs] = [float(engine.train_step(torch.ones(4, 8), loss_fn)) for _ in range(4)]
        told = [str(each.message) for each in caught if "cuda_graphs" in str(each.message)]
        stats = engine.stats
        assert len(told) == graphs and (not graphs or "the engine computes on cpu" in told[0])
        assert stats.uncaptured_steps == ({"the engine computes on cpu": 4} if graphs else {})
        assert stats.captured_windows == stats.replayed_steps == 0
        engine.destroy()
    assert losses[True] == losses[False]
