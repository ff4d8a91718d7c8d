"""Whose part of a gradient lies where: parameters that straddle ranks, empty parts, uneven ones, several groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeroweave as zw
from tests.support.dc_world import World, draw, mean_of
from tests.support.harness import Pools
from tests.support.marks import daily, slow
from tests.support.reference import judge
from zeroweave import dc
from zeroweave.errors import AgreementError, EngineError, ParameterError

Shares = list[tuple[int, int]]


def windows(stage: int, held: str, shapes: Any = None, shares: list[Shares] | None = None) -> list[float]:
    """Two windows of three micro-steps; `shares`: per rank and parameter."""
    options = {} if shapes is None else {"shapes": shapes}
    mine = None if shares is None else shares[dist.get_rank()]
    found = []
    with World(stage, held, shares=mine, **options) as world:
        for micro in range(6):
            world.micro_step(micro, update=micro in (2, 5))
            if micro in (2, 5):
                found.append(world.difference())
        kinds = set(world.ledger.totals())
    assert kinds == ({"all_reduce"} if held == "whole" else {"reduce_scatter"}), kinds
    return found


@slow("1-cut", "3-taken")
@daily(
    ("stage", "held"),
    [(1, "cut"), (3, "taken")],
    [(1, "taken"), (2, "whole"), (2, "cut"), (2, "taken"), (3, "cut")],
)
def test_three_ranks(pools: Pools, stage: int, held: str) -> None:
    """Parameter 2 straddles all three."""
    for found in pools(3).run(windows, stage, held):
        assert max(found) <= 1, found


LAYOUTS: dict[str, tuple[list[tuple[int, ...]], list[Shares]]] = {
    "all of it on one rank": ([(40,), (3,)], [[(0, 0), (0, 0)], [(0, 40), (0, 3)], [(0, 0), (0, 0)]]),
    "each on another rank": ([(40,), (3,)], [[(0, 0), (0, 3)], [(7, 0), (0, 0)], [(0, 40), (0, 0)]]),
    "uneven": ([(100,), (9,)], [[(0, 1), (8, 1)], [(1, 95), (2, 6)], [(96, 4), (0, 2)]]),
    "backwards": ([(96,)], [[(64, 32)], [(32, 32)], [(0, 32)]]),
    "more ranks than elements": ([(2,), ()], [[(1, 1), (0, 0)], [(0, 0), (0, 1)], [(0, 1), (0, 0)]]),
    "nothing at all": ([(0, 5), (6,)], [[(0, 0), (0, 2)], [(0, 0), (2, 2)], [(0, 0), (4, 2)]]),
}


@daily("name", [*LAYOUTS][:1], [*LAYOUTS][1:])
@daily("stage", [2], [1])
def test_layouts_of_the_callers_own(pools: Pools, stage: int, name: str) -> None:
    shapes, shares = LAYOUTS[name]
    for found in pools(3).run(windows, stage, "cut", shapes, shares):
        assert max(found) <= 1, found


@pytest.mark.parametrize("held", ["cut", "taken"])
def test_sharded_parameters_smaller_than_the_world(pools: Pools, held: str) -> None:
    """Ranks without an element have a partition of padding only, whose gradient is zero."""
    for found in pools(3).run(windows, 3, held, [(2,), (), (5,)]):
        assert max(found) <= 1, found


def mixed() -> tuple[float, dict[str, int]]:
    """Buckets of parameters that all ranks hold whole are all-reduced, the others reduce-scattered."""
    rank, world = dist.get_rank(), dist.get_world_size()
    runtime = dc.Runtime(None, None, 1000)
    try:
        whole = [torch.full((33,), float("nan")) for _ in range(2)]
        start, numel = [(0, 10), (10, 3), (13, 20)][rank]
        part = torch.full((numel,), float("nan"))
        runtime.register_param(0, [33], torch.zeros(33), whole[0], 5)
        runtime.register_param(1, [33], torch.zeros(33), part, start)
        runtime.register_param(2, [33], torch.zeros(33), whole[1], 99)
        runtime.register_graph_z2(0, [0, 1, 2])
        runtime.start_backward(True)
        for i in range(3):
            runtime.reduce_grad(draw(1 + rank, i, shape=(33,)), 0, i)
        runtime.end_backward(0)
        means = [mean_of([draw(1 + r, i, shape=(33,)) for r in range(world)], world) for i in range(3)]
        means[1] = means[1].map(lambda values: {"": values[""][start : start + numel]})
        got = zip((whole[0], part, whole[1]), means, strict=True)
        worst = max(judge({"": values}, mean)[0] for values, mean in got)
        return worst, {kind: traffic.calls for kind, traffic in runtime.ledger.totals().items()}
    finally:
        runtime.cleanup()


def test_all_reduce_only_where_every_rank_holds_all(pools: Pools) -> None:
    for worst, calls in pools(3).run(mixed):
        assert worst <= 1 and calls == {"all_reduce": 1, "reduce_scatter": 1}


def refused(buffers: list[Any], stages: tuple[int, int, int] = (2, 2, 2)) -> tuple[str, str, float]:
    """What registering a graph says where the ranks' (elements, offset) do not fit together; then a graph that does."""
    rank = dist.get_rank()
    runtime = dc.Runtime(None, {"deadline_seconds": 200.0}, 1000)
    try:
        held = buffers[rank]
        runtime.register_param(7, [10], torch.zeros(10), held and torch.zeros(held[0]), held[1] if held else 0)
        runtime.register_param(8, [2], torch.zeros(2), target := torch.zeros(2))
        register = {1: runtime.register_graph_z1, 2: runtime.register_graph_z2, 3: runtime.register_graph_z3}
        try:
            register[stages[rank]](1, [8, 7])
            kind, said = "", ""
        except (ParameterError, EngineError, AgreementError) as error:
            kind, said = type(error).__name__, str(error)
        runtime.register_graph_z2(2, [8])
        runtime.start_backward(True)
        runtime.reduce_grad(torch.full((2,), 1.0 + rank), 2, 8)
        runtime.end_backward(2)
        return kind, said, float(target.sum())
    finally:
        runtime.cleanup()


