"""Sharded parameters by name in a world of one rank: when what is gathered is dropped, and gathered anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zeroweave import dc


def is_held(runtime: dc.Runtime) -> bool:
    """True if a parameter is gathered, or on the way, and not released."""
    return any(flat.holds > parameter.persistent for parameter, flat in runtime._sharded())


def gather(ds_tensor: torch.Tensor) -> torch.Tensor:
    """The values of sharded parameter 4, as a graph that uses it once reads them."""
    full = dc.wait_allgather(dc.allgather_param(ds_tensor, 7, 4), 7, 4).clone()
    dc.release_param(full, 7, 4)
    return full


def test_persistent_parameters_are_gathered_anew_after_each_update() -> None:
    """With zero_grad after the update, too, and not while graphs of several forwards still hold them."""
    runtime = dc.init()
    shard = torch.zeros(4)
    dc.register_z3_param(4, [4], shard, torch.zeros(4), persistent=True)
    dc.register_graph_z3(7, [4])
    for step in range(3):
        for _ in range(2):
            dc.start_forward()
            assert bool((gather(shard) == step).all()) and runtime._parts.registry.parameter(4).flat.resident  # type: ignore[union-attr]
            dc.end_forward()
        held = dc.wait_allgather(dc.allgather_param(shard, 7, 4), 7, 4)
        dc.start_forward()  # a second forward before the backward of the first
        dc.release_param(held, 7, 4)
        del held
        dc.start_backward(True)
        dc.reduce_grad(torch.ones(4), 7, 4)
        dc.end_backward(7)
        shard += 1
        if step == 1:
            dc.zero_grad()
    dc.cleanup()


def test_a_partition_longer_than_its_parameter() -> None:
    """What lies beyond the parameter is padding, zero in its gradient."""
    dc.init()
    buffer = torch.full((8,), float("nan"))
    dc.register_z3_param(4, [3], shard := torch.arange(8.0), buffer)
    dc.register_graph_z3(7, [4])
    assert gather(shard).tolist() == [0, 1, 2]
    dc.start_backward(True)
    dc.reduce_grad(torch.ones(3), 7, 4)
    dc.end_backward(7)
    assert buffer.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    dc.cleanup()


class Trained:
    """One sharded parameter of ones; each step subtracts its gradient, which is one."""

    def __init__(self, persistent: bool = False) -> None:
        self.runtime = dc.init()
        self.shard, self.buffer = torch.ones(4), torch.zeros(4)
        dc.register_z3_param(4, [4], self.shard, self.buffer, persistent)
        dc.register_graph_z3(7, [4])

    def forward(self, fails: bool = False) -> None:
        dc.start_forward()
        full = dc.wait_allgather(dc.allgather_param(self.shard, 7, 4), 7, 4)
        assert torch.equal(full, self.shard), "stale values"
        if fails:
            raise KeyError
        dc.release_param(full, 7, 4)
        del full
        dc.end_forward()

    def backward(self) -> None:
        dc.start_backward(True)
        dc.reduce_grad(torch.ones(4), 7, 4)
        dc.end_backward(7)

    def step(self) -> None:
        self.forward()
        self.backward()
        self.shard -= self.buffer


@pytest.fixture(params=[False, True], ids=["released", "persistent"])
def trained(request: pytest.FixtureRequest) -> Iterator[Trained]:
    yield Trained(request.param)
    dc.cleanup()


def test_an_exception_between_gather_and_release_leaves_nothing_stale(trained: Trained) -> None:
    trained.step()
    with pytest.raises(KeyError):
        trained.forward(fails=True)
    dc.zero_grad()
    assert not is_held(trained.runtime)
    for _ in range(3):
        trained.step()
    dc.enable_profiling(True)  # nothing is held that would speak against it
    with pytest.raises(KeyError):
        trained.forward(fails=True)
    dc.zero_grad()
    dc.enable_profiling(False)
    trained.step()


def test_half_a_release_before_an_exception_counts_for_nothing(trained: Trained) -> None:
    for users in (1, 2):
        dc.start_forward()
        full = dc.wait_allgather(dc.allgather_param(trained.shard, 7, 4), 7, 4)
        for left in (True, False)[:users]:
            dc.release_param(full, 7, 4, n_users=2)
            assert is_held(trained.runtime) == left
        dc.zero_grad()


@pytest.mark.parametrize("moment", ["in the forward", "before the forward"])
def test_a_prefetch_that_nobody_used_is_not_used_after_the_update(trained: Trained, moment: str) -> None:
    for _ in range(3):
        if moment == "before the forward":
            dc.prefetch_params_fused(7, [trained.shard], [4])
        trained.forward()
        if moment == "in the forward":
            dc.prefetch_params_fused(7, [trained.shard], [4])
        trained.backward()
        trained.shard -= 1
    trained.step()


def test_a_forward_between_the_backward_and_the_update(trained: Trained) -> None:
    """An evaluation reads what is about to change: the next forward gathers it anew."""
    for evaluations in (1, 2, 0):
        trained.forward()
        trained.backward()
        for _ in range(evaluations):
            trained.forward()
            dc.prefetch_params_fused(7, [trained.shard], [4])
        trained.shard -= 1
    trained.step()


def test_persistent_parameters_stay_gathered_inside_a_window() -> None:
    trained = Trained(persistent=True)
    flat = trained.runtime._parts.registry.parameter(4).flat
    trained.forward()
    trained.backward()
    dc.start_forward()
    dc.start_backward(False)
    trained.forward()
    dc.start_forward()
    assert flat is not None and flat.holds == 1
    dc.cleanup()


def test_a_view_that_a_forward_has_saved_is_refused_after_the_update(trained: Trained) -> None:
    """Its memory has other values by then."""
    dc.start_forward()
    full = dc.wait_allgather(dc.allgather_param(trained.shard, 7, 4), 7, 4)
    x = torch.ones(4, requires_grad=True)
    loss = (x.view(2, 2) * full.view(2, 2)).sum()
    dc.release_param(full, 7, 4)
    del full
    dc.start_forward()  # another one before the update minds nothing
    trained.backward()
    (again,) = torch.autograd.grad(loss, x, retain_graph=True)
    assert torch.equal(again, torch.ones(4))
    trained.shard -= 1
    trained.forward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_without_elements() -> None:
    dc.init()
    dc.register_z3_param(0, [0, 4], shard := torch.zeros(0), torch.zeros(0))
    dc.register_graph_z3(7, [0])
    for _ in range(2):
        dc.start_forward()
        dc.prefetch_params_fused(7, [shard], [0])
        full = dc.wait_allgather(dc.allgather_param(shard, 7, 0), 7, 0)
        assert full.shape == (0, 4)
        dc.release_param(full, 7, 0)
        dc.start_backward(True)
        dc.reduce_grad(torch.zeros(0, 4), 7, 0)
        dc.end_backward(7)
    dc.cleanup()
