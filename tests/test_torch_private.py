"""Every private name of PyTorch that `zeroweave/_torch.py` uses exists, and no other module uses any.

The first half reads the source, so that a name is tested from the moment it is written. The second half tests
what cannot be seen from the names alone.
"""

from __future__ import annotations

import ast
import importlib
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import CheckpointPolicy

import zeroweave._torch as private
from tests.distributed.reference import NORM

PACKAGE = Path(private.__file__).parent
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "_torch.py")

pytestmark = pytest.mark.oldest


def torch_names(path: Path) -> Iterator[str]:
    """Dotted names under `torch` that a file imports or reads, such as "torch._dynamo.exc.Unsupported".

    Names read through an import are resolved: after `from torch._inductor.virtualized import V`,
    `V.set_fake_mode` is "torch._inductor.virtualized.V.set_fake_mode". An import inside a top-level function
    or class counts there only.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_all: dict[str, str] = {}
    for statement in tree.body:
        for_all.update(imports_of(statement) if isinstance(statement, ast.Import | ast.ImportFrom) else {})
    for statement in tree.body:
        known = {**for_all, **imports_of(statement)}
        yield from imports_of(statement).values()
        for node in ast.walk(statement):
            chain: list[str] = []
            while isinstance(node, ast.Attribute):
                chain.insert(0, node.attr)
                node = node.value
            if chain and isinstance(node, ast.Name) and node.id in known:
                yield ".".join([known[node.id], *chain])


def imports_of(statement: ast.stmt) -> dict[str, str]:
    """The names under `torch` that the imports inside a statement bind, each with its dotted name."""
    bound: dict[str, str] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return {name: target for name, target in bound.items() if target.split(".")[0] == "torch"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def resolve(name: str) -> object:
    """The object of a dotted name; ImportError or AttributeError where there is none."""
    parts = name.split(".")
    value: object = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        try:
            value = getattr(value, part)
        except AttributeError:
            value = importlib.import_module(".".join(parts[:index]))
    return value


NAMES = sorted({name for name in torch_names(PACKAGE / "_torch.py") if is_private(name)})


@pytest.mark.parametrize("name", NAMES)
def test_the_name_exists(name: str) -> None:
    resolve(name)


def test_a_name_that_is_gone_is_noticed() -> None:
    for name in ("torch._no_such_module", "torch._dynamo.exc.NoSuchError", "torch.Tensor._no_such_attribute"):
        with pytest.raises((ImportError, AttributeError)):
            resolve(name)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_private_names_are_used_in_one_place_only(path: Path) -> None:
    assert [name for name in torch_names(path) if is_private(name)] == []


def test_every_function_says_what_it_is_for() -> None:
    tree = ast.parse((PACKAGE / "_torch.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if not ast.get_docstring(node)] == []


def test_symmetric_memory_is_found() -> None:
    assert private.has_symmetric_memory()


def test_stubs_can_be_made_and_counted_as_parameters() -> None:
    class Stub(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: object, *_: object) -> object:
            raise AssertionError(func)

    like = nn.Parameter(torch.zeros(2, 3).t())
    stub = private.wrapper_like(Stub, like)
    assert type(stub) is Stub and stub.shape == (3, 2) and stub.stride() == like.stride() and stub.requires_grad
    assert not isinstance(stub, nn.Parameter)
    private.mark_as_parameter(stub)
    assert isinstance(stub, nn.Parameter)
    assert [getter(like) for getter in private.metadata_getters()] == [0, None, None, 0]
    with private.without_torch_function():
        assert stub.numel() == 6


def test_owners_of_a_parameter_are_counted() -> None:
    """What the check before the exchange relies on: more than 2 means a live graph."""
    layer = nn.Linear(2, 2)
    assert private.use_count(layer.weight) == 1
    loss = layer(torch.ones(1, 2, requires_grad=True)).sum()
    assert private.use_count(layer.weight) > 2
    loss.backward()
    assert private.use_count(layer.weight) <= 2
    del loss
    assert private.use_count(layer.weight) == 1


def test_hooks_on_tensors_and_modules_are_seen() -> None:
    layer = nn.Linear(2, 2)
    assert not private.has_tensor_hooks(layer.weight) and not private.has_post_accumulate_hooks(layer.weight)
    layer.weight.register_hook(lambda gradient: gradient)
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert private.has_tensor_hooks(layer.weight) and private.has_post_accumulate_hooks(layer.weight)

    def hook(*_: object) -> None: ...

    layer.register_forward_pre_hook(hook)
    assert private.forward_pre_hooks(layer) == (hook,)
    assert not private.is_compiled_in_place(layer)
    layer.compile()
    assert private.is_compiled_in_place(layer)


def test_compiled_functions_and_children_are_known() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert private.child_modules(model)["0"] is model[0]
    model[0] = nn.Tanh()
    assert isinstance(private.child_modules(model)["0"], nn.Tanh)
    assert private.is_compiled_function(torch.compile(model.forward))
    assert not private.is_compiled_function(model.forward) and not private.is_compiled_function(None)


def test_recurrent_modules_follow_their_entries() -> None:
    lstm = nn.LSTM(2, 3)
    x = torch.ones(1, 1, 2)
    private.watch_rnn_weights(lstm, watch=False)
    assert not weakref.getweakrefs(lstm.weight_ih_l0)
    entries = private.parameter_entries(lstm)
    for name, weight in entries.items():
        entries[name] = nn.Parameter(torch.zeros_like(weight))
    assert lstm(x)[0].any(), "the list of weights is its own"
    private.refresh_rnn_weights(lstm)
    assert not lstm(x)[0].any()
    private.watch_rnn_weights(lstm, watch=True)
    assert weakref.getweakrefs(lstm.weight_ih_l0)


def test_who_listens_to_an_optimizer_is_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not private.is_step_replaced(optimizer) and not private.has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert private.has_step_hooks(optimizer)
    handle.remove()
    everywhere = register_optimizer_step_post_hook(lambda *_: None)
    assert private.has_step_hooks(optimizer)
    everywhere.remove()
    assert not private.has_step_hooks(optimizer)
    optimizer.step = lambda: None
    assert private.is_step_replaced(optimizer)


def test_a_step_that_nobody_hears() -> None:
    optimizer = torch.optim.SGD([parameter := nn.Parameter(torch.zeros(2))], lr=0.5)
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("before"))
    everywhere = register_optimizer_step_post_hook(lambda *_: heard.append("after"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.own = 7
    attributes = private.without_hooks(optimizer)
    assert {"defaults", "state", "param_groups", "own"} <= attributes.keys()
    assert "step" not in attributes and not any("hooks" in name for name in attributes)
    parameter.grad = torch.ones(2)
    private.step_unheard(optimizer)
    everywhere.remove()
    assert parameter.tolist() == [-0.5, -0.5] and heard == []


def test_sums_of_two_dtypes_keep_that_of_the_target() -> None:
    sums = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)]
    private.foreach_add_(sums, [torch.full((3,), 2.0, dtype=torch.bfloat16), torch.full((2,), 2.0)])
    assert [s.tolist() for s in sums] == [[3.0] * 3, [3.0] * 2]
    assert [s.dtype for s in sums] == [torch.float32, torch.bfloat16]


def test_several_tensors_at_once() -> None:
    tensors = [torch.ones(3), torch.full((2,), 2.0), torch.zeros(0)]
    assert [norm.item() for norm in private.foreach_norms(tensors)] == pytest.approx([3**0.5, 8**0.5, 0.0])
    rounded = private.foreach_norms([torch.ones(1000, dtype=torch.bfloat16)])[0]
    assert rounded.dtype == torch.float32 and rounded.item() == pytest.approx(1000**0.5, rel=NORM)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_maxima_show_what_is_not_finite(dtype: torch.dtype) -> None:
    inf, nan, most = float("inf"), float("nan"), torch.finfo(dtype).max
    rows = [[1.0, -3.0], [most, -most], [-inf, 1.0], [nan, inf], [1.0] * 999 + [nan]]
    maxima = private.foreach_maxima([torch.tensor(row, dtype=dtype) for row in rows])
    assert maxima[0].item() == 3.0 and maxima[1].item() == most and maxima[2].item() == inf
    assert [bool(maximum.isfinite()) for maximum in maxima] == [True, True, False, False, False]


def test_dynamo_is_asked_what_it_kept_and_why() -> None:
    runner = private.module_runner("a_name")
    assert runner.__code__ is not private.module_runner("a_name").__code__
    compiled = torch.compile(runner, backend="eager")
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    assert private.dynamo_entries(runner.__code__) == 0
    assert torch.equal(compiled(linear, x), linear(x))
    assert private.dynamo_entries(runner.__code__) == 1
    attempt = private.dynamo_attempts()[-1]
    assert attempt.co_name == "a_name" and attempt.co_filename and attempt.co_firstlineno
    assert attempt.recompile_reason is None and attempt.fail_reason is None
    torch.compile(lambda x: (x + 1, torch._dynamo.graph_break())[0], backend="eager")(x)
    assert any("graph_break" in reason for reason in private.dynamo_graph_breaks())
    assert issubclass(private.dynamo_backend_error(), RuntimeError)
    assert issubclass(private.dynamo_operator_error(), RuntimeError)


@pytest.mark.parametrize("limit", [2, 10])
def test_a_limit_of_variants_counts_for_one_function_only(limit: int) -> None:
    torch._dynamo.reset()  # what the other case has compiled of this code
    usual, compiled = torch._dynamo.config.recompile_limit, []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
        return x * factor

    run = private.compile_with_limit(scaled, limit, backend=backend, dynamic=False)
    for factor in range(limit + 2):
        assert run(torch.ones(2), factor).tolist() == [float(factor)] * 2
    assert len(compiled) == limit and torch._dynamo.config.recompile_limit == usual


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_aot_graphs_say_what_their_values_are(lower: str) -> None:
    weight, seen = nn.Parameter(torch.ones(3)), {}

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        nodes = list(graph.graph.find_nodes(op="placeholder"))
        seen["parameter"] = [i for i, node in enumerate(nodes) if private.dynamo_example(node) is weight]

        def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
            split = private.inductor_partition if lower == "inductor" else private.aot_partition
            return split(joint, joint_inputs, **options)

        def compile_graph(kind: str) -> Any:
            def compile_one(graph: torch.fx.GraphModule, inputs: Any) -> Any:
                descs = [node.meta["desc"] for node in graph.graph.find_nodes(op="placeholder") if "desc" in node.meta]
                seen[kind] = [private.aot_position(desc) for desc in descs]
                assert all(private.aot_base(desc) is None for desc in descs)
                if kind == "backward":
                    outputs = graph.graph.output_node().meta["desc"]
                    seen["gradients"] = [private.aot_gradient_of(desc) for desc in outputs]
                else:
                    assert len(private.aot_metadata().input_info) == len(inputs)
                    private.aot_metadata().bw_donated_idxs = []
                if lower == "inductor":
                    return private.inductor_compile(graph, inputs, is_backward=kind == "backward", is_inference=False)
                return private.mark_boxed(partial(private.boxed(graph)))

            return compile_one

        decompositions = private.inductor_decompositions() if lower == "inductor" else {}
        return private.dynamo_backend(
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
    assert private.aot_saved(3).idx == 3


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
    private.keep_random_numbers(graph)
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
    split = private.aot_partition if lower == "aot" else private.inductor_partition
    seen = []

    def partition(joint: torch.fx.GraphModule, inputs: Any, **more: Any) -> Any:
        forward, backward = split(joint, inputs, budget, **more)
        seen.append(len(forward.graph.output_node().args[0]))
        return forward, backward

    backend = private.dynamo_backend(
        fw_compiler=lambda graph, inputs: private.mark_boxed(partial(private.boxed(graph))),
        bw_compiler=lambda graph, inputs: private.mark_boxed(partial(private.boxed(graph))),
        partition_fn=partition,
    )
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: (torch.sin(x) @ torch.cos(x)).exp(), backend=backend)(x).backward()
    assert seen and x.grad is not None
    assert options() == before


def test_inductor_tells_of_its_cache() -> None:
    folder = private.inductor_lock_folder()
    assert folder is not None and folder.is_dir()
    with torch._inductor.config.patch(fx_graph_cache=False):
        assert private.inductor_lock_folder() is None
    settings = private.inductor_settings()
    assert torch.__version__ in settings and settings == private.inductor_settings()
    with torch._inductor.config.patch(max_fusion_size=3):
        assert private.inductor_settings() != settings
    assert private.inductor_cache_hits() >= 0
    frames = len(private.dynamo_frame_seconds())
    torch.compile(lambda x: x + 7, backend="eager")(torch.ones(3))
    assert len(private.dynamo_frame_seconds()) == frames + 1 and private.dynamo_frame_seconds()[-1] > 0


def test_recomputation_is_noticed() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.recomputing())
        return torch.sin(x) * x

    x = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True, False, False]


def test_owners_are_counted_but_for_graphs() -> None:
    p = nn.Parameter(torch.ones(3))
    base = private.owners(p)
    graphs = [(p * 2).sum(), (p * 3).sum()]
    assert private.owners(p) == base, "an AccumulateGrad node alone"
    kept = [p]
    assert private.owners(p) == base + 1
    graphs[0].backward()
    assert private.owners(p) == base + 1
    graphs.clear()
    assert private.owners(p) == base + 1
    kept.clear()
    saved = p.pow(2).sum()
    assert private.owners(p) > base, "C++ alone"
    del saved
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        saved = p.pow(2).sum()
    assert private.owners(p) > base
    del saved
    alive = weakref.ref(p)
    assert private.owners(p) == base, "a weak one"
    del alive


def test_graphs_and_hooks_stay_with_the_content_that_is_exchanged() -> None:
    ran = []
    p, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    vars(other)["mark"] = 1
    p.register_post_accumulate_grad_hook(lambda t: ran.append("first"))
    saves, saves_nothing = p.pow(2).sum(), (p * 3).sum()
    private.exchange(p, other)
    assert vars(p) == {"mark": 1} and not vars(other)
    assert p.sum() == 0 and other.sum() == 3
    other.register_post_accumulate_grad_hook(lambda t: ran.append("second"))
    (saves + saves_nothing + p.sum()).backward()
    assert ran == ["first", "second"], "one that is added later is added"
    assert p.grad is not None and other.grad is not None
    assert p.grad.tolist() == [1.0] * 3 and other.grad.tolist() == [5.0] * 3
    del saves, saves_nothing
    assert private.owners(p) == private.owners(other)


def test_a_process_group_can_be_made_again_with_a_store_of_its_own() -> None:
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for name in ("first", "second"):
            store, timeout = torch.distributed.HashStore(), timedelta(seconds=60)
            group = private.new_process_group([0], "gloo", store, name, timeout)
            assert torch.distributed.get_process_group_ranks(group) == [0] and group.group_name == name
            torch.distributed.all_reduce(torch.ones(1), group=group)
            torch.distributed.destroy_process_group(group)
    finally:
        torch.distributed.destroy_process_group()


def _kept(x: torch.Tensor) -> torch.Tensor:
    return _called(x) + 1


def _called(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_kept_code_and_what_it_calls_make_no_graphs_but_are_inlined() -> None:
    torch._dynamo.reset()
    private.keep_from_dynamo(_kept.__code__)
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


def test_lent_memory_has_no_part_in_the_storage() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        tensor = torch.zeros(6, dtype=dtype)
        users = private.storage_use_count(tensor.untyped_storage())
        lent = private.lent(tensor)
        assert private.storage_use_count(tensor.untyped_storage()) == users
        lent[2] = 1
        assert tensor.tolist() == [0, 0, 1, 0, 0, 0] and lent.shape == tensor.shape
    assert private.lent(torch.zeros(0)).numel() == 0
    scalar = torch.tensor(3.0)
    assert private.lent(scalar).shape == () and float(private.lent(scalar)) == 3.0


def test_each_checkpoint_is_a_segment_of_its_own() -> None:
    seen: list[object] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(private.checkpoint_segment())
        x = x.sin()
        seen.append(private.checkpoint_segment())
        return x

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(look, x, use_reentrant=False)
    assert seen[0] is seen[1] is not seen[2] and seen[2] is seen[3] and None not in seen
    look(torch.ones(2))
    assert seen[4] is None
    x.sum().backward()
    assert seen[5:] and all(each is None for each in seen[5:]), "what runs again is no first time"