@pytest.mark.parametrize(
    ("buffers", "reason"),
    [
        ([(4, 0), (3, 4), (2, 8)], "no rank holds elements 7 to 8"),
        ([(4, 0), (3, 4), (2, 7)], "no rank holds elements 9 to 10"),
        ([(5, 0), (3, 4), (3, 7)], "several ranks hold element 4"),
        ([(10, 0), (3, 4), (0, 0)], "several ranks hold element 4"),
        ([(10, 0), None, (10, 0)], "some ranks registered a grad_buffer and some did not"),
    ],
)
def test_gaps_and_overlaps_name_the_parameter_and_the_runtime_goes_on(
    pools: Pools, buffers: list[Any], reason: str
) -> None:
    for kind, said, total in pools(3).run(refused, buffers):
        assert kind == "ParameterError" and "parameter 7 [10]" in said and reason in said
        assert total == 4.0


def test_what_one_rank_refuses_all_refuse(pools: Pools) -> None:
    """Rank 1 cannot register the graph: the others do not wait for it."""
    found = pools(3).run(refused, [(10, 0)] * 3, (2, 3, 2))
    assert [kind for kind, _, _ in found] == ["ParameterError"] * 3
    for rank, (_, said, total) in enumerate(found):
        assert "registered with register_param" in said and total == 4.0
        assert ("rank 1 could not register graph 1: " in said) == (rank != 1)


def test_one_graph_at_two_stages(pools: Pools) -> None:
    for kind, said, total in pools(3).run(refused, [(10, 0)] * 3, (2, 2, 1)):
        assert kind == "ParameterError" and "different stages" in said and total == 4.0


