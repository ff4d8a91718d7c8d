"""Dynamo, AOTAutograd and Inductor."""

from __future__ import annotations

import importlib
import operator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from tests.support.marks import slow
from zeroweave._torch.aot import (
    aot_base,
    aot_gradient_of,
    aot_is_tangent,
    aot_metadata,
    aot_partition,
    aot_position,
    aot_saved,
    dynamo_backend,
    keep_random_numbers,
)
from zeroweave._torch.dynamo import (
    compile_with_limit,
    dynamo_attempts,
    dynamo_entries,
    dynamo_errors,
    dynamo_example,
    dynamo_frame_seconds,
    dynamo_graph_breaks,
    keep_from_dynamo,
    module_runner,
)
from zeroweave._torch.fx import boxed, is_kernel, mark_boxed
from zeroweave._torch.inductor import (
    inductor_cache_hits,
    inductor_compile,
    inductor_decompositions,
    inductor_lock_folder,
    inductor_partition,
    inductor_settings,
)

pytestmark = pytest.mark.oldest


def test_dynamo_is_asked_what_it_kept_and_why() -> None:
    runner = module_runner("a_name")
    assert runner.__code__ is not module_runner("a_name").__code__
    compiled = torch.compile(runner, backend="eager")
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert dynamo_entries(runner.__code__) == 0
    assert torch.equal(compiled(linear, x), linear(x))
    assert dynamo_entries(runner.__code__) == 1
    attempt = dynamo_attempts()[-1]
    assert attempt.co_name == "a_name" and attempt.co_filename and attempt.co_firstlineno
    assert attempt.recompile_reason is None and attempt.fail_reason is None
    torch.compile(lambda x: (x + 1, torch._dynamo.graph_break())[0], backend="eager")(x)
    assert any("graph_break" in reason for reason in dynamo_graph_breaks())
    assert all(issubclass(kind, RuntimeError) for kind in dynamo_errors())


@pytest.mark.parametrize("limit", [2, 10])
def test_a_limit_of_variants_counts_for_one_function_only(limit: int) -> None:
    torch._dynamo.reset()  # what the other case has compiled of this code
    usual, compiled = torch._dynamo.config.recompile_limit, []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    run = compile_with_limit(scaled, limit, backend=backend, dynamic=False)
    for factor in range(limit + 2):
        assert run(torch.ones(2), factor).tolist() == [float(factor)] * 2
    assert len(compiled) == limit and torch._dynamo.config.recompile_limit == usual


def _kept(x: torch.Tensor) -> torch.Tensor:
    return _called(x) + 1


def _called(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_kept_code_and_what_it_calls_make_no_graphs_but_are_inlined() -> None:
    torch._dynamo.reset()
    keep_from_dynamo(_kept.__code__)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def breaks(x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(_kept, lambda saved: saved):
            torch._dynamo.graph_break()
            return x.exp()

    x = torch.ones(3, requires_grad=True)
    torch.compile(breaks, backend=backend)(x)
    assert not any("mul" in str(graph.graph) for graph in graphs)
    graphs.clear()
    torch.compile(lambda x: _kept(x).sin(), backend=backend, fullgraph=True)(x)
    assert len(graphs) == 1 and "mul" in str(graphs[0].graph)


@slow("inductor")
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_aot_graphs_say_what_their_values_are(lower: str) -> None:
    weight, seen = nn.Parameter(torch.ones(3)), {}

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = list(graph.graph.find_nodes(op="placeholder"))
        seen["parameter"] = [i for i, node in enumerate(nodes) if dynamo_example(node) is weight]

        def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            split = inductor_partition if lower == "inductor" else aot_partition
            return split(joint, joint_inputs, **options)

        def compile_graph(kind: str) -> Any:
            def compile_one(graph: torch.fx.GraphModule, inputs: Any) -> Any:
                descs = [node.meta["desc"] for node in graph.graph.find_nodes(op="placeholder") if "desc" in node.meta]
                seen[kind] = [aot_position(desc) for desc in descs]
                assert all(aot_base(desc) is None for desc in descs)
                assert [aot_is_tangent(desc) for desc in descs].count(True) == (kind == "backward")
                if kind == "backward":
                    outputs = graph.graph.output_node().meta["desc"]
                    seen["gradients"] = [aot_gradient_of(desc) for desc in outputs]
                else:
                    assert len(aot_metadata().input_info) == len(inputs)
                    aot_metadata().bw_donated_idxs = []
                if lower == "inductor":
                    return inductor_compile(graph, inputs, is_backward=kind == "backward", is_inference=False)
                return mark_boxed(partial(boxed(graph)))

            return compile_one

        decompositions = inductor_decompositions() if lower == "inductor" else {}
        return dynamo_backend(
            fw_compiler=compile_graph("forward"),
            bw_compiler=compile_graph("backward"),
            partition_fn=partition,
            decompositions=decompositions,
        )(graph, inputs)

    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: torch.sin(x * weight), backend=backend)(x).sum().backward()
    assert torch.allclose(x.grad, torch.cos(torch.ones(3))) and torch.allclose(weight.grad, x.grad)
    (parameter,) = seen["parameter"]
    assert sorted(seen["forward"]) == sorted(seen["gradients"]) == [0, 1] and parameter in seen["backward"]
    assert aot_saved(3).idx == 3


def test_operators_that_draw_random_numbers_are_saved() -> None:
    importlib.import_module("torch._inductor.inductor_prims")
    aten, graph = torch.ops.aten, torch.fx.Graph()
    x = graph.placeholder("x")
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    without = [
        graph.call_function(attention, (x, x, x)),
        graph.call_function(attention, (x, x, x, 0.0, True)),
        graph.call_function(aten.sin.default, (x,)),
    ]
    drawing = [
        graph.call_function(attention, (x, x, x, 0.1)),
        graph.call_function(attention, (x, x, x), {"dropout_p": 0.1}),
        graph.call_function(aten.native_dropout.default, (x, 0.5, True)),
        graph.call_function(aten.rand_like.default, (x,)),
        graph.call_function(torch.ops.prims.inductor_seeds.default, (2, torch.device("cpu"))),
    ]
    recomputed = graph.call_function(aten.rand_like.default, (x,))
    recomputed.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    keep_random_numbers(graph)
    assert not any("recompute" in node.meta for node in [x, *without])
    assert all(node.meta["recompute"] == CheckpointPolicy.MUST_SAVE for node in drawing)
    assert recomputed.meta["recompute"] == CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize("budget", [1.0, 0.5])
@pytest.mark.parametrize("lower", ["aot", "inductor"])
def test_budgets_leave_the_process_as_it_was(lower: str, budget: float) -> None:
    functorch, inductor = (importlib.import_module(f"torch.{name}.config") for name in ("_functorch", "_inductor"))

    def options() -> list[object]:
        return [
            functorch.activation_memory_budget,
            functorch.aggressive_recomputation,
            inductor.custom_partitioner_fn,
        ]

    before = options()
    split = aot_partition if lower == "aot" else inductor_partition
    seen = []

    def partition(joint: torch.fx.GraphModule, inputs: Any, **more: Any) -> Any:
        forward, backward = split(joint, inputs, budget, **more)
        seen.append(len(forward.graph.output_node().args[0]))
        return forward, backward

    backend = dynamo_backend(
        fw_compiler=lambda graph, inputs: mark_boxed(partial(boxed(graph))),
        bw_compiler=lambda graph, inputs: mark_boxed(partial(boxed(graph))),
        partition_fn=partition,
    )
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (torch.sin(x) @ torch.cos(x)).exp(), backend=backend)(x).backward()
    assert seen and x.grad is not None
    assert options() == before


