"""Storages that are freed because nobody else can read them, and those that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from zeroweave import dc
from zeroweave._torch.fx import boxed, mark_boxed
from zeroweave.errors import ConfigError
from zeroweave.runtime.storages import free_storages, owners_beside

pytestmark = pytest.mark.oldest

SIZE = 100
"""Elements of a tensor that is large here."""


@pytest.fixture(autouse=True)
def runtime() -> Iterator[None]:
    dc.init(config={"free_activation_threshold": SIZE - 1})
    yield
    dc.cleanup()


Free = Callable[[list[Tensor]], object]
"""Frees what the caller holds in a list and in one variable. No tensor is an argument: where Dynamo has been, Python
calls functions in a way that holds every argument once more.
"""


def by_list(tensors: list[Tensor]) -> None:
    free_storages(tensors, SIZE - 1, held=1)


def by_name(tensors: list[Tensor]) -> None:
    dc.free_tensors(tensors)


def by_operator(tensors: list[Tensor]) -> None:
    torch.ops.zeroweave.free_tensors.default(tensors)


@pytest.fixture(params=[by_list, by_name, by_operator])
def free(request: pytest.FixtureRequest) -> Free:
    return request.param


def large() -> tuple[Tensor, torch.UntypedStorage]:
    tensor = torch.ones(SIZE)
    return tensor, tensor.untyped_storage()


def test_what_one_variable_holds_is_freed(free: Free) -> None:
    tensor, storage = large()
    free([tensor])
    assert storage.nbytes() == 0 and tensor.shape == (SIZE,)


def test_what_another_variable_holds_stays(free: Free) -> None:
    tensor, _ = large()
    for other in (tensor, [tensor], {"x": tensor}, lambda: tensor):
        free([tensor])
        assert other is not None and torch.equal(tensor, torch.ones(SIZE))


def test_what_a_view_shows_stays(free: Free) -> None:
    for make in (lambda t: t[:3], lambda t: t.view(10, 10), lambda t: t.detach(), lambda t: t.data):
        tensor, storage = large()
        view = make(tensor)
        free([tensor])
        assert torch.equal(view, torch.ones_like(view))
        del view
        free([tensor])
        assert storage.nbytes() == 0


def test_what_autograd_saved_stays(free: Free) -> None:
    weight = torch.full((SIZE,), 2.0, requires_grad=True)
    activation = weight * 3
    loss = activation.pow(2).sum()
    storage = activation.untyped_storage()
    free([activation])
    loss.backward(retain_graph=True)
    free([activation])
    loss.backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((SIZE,), 72.0))
    del loss
    free([activation])
    assert storage.nbytes() == 0


def test_what_is_not_above_the_threshold_stays() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.bool):
        tensors = [torch.ones(n, dtype=dtype) for n in (0, 1, SIZE, SIZE + 1)]
        sizes = [t.untyped_storage().nbytes() for t in tensors]
        assert free_storages(tensors, SIZE) == (SIZE + 1) * dtype.itemsize
        assert [t.untyped_storage().nbytes() for t in tensors] == [*sizes[:-1], 0]


def test_views_that_are_all_given_up_are_freed_together() -> None:
    tensor = torch.ones(SIZE)
    views = [tensor, tensor[1:], tensor.view(10, 10)]
    storage = tensor.untyped_storage()
    assert free_storages(views[1:], 0) == 0, "two views of three"
    assert free_storages(views, 0) == 0, "the first is held by a variable"
    del tensor
    assert free_storages(views, 0) == SIZE * 4 and storage.nbytes() == 0


def test_one_storage_that_stays_keeps_no_other() -> None:
    kept = torch.ones(SIZE)
    assert free_storages([kept, torch.ones(SIZE), kept], 0) == SIZE * 4
    assert torch.equal(kept, torch.ones(SIZE))


def test_foreign_memory_stays() -> None:
    array = np.ones(SIZE, dtype=np.float32)
    assert free_storages([torch.from_numpy(array)], 0) == 0
    assert free_storages([torch.from_numpy(array)], 0) == 0 and array.all()


def test_owners_are_counted_without_the_list() -> None:
    tensor = torch.ones(1)
    assert owners_beside([torch.ones(1), tensor]) == [0, 1]
    assert owners_beside([]) == []
    assert free_storages([], 0) == 0


def test_the_threshold_of_the_default_runtime_is_in_elements() -> None:
    dc.cleanup()
    assert dc.RuntimeConfig().free_activation_threshold == 10_000_000
    tensor = torch.empty(10_000_000, dtype=torch.uint8)  # pages that are never touched cost nothing
    above = torch.empty(10_000_001, dtype=torch.uint8)
    dc.free_tensors([tensor, above])
    assert [t.untyped_storage().nbytes() for t in (tensor, above)] == [10_000_000, 0]
    with pytest.raises(ConfigError, match="free_activation_threshold must be greater than or equal to 0"):
        dc.init(config={"free_activation_threshold": -1})


# ---------------------------------------------------------------------- in the backward of a model
def freeing_backend(seen: list[torch.UntypedStorage]) -> Callable[..., Any]:
    """Compiles as `aot_eager` does, with every saved activation freed at the end of the backward.

    `seen` receives the storages of the tensors that a backward was given.
    """

    def backward(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        inputs = graph.graph.find_nodes(op="placeholder")
        with graph.graph.inserting_before(graph.graph.output_node()):
            graph.graph.call_function(torch.ops.zeroweave.free_tensors.default, (inputs,))
        graph.graph.lint()
        run = boxed(graph)

        def remember(arguments: list[Any]) -> Any:
            seen.extend(a.untyped_storage() for a in arguments)
            return run(arguments)

        return mark_boxed(remember)

    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
    )


@torch._functorch.config.patch(donated_buffer=False)  # a backward runs with retain_graph
def test_a_backward_frees_its_activations_and_nothing_that_others_hold() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 5))
    x = torch.randn(10, 20, requires_grad=True)
    expected = torch.autograd.grad(model(x).pow(2).sum(), (x, *model.parameters()))
    seen: list[torch.UntypedStorage] = []
    compiled = torch.compile(model, backend=freeing_backend(seen), dynamic=False)
    for retained in (True, False):
        y = compiled(x)
        loss = y.pow(2).sum()
        if retained:  # the graph holds the activations for another backward
            loss.backward(retain_graph=True)
            assert seen and all(storage.nbytes() for storage in seen)
            x.grad = None
            model.zero_grad()
        seen.clear()
        loss.backward()
        held = {tensor.untyped_storage().data_ptr() for tensor in (x, *model.parameters())}
        for mine, wanted in zip((x, *model.parameters()), expected, strict=True):
            assert torch.equal(mine.grad, wanted)
            mine.grad = None
        activations = [storage for storage in seen if storage.data_ptr() not in held]
        assert sorted(storage.nbytes() for storage in activations) == [0, 0, 10 * 5 * 4], "two tanh, and a tangent"
        assert y.isfinite().all()
        seen.clear()
