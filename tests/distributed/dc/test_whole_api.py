"""Every name of the low-level API, with the arguments of DeepSpeed's runtime, in one program; numbers as in PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.counting import silent
from tests.support.dc_world import draw
from tests.support.harness import Pools
from tests.support.reference import Expected, judge
from zeroweave import dc
from zeroweave.errors import EngineError, ParameterError

SHAPES = ((6, 5), (6,), (3, 6))
SWITCHES = ("sync_before_reduce", "sync_after_reduce", "sync_before_allgather", "sync_after_allgather")
WINDOWS, MICRO_STEPS = 2, 2


def loss_of(weights: list[Tensor], rank: int, index: int) -> Tensor:
    """Depends on all weights, on the rank and on the micro-step; in the weights' dtype."""
    x = draw(1 + rank, index, shape=(4, 5)).to(weights[0].dtype)
    return (torch.tanh(x @ weights[0].T + weights[1]) @ weights[2].T).square().mean()


def gradients_of(weights: list[Tensor], rank: int, index: int) -> list[Tensor]:
    leaves = [weight.detach().requires_grad_() for weight in weights]
    return list(torch.autograd.grad(loss_of(leaves, rank, index), leaves))


class Reference:
    """Plain PyTorch: SGD on the gradients' mean over both ranks, in fp32 and in float64."""

    def __init__(self) -> None:
        plain = [draw(7, i, shape=shape) for i, shape in enumerate(SHAPES)]
        self.both = plain, [weight.double() for weight in plain]
        self.sums: list[list[Tensor]] = []

    def window(self, window: int) -> None:
        """The sums over a window's micro-steps."""
        self.sums = [[torch.zeros_like(weight) for weight in weights] for weights in self.both]
        for weights, sums in zip(self.both, self.sums, strict=True):
            for micro in range(MICRO_STEPS):
                for rank in range(2):
                    for total, grad in zip(sums, gradients_of(weights, rank, 10 * window + micro), strict=True):
                        total += grad / 2

    def differs(self, held: dict[int, Tensor], starts: dict[int, int]) -> float:
        """What `judge` says of a rank's gradients, each of which begins at an element of the parameter's."""
        plain, exact = (
            {str(i): sums[i].flatten()[starts[i] : starts[i] + each.numel()] for i, each in held.items()}
            for sums in self.sums
        )
        return judge({str(i): each for i, each in held.items()}, Expected(plain, exact))[0]

    def update(self) -> None:
        for weights, sums in zip(self.both, self.sums, strict=True):
            for weight, total in zip(weights, sums, strict=True):
                weight -= total


class Program:
    """Parameters of one stage, registered as DeepSpeed registers them; each rank's buffers hold its part."""

    def __init__(self, stage: int) -> None:
        self.stage, self.rank = stage, dist.get_rank()
        self.weights = [draw(7, i, shape=shape) for i, shape in enumerate(SHAPES)]
        self.starts, self.buffers, self.shards = dict[int, int](), dict[int, Tensor](), list[Tensor]()
        for i, weight in enumerate(self.weights):
            size = weight.numel() // 2
            self.starts[i], self.buffers[i] = self.rank * size, torch.full((size,), float("nan"))
            if stage == 3:
                self.shards.append(weight.flatten().view(2, size)[self.rank].clone())
                dc.register_z3_param(i, weight.shape, self.shards[i], self.buffers[i], False, torch.float32)
            else:
                dc.register_param(i, list(weight.shape), weight, self.buffers[i], self.starts[i])

    def register(self, graph_id: int) -> None:
        register = {1: dc.register_graph_z1, 2: dc.register_graph_z2, 3: dc.register_graph_z3}[self.stage]
        register(graph_id, list(range(len(SHAPES))))

    @contextmanager
    def gathered(self, graph_id: int) -> Iterator[list[Tensor]]:
        """The weights; of stage 3 some are prefetched, and each has two users, a forward and a backward."""
        if self.stage < 3:
            yield self.weights
            return
        dtypes = [torch.float32] * 2
        dc.prefetch_params_fused(graph_id, self.shards[:2], [0, 1], dtypes)
        full = [dc.allgather_param(shard, graph_id, i, dtype=torch.float32) for i, shard in enumerate(self.shards)]
        full = [dc.wait_allgather(each, graph_id, i) for i, each in enumerate(full)]
        yield full
        for i in range(len(full)):
            flat = dc.runtime_of(graph_id)._parts.registry.parameter(i).flat
            assert flat is not None and flat.resident
            for users_left in (True, False):
                dc.release_param(full[i], graph_id, i, 2)
                assert flat.resident == users_left

    def micro_step(self, graph_id: int, index: int, update: bool) -> list[Tensor]:
        """Returns the weights that it computed with."""
        dc.start_forward()
        with self.gathered(graph_id) as weights:
            seen = [weight.clone() for weight in weights]
            grads = gradients_of(weights, self.rank, index)
            dc.end_forward()
            dc.start_backward(update=update)
            del weights
        for i in reversed(range(len(SHAPES))):
            assert dc.reduce_grad(grads[i], graph_id, i).numel() == 0
        if update:
            dc.end_backward(graph_id=graph_id)
        return seen

    def update(self) -> None:
        """SGD on this rank's parts; whole weights are what the ranks' parts are together."""
        for i, weight in enumerate(self.weights):
            mine = self.shards[i] if self.stage == 3 else weight.flatten().view(2, -1)[self.rank].clone()
            mine -= self.buffers[i]
            parts = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(parts, mine)
            weight.copy_(torch.cat(parts).view_as(weight))