@pytest.mark.matrix
@pytest.mark.skipif("AVX" not in torch.backends.cpu.get_cpu_capability(), reason="no second kind of vectors")
def test_what_inductor_made_for_other_vectors_is_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.linspace(-3, 3, 1000)

    def hits() -> int:
        """How often the graph of a new wrapper has been found in the cache, whose numbers are right."""
        before = inductor_cache_hits()
        graph = make_fx(lambda x: (torch.tanh(x) * x,), tracing_mode="fake")(x)
        fake = next(iter(graph.graph.nodes)).meta["val"]
        code = inductor_compile(graph, [fake], is_backward=False, is_inference=True)
        torch.testing.assert_close(code([x])[0], torch.tanh(x) * x)
        return inductor_cache_hits() - before

    assert [hits(), hits()] == [0, 1]
    kinds = ["default", "avx2", "avx512"]
    for capability in kinds[: kinds.index(torch.backends.cpu.get_cpu_capability().lower())]:  # that this CPU has
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        assert [hits(), hits()] == [0, 1], capability
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    assert hits() == 1


@pytest.mark.matrix
def test_code_around_the_kernels_is_in_cpp_where_inductor_is_told_so() -> None:
    from torch._inductor.utils import run_and_get_code

    left, right = torch.randn(5, 6), torch.randn(6, 7)
    graph = make_fx(lambda x, y: (torch.tanh(x @ y) + 1,), tracing_mode="fake")(left, right)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]

    def lowered() -> torch.Tensor:
        result: torch.Tensor = inductor_compile(graph, fakes, is_backward=False, is_inference=True)([left, right])[0]
        return result

    for cpp in (False, True):
        with torch._inductor.config.patch(cpp_wrapper=cpp, fx_graph_cache=False):
            result, sources = run_and_get_code(lowered)
        torch.testing.assert_close(result, torch.tanh(left @ right) + 1)
        assert any("inductor_entry_impl" in source for source in sources) == cpp


def test_inductor_tells_of_its_cache() -> None:
    folder = inductor_lock_folder()
    assert folder is not None and folder.is_dir()
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert inductor_lock_folder() is None
    settings = inductor_settings()
    assert torch.__version__ in settings and settings == inductor_settings()
    with torch._inductor.config.patch(max_fusion_size=3):
        assert inductor_settings() != settings
    assert inductor_cache_hits() >= 0
    frames = len(dynamo_frame_seconds())
    torch.compile(lambda x: x + 7, backend="eager")(torch.ones(3))
    assert len(dynamo_frame_seconds()) == frames + 1 and dynamo_frame_seconds()[-1] > 0


def test_kernels_that_pytorch_does_not_look_into_are_known() -> None:
    import torch._higher_order_ops.triton_kernel_wrap as wrap

    assert is_kernel(wrap.triton_kernel_wrapper_functional)
    assert str(wrap.triton_kernel_wrapper_mutation).startswith("triton_kernel_wrapper")
    assert is_kernel(torch.ops.higher_order.auto_functionalized_v2)
    assert not is_kernel(torch.ops.aten.copy_.default) and not is_kernel(operator.getitem)