def unlike(there: dict[str, Any]) -> str:
    """Rank 2 registers a sharded parameter in another way."""
    rank = dist.get_rank()
    options = {"ds_tensor": torch.zeros(2), "persistent": False, **(there if rank == 2 else {})}
    runtime = dc.Runtime(None, {"deadline_seconds": 200.0})
    try:
        runtime.register_z3_param(0, [5], **options)
        with pytest.raises(ParameterError) as raised:
            runtime.register_graph_z3(0, [0])
        return str(raised.value)
    finally:
        runtime.cleanup()


@pytest.mark.parametrize("there", [{"ds_tensor": torch.zeros(3)}, {"persistent": True}], ids=["size", "persistent"])
def test_sharded_parameters_unlike_on_another_rank(pools: Pools, there: dict[str, Any]) -> None:
    for said in pools(3).run(unlike, there):
        assert "sizes of their partitions, or values of `persistent`" in said


def other_graph() -> tuple[str, str]:
    """Ranks that register other graphs, and graphs of other parameters."""
    rank = dist.get_rank()
    runtime = dc.Runtime(None, {"deadline_seconds": 200.0})
    try:
        for i in range(2):
            runtime.register_param(i, [3], torch.zeros(3))
        with pytest.raises(ParameterError) as parameters:
            runtime.register_graph_z2(0, [0] if rank else [0, 1])
        with pytest.raises(AgreementError) as graphs:
            runtime.register_graph_z2(10 + (rank == 1), [0])
        return str(parameters.value), str(graphs.value)
    finally:
        runtime.cleanup()


@pytest.mark.matrix
def test_other_graphs_on_another_rank(pools: Pools) -> None:
    for parameters, graphs in pools(3).run(other_graph):
        assert "graph 0: ranks" in parameters and "different stages, parameters" in parameters
        assert "the registration of graph 10" in graphs and "the registration of graph 11" in graphs


def side_by_side() -> list[float]:
    """Runtimes over {0, 1}, {1, 2} and all ranks, stages and steps interleaved; then the first two anew."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    rank, found = dist.get_rank(), []
    try:
        for turn in range(2):
            mine = [(k, group) for k, group in enumerate(groups) if rank in ([0, 1], [1, 2])[k]]
            # The last graph id of each Runtime is its own: ids are unique in a process.
            worlds = [World(1 + k, "cut", group=group, graphs={10 + k: range(5)}) for k, group in mine]
            worlds.append(World(3, "cut", graphs={20: range(5)}))
            for micro in range(4):
                for world in worlds:
                    world.micro_step(10 * turn + micro, update=micro == 3)
            found += [world.difference() for world in worlds]
            for world in worlds:
                world.close()
    finally:
        for group in groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
    return found


def test_runtimes_over_several_groups(pools: Pools) -> None:
    found = pools(3).run(side_by_side)
    assert [len(each) for each in found] == [4, 6, 4]
    assert max(map(max, found)) <= 1, found


def beside_an_engine() -> tuple[float, list[float]]:
    """An engine and a Runtime take turns; the engine's parameters equal those of a run without the Runtime."""
    trained, differences = [], []
    for beside in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        world = World(2, "taken") if beside else None
        with zw.initialize(model, optimizer, {"stage": 3, "compile": {"enabled": False}}) as engine:
            for step in range(3):
                x = draw(1 + dist.get_rank(), step, shape=(4, 6))
                loss = F.mse_loss(engine(x), torch.zeros(4, 2))
                if world is not None:
                    world.micro_step(step, update=True)
                    differences.append(world.difference())
                engine.backward(loss)
                engine.step()
            with engine.full_parameters() as full:
                trained.append(torch.cat([p.detach().flatten().clone() for p in dict(full).values()]))
        if world is not None:
            world.close()
    return float((trained[0] - trained[1]).abs().max()), differences


def test_a_runtime_beside_an_engine(pools: Pools) -> None:
    for difference, found in pools(3).run(beside_an_engine):
        assert difference == 0.0 and max(found) <= 1