def walk(stage: int, settings: Any) -> list[str]:
    """The whole program; what it was warned of on this rank."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        runtime = dc.init(dist.group.WORLD, settings, 40)
        try:
            reference, program = Reference(), Program(stage)
            for _ in range(2):
                dc.lazy_init_symm_memory()
            program.register(0)

            dc.enable_profiling(True)
            assert dc.is_profiling()
            with silent():
                program.micro_step(0, 0, update=True)
            dc.enable_profiling(False)
            assert not dc.is_profiling() and all(buffer.isnan().all() for buffer in program.buffers.values())

            for window in range(WINDOWS):
                if window:  # another compilation
                    dc.reset()
                    with pytest.raises(EngineError, match=f"no graph with graph_id {window - 1} is registered"):
                        dc.end_backward(graph_id=window - 1)
                    program.register(window)
                for micro in range(MICRO_STEPS):
                    reduced = runtime.ledger.totals()
                    seen = program.micro_step(window, 10 * window + micro, update=micro == MICRO_STEPS - 1)
                    assert all(map(torch.equal, seen, program.weights))
                    after = runtime.ledger.totals()
                    sends = after.get("reduce_scatter") != reduced.get("reduce_scatter")
                    assert sends == (stage > 1 or micro == MICRO_STEPS - 1), "stage 1 reduces where it updates"
                reference.window(window)
                assert reference.differs(program.buffers, program.starts) <= 1
                program.update()
                reference.update()

            large, small = torch.ones(11), torch.ones(10)
            storages = [each.untyped_storage() for each in (large, small)]
            dc.free_tensors([large, small])
            assert [storage.nbytes() for storage in storages] == [0, 40]
        finally:
            dc.cleanup()
        with pytest.raises(EngineError, match="there is no runtime"):
            dc.start_forward()
    return [str(each.message) for each in told if "symmetric_memory" in str(each.message)]


@pytest.mark.parametrize(
    ("stage", "double_buffer", "as_object"), [(1, True, False), (2, False, False), (3, True, True)]
)
def test_every_name_does_what_it_says(pools: Pools, stage: int, double_buffer: bool, as_object: bool) -> None:
    settings: dict[str, Any] = {
        "symmetric_memory": True,
        "double_buffer": double_buffer,
        "free_activation_threshold": 10,
        **dict.fromkeys(SWITCHES, True),
    }
    told = pools(2).run(walk, stage, SimpleNamespace(**settings, deepcompile=True) if as_object else settings)
    assert told == [["symmetric_memory: ranks compute on cpu. Parameters are gathered as without it"], []]


def cast_gradients() -> list[Tensor]:
    """Gradients of other dtypes than the one that is registered, and a gather in another one."""
    dc.init(None, {})
    try:
        buffer, shard = torch.zeros(2), torch.ones(2)
        dc.register_z3_param(0, (4,), shard, buffer, expected_grad_dtype=torch.bfloat16)
        dc.register_graph_z3(0, [0])
        for gather in (
            lambda: dc.allgather_param(shard, 0, 0, torch.bfloat16),
            lambda: dc.prefetch_params_fused(0, [shard], [0], [torch.bfloat16]),
            lambda: torch.ops.zeroweave.allgather_param(shard, 0, 0, dtype=torch.bfloat16),
        ):
            with pytest.raises(ParameterError, match=r"parameter 0 \[4\] is gathered in torch.float32"):
                gather()
        full = torch.ops.zeroweave.allgather_param(shard, 0, 0, dtype=torch.float32)
        dc.release_param(dc.wait_allgather(full, 0, 0), 0, 0)
        dc.start_backward(update=True)
        dc.reduce_grad(torch.full((4,), 1 + 2.0**-9), 0, 0)  # no bfloat16
        dc.end_backward(graph_id=0)
        return [buffer]
    finally:
        dc.cleanup()


def test_gradients_are_cast_to_the_registered_dtype(pools: Pools) -> None:
    for (buffer,) in pools(2).run(cast_gradients):
        assert buffer.tolist() == [1.0, 1.0]
