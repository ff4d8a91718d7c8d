"""The low-level API's life and its refusals, in a world of one rank; what ranks refuse together is tested elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeroweave import dc
from zeroweave.errors import ConfigError, EngineError, ParameterError

Call = Callable[[], Any]


@pytest.fixture
def runtime() -> Iterator[dc.Runtime]:
    """Parameters 0 and 1 in graph 5, parameter 2 in graph 6, parameter 3 in none, sharded parameter 4 in graph 7."""
    made = dc.init(None, None, 100)
    for i in range(4):
        dc.register_param(i, [2, 3], torch.zeros(2, 3), torch.full((6,), float("nan")))
    dc.register_z3_param(4, [4], torch.arange(4.0), torch.zeros(4))
    dc.register_graph_z2(5, [0, 1])
    dc.register_graph_z1(6, [2])
    dc.register_graph_z3(7, [4])
    yield made
    dc.cleanup()


def test_init_twice_and_cleanup_in_between() -> None:
    with pytest.raises(EngineError, match=r"there is no runtime: call zeroweave\.dc\.init first"):
        dc.start_forward()
    first = dc.init()
    with pytest.raises(EngineError, match=r"initialised already: call cleanup\(\) first"):
        dc.init()
    dc.register_param(0, [1], torch.zeros(1))
    dc.register_graph_z2(0, [0])
    dc.cleanup()
    dc.cleanup()
    with pytest.raises(EngineError, match="there is no runtime"):
        dc.register_param(0, [1], torch.zeros(1))
    second = dc.init()
    dc.register_param(0, [2], torch.zeros(2))
    dc.register_graph_z1(0, [0])
    assert first is not second and second.graph_ids == (0,)
    dc.cleanup()


def test_use_after_cleanup() -> None:
    runtime = dc.Runtime()
    grad = torch.zeros(1)
    runtime.register_param(0, [1], torch.zeros(1))
    runtime.register_graph_z2(0, [0])
    runtime.cleanup()
    runtime.cleanup()
    calls: list[Call] = [
        lambda: runtime.register_param(0, [1], grad),
        lambda: runtime.register_z3_param(0, [1], grad),
        lambda: runtime.update_param_grad_buffer(0, grad),
        lambda: runtime.register_graph_z1(0, [0]),
        lambda: runtime.start_forward(),
        lambda: runtime.end_forward(),
        lambda: runtime.start_backward(True),
        lambda: runtime.end_backward(0),
        lambda: runtime.reduce_grad(grad, 0, 0),
        lambda: runtime.take_gradients(),
        lambda: runtime.zero_grad(),
        lambda: runtime.allgather_param(grad, 0, 0),
        lambda: runtime.wait_allgather(grad, 0, 0),
        lambda: runtime.release_param(grad, 0, 0),
        lambda: runtime.prefetch_params_fused(0, [grad], [0]),
        lambda: runtime.lazy_init_symm_memory(),
        lambda: runtime.reset(),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="cleaned up: call init again"):
            call()
    with pytest.raises(EngineError, match="no graph with graph_id 0 is registered"):
        dc.reduce_grad(grad, 0, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dc.register_param(0, [1], torch.zeros(1)), "ds_id 0 is registered already"),
        (lambda: dc.register_param(9, [3, 2], torch.zeros(2, 3)), r"parameter 9 \[3, 2\]: ds_tensor has the shape"),
        (lambda: dc.register_param(9, [2], torch.zeros(2, dtype=torch.int64)), "ds_tensor must be a dense floating"),
        (lambda: dc.register_param(9, [2], torch.zeros(2, device="meta")), "on cpu, not torch.float32 .* on meta"),
        (lambda: dc.register_param(9, [2], torch.zeros(2), torch.zeros(2).long()), "grad_buffer must be a dense"),
        (lambda: dc.register_param(9, [2], torch.zeros(2), torch.zeros(2, device="meta")), "grad_buffer .* on meta"),
        (lambda: dc.register_param(9, [2], torch.zeros(2), torch.zeros(4)[::2]), "grad_buffer must be contiguous"),
        (lambda: dc.register_param(9, [4], torch.zeros(4), torch.zeros(2), 3), "reaches from element 3 to 5 of .* 4"),
        (lambda: dc.register_param(9, [4], torch.zeros(4), torch.zeros(2), -1), "reaches from element -1 to 1"),
        (lambda: dc.register_param(9, [4], torch.zeros(4), torch.zeros(5)), "reaches from element 0 to 5"),
        (lambda: dc.register_z3_param(9, [4], torch.zeros(3)), "contiguous partition of at least 4 elements"),
        (lambda: dc.register_z3_param(9, [4], torch.zeros(8)[::2]), "contiguous partition of at least 4 elements"),
        (
            lambda: dc.register_z3_param(9, [4], torch.zeros(4), torch.zeros(3)),
            "grad_buffer has 3 elements, its partition 4",
        ),
        (lambda: dc.register_z3_param(9, [4], torch.zeros(4).bool()), "ds_tensor must be a dense"),
        (lambda: dc.update_param_grad_buffer(9, torch.zeros(6)), "no parameter with ds_id 9"),
        (lambda: dc.update_param_grad_buffer(0, torch.zeros(5)), "has 5 elements, the registered one 6"),
        (lambda: dc.update_param_grad_buffer(0, torch.zeros(12)[::2]), "must be contiguous"),
        (
            lambda: dc.allgather_param(torch.arange(4.0), 7, 4),
            r"parameter 4 .* torch.float32 \[4\] is not the memory",
        ),
        (lambda: dc.prefetch_params_fused(7, [torch.zeros(4)], [4]), "hand in that tensor, not a copy"),
        (lambda: dc.register_graph_z2(8, [0, 9]), "no parameter with ds_id 9"),
        (lambda: dc.register_graph_z3(8, [0]), "parameter 0 .* of graph 8 was registered with register_param"),
        (lambda: dc.register_graph_z2(8, [4]), "parameter 4 .* of graph 8 was registered with register_z3_param"),
        (lambda: dc.reduce_grad(torch.zeros(2, 3), 5, 9), "no parameter with ds_id 9"),
        (lambda: dc.reduce_grad(torch.zeros(2, 3), 5, 2), "parameter 2 .* does not belong to graph 5"),
        (lambda: dc.reduce_grad(torch.zeros(3, 2), 5, 0), r"parameter 0 \[2, 3\]: its gradient has the shape \[3, 2\]"),
        (lambda: dc.reduce_grad(torch.zeros(2, 3).int(), 5, 0), "its gradient must be a dense floating-point"),
        (lambda: dc.reduce_grad(torch.zeros(2, 3, device="meta"), 5, 0), "its gradient .* on meta"),
        (lambda: dc.reduce_grad(torch.zeros(2, 3).to_sparse(), 5, 0), "its gradient must be a dense .*sparse"),
    ],
)
def test_wrong_parameters(runtime: dc.Runtime, call: Call, message: str) -> None:
    """Nothing is changed by what is refused: the runtime goes on in the same backward."""
    dc.start_backward(True)
    with pytest.raises(ParameterError, match=message):
        call()
    dc.reduce_grad(torch.ones(2, 3), 5, 1)
    dc.end_backward(5)
    buffers = [p.buffer for p in runtime._parts.registry.parameters.values()]
    assert [float(b.sum()) for b in buffers if b is not None] == pytest.approx([0, 6, 0, float("nan"), 0], nan_ok=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dc.register_graph_z2(5, [0]), "graph_id 5 is registered already"),
        (lambda: dc.reduce_grad(torch.zeros(2, 3), 8, 0), "no graph with graph_id 8"),
        (lambda: dc.end_backward(8), "no graph with graph_id 8"),
        (lambda: dc.reduce_grad(torch.zeros(2, 3), 5, 0), "outside of a backward: call start_backward first"),
        (lambda: dc.end_backward(5), "end_backward outside of a backward"),
        (lambda: dc.take_gradients(), "after the end of the updating backward"),
        (lambda: (dc.start_backward(True), dc.start_backward(True)), "the updating backward was not ended"),
        (lambda: (dc.start_backward(False), dc.end_backward(5), dc.take_gradients()), "after the end of the updating"),
        (lambda: dc.wait_allgather(torch.zeros(4), 7, 4), r"parameter 4 \[4\] is not gathered"),
        (lambda: dc.release_param(torch.zeros(4), 7, 4), r"parameter 4 \[4\] is not gathered"),
    ],
)
def test_wrong_moments(runtime: dc.Runtime, call: Call, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        call()
    runtime.zero_grad()
    dc.start_backward(True)
    dc.reduce_grad(torch.ones(2, 3), 5, 0)
    dc.end_backward(5)
    assert runtime._parts.registry.parameter(0).buffer.sum() == 6  # type: ignore[union-attr]


def test_a_graph_id_belongs_to_one_runtime(runtime: dc.Runtime) -> None:
    other = dc.Runtime()
    other.register_param(0, [1], torch.zeros(1), buffer := torch.zeros(1))
    with pytest.raises(EngineError, match="graph_id 5 belongs to another runtime"):
        other.register_graph_z2(5, [0])
    other.register_graph_z2(55, [0])
    other.start_backward(True)
    dc.reduce_grad(torch.ones(1), 55, 0)  # finds the runtime by the graph
    dc.end_backward(55)
    assert buffer.item() == 1.0
    other.cleanup()
    runtime.register_graph_z2(55, [3])


def test_reset_forgets_graphs_only(runtime: dc.Runtime) -> None:
    dc.start_backward(False)
    dc.reduce_grad(torch.ones(2, 3), 5, 0)
    dc.reset()
    assert runtime.graph_ids == ()
    with pytest.raises(EngineError, match="no graph with graph_id 5"):
        dc.reduce_grad(torch.ones(2, 3), 5, 0)
    dc.register_graph_z2(5, [0])
    dc.start_backward(True)
    dc.reduce_grad(torch.ones(2, 3), 5, 0)
    dc.end_backward(5)
    assert runtime._parts.registry.parameter(0).buffer.sum() == 12  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("key", "near"),
    [("double_bufer", "double_buffer"), ("predivreduce", "pre_div_reduce"), ("reduce_dtyp", "reduce_dtype")],
)
def test_a_typo_in_a_mapping_names_the_nearest_key(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key '{key}' in the config; did you mean '{near}'"):
        dc.init(None, {key: True})
    dc.init(None, {near: "float32" if near == "reduce_dtype" else False})  # a failed init leaves no runtime behind
    dc.cleanup()


def test_wrong_values() -> None:
    with pytest.raises(ConfigError, match="double_buffer must be a valid boolean, not 1"):
        dc.init(None, {"double_buffer": 1})
    with pytest.raises(ConfigError, match="double_buffer must be a valid boolean, not 'yes'"):
        dc.init(None, SimpleNamespace(double_buffer="yes"))
    with pytest.raises(ValueError, match="initial_reduce_bucket_size must be at least 1, not 0"):
        dc.init(None, None, 0)


def test_an_object_is_a_config_whatever_else_it_has() -> None:
    settings = SimpleNamespace(double_buffer=False, reduce_dtype="float32", deepcompile=True)
    runtime = dc.init(None, settings)
    assert runtime.config == dc.RuntimeConfig(double_buffer=False, reduce_dtype="float32")
    dc.cleanup()


@pytest.mark.parametrize("source", [{"symmetric_memory": True}, SimpleNamespace(symmetric_memory=True)])
def test_symmetric_memory_says_once_why_not(source: Any) -> None:
    with pytest.warns(UserWarning, match="symmetric_memory: nothing is gathered in a world of 1") as told:
        runtime = dc.init(None, source)
    assert [each.filename for each in told] == [__file__] and runtime.config.symmetric_memory
    with warnings.catch_warnings(action="error"):
        dc.lazy_init_symm_memory()
        dc.start_forward()
        dc.cleanup()
        dc.init(None, {"symmetric_memory": False})
        dc.lazy_init_symm_memory()
        dc.cleanup()


def test_registering_allocates_nothing(runtime: dc.Runtime) -> None:
    before = {name: (gauge.now, gauge.peak) for name, gauge in runtime.ledger._gauges.items()}
    runtime.register_param(20, [1000], torch.zeros(1000))
    runtime.register_z3_param(21, [1000], torch.zeros(1000))
    runtime.register_graph_z1(20, [20])
    runtime.register_graph_z3(21, [21])
    flat = runtime._parts.registry.parameter(21).flat
    assert flat is not None and flat.storage.nbytes() == 0
    assert before == {name: (gauge.now, gauge.peak) for name, gauge in runtime.ledger._gauges.items()}


def test_a_parameter_whose_graph_is_gone_has_no_gradient_of_the_last_window(runtime: dc.Runtime) -> None:
    dc.start_backward(True)
    for i in range(2):
        dc.reduce_grad(torch.ones(2, 3), 5, i)
    dc.end_backward(5)
    dc.reset()
    dc.register_graph_z2(9, [0])  # compiled anew, without parameter 1
    dc.start_backward(True)
    dc.reduce_grad(torch.ones(2, 3), 9, 0)
    dc.end_backward(9)
    buffers = [runtime._parts.registry.parameter(i).buffer for i in range(4)]
    assert [float(b.sum()) for b in buffers if b is not None] == pytest.approx([6, 0, 0, float("nan")], nan_ok=True)


def test_a_parameter_that_came_in_mid_window_and_had_no_gradient_is_taken_as_zero() -> None:
    dc.init(None, None, 1)
    dc.register_param(0, [4], torch.zeros(4))
    dc.register_graph_z2(0, [0])
    dc.start_backward(False)
    dc.reduce_grad(torch.ones(4), 0, 0)
    dc.end_backward(0)
    dc.register_param(1, [4], torch.zeros(4))
    dc.register_graph_z2(1, [1])
    dc.start_backward(True)
    dc.reduce_grad(torch.ones(4), 0, 0)
    dc.end_backward(0)
    taken = dc.take_gradients()
    assert [taken.view(i).tolist() for i in taken.slices] == [[2.0] * 4, [0.0] * 4]
    taken.release()
    dc.cleanup()


def test_reset_while_profiling_is_refused(runtime: dc.Runtime) -> None:
    dc.enable_profiling(True)
    with pytest.raises(EngineError, match=r"reset\(\) while profiling"):
        dc.reset()
    dc.enable_profiling(False)
    assert runtime.graph_ids == (5, 6, 7)
    dc.start_backward(True)
    dc.reduce_grad(torch.ones(2, 3), 5, 0)  # found by its graph id, still
    dc.end_backward(5)


def test_each_runtime_frees_above_its_own_threshold(runtime: dc.Runtime) -> None:
    other = dc.Runtime(None, {"free_activation_threshold": 10})
    tensors = [torch.zeros(10), torch.zeros(11)]
    dc.free_tensors(tensors)
    assert [t.untyped_storage().nbytes() for t in tensors] == [40, 44]
    other.free_tensors(tensors)
    assert [t.untyped_storage().nbytes() for t in tensors] == [40, 0]
    other.cleanup()
