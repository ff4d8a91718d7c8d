"""Inductor: code for a graph, its cache and its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from zeroweave._torch.aot import aot_partition
from zeroweave._torch.fx import is_kernel, map_tensors


def inductor_partition(
    joint: torch.fx.GraphModule, inputs: Any, activation_budget: float = 1.0, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Inductor's joint passes and partitioner, with the fake mode that its random-operator passes need.

    `activation_budget` as in `aot_partition`. Why its own partitioner then: random operators are to be found after
    the joint passes, which replace them.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.custom_graph_pass import CustomPartitionerFn
    from torch._inductor.virtualized import V

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: torch.fx.GraphModule, joint_inputs: Any, **more: Any) -> Any:
            return aot_partition(gm, joint_inputs, activation_budget, **more)

        def uuid(self) -> str:
            return f"zeroweave {activation_budget}"

    partitioner = config.custom_partitioner_fn if activation_budget == 1 else Partitioner()
    with V.set_fake_mode(_fake_mode(joint)), config.patch(custom_partitioner_fn=partitioner):
        return partition_fn(joint, inputs, **options)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor expects to have been applied."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_compile(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, is_backward: bool, is_inference: bool
) -> Callable[[list[Any]], Any]:
    """Inductor's code for a graph, called with one list of arguments, which it empties.

    Compiled in its own tracing context: Inductor asserts that no other graph's output strides are in it.
    An inference graph has had no partition, so that Inductor's joint passes are run here. Inductor's option for code in
    C++ around the kernels is handed on here: `compile_fx`, which would do so, is not called.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner, get_cpp_wrapper_config
    from torch._inductor.virtualized import V

    fake_mode, devices = _fake_mode(graph), _devices(graph, inputs)
    around = torch._guards.TracingContext.try_get()
    with (
        torch._guards.tracing(torch._guards.TracingContext(fake_mode)),
        torch._guards.TracingContext.report_output_strides() as strides,
        V.set_fake_mode(fake_mode),
        _told_apart_by_processor(devices),
        config.patch(get_cpp_wrapper_config()) if config.cpp_wrapper else nullcontext(),
    ):
        inputs = _without_offsets(graph, inputs, fake_mode)
        if is_inference:
            graph = _recursive_joint_graph_passes(graph, input_device=devices[0] if devices else None)
        pin_output_strides(graph)
        cpp = config.cpp_wrapper
        code = compile_fx_inner(graph, inputs, is_backward=is_backward, is_inference=is_inference, cpp_wrapper=cpp)
    static = not any(isinstance(each, torch.SymInt) for each in inputs)
    if static and around is not None and around.output_strides is not None and strides is not None:
        # AOTAutograd compiles the backward for them: those of views may differ. It takes no symbols.
        around.output_strides.extend(strides)
    return code


def _without_offsets(graph: torch.fx.GraphModule, inputs: Sequence[Any], fake_mode: Any) -> Sequence[Any]:
    """The inputs of a graph that calls kernels, with no offset into their storages, in the graph's values as well.

    Why: where Inductor copies an argument that a kernel may write, it makes the copy by the argument's offset into its
    storage, and its code then applies that offset to the argument itself. Parameters that are views of one storage have
    such offsets, and other memory was read in their place.
    """
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def without(value: torch.Tensor) -> torch.Tensor:
        if value.storage_offset() == 0:
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)

    kernels = [node for node in graph.graph.nodes if is_kernel(node.target)]
    if not kernels or all(each.storage_offset() == 0 for each in inputs if isinstance(each, torch.Tensor)):
        return inputs
    with fake_mode:
        inputs = [map_tensors(without, each) for each in inputs]
        for node in kernels:
            if (values := node.meta.get("eager_input_vals")) is not None:
                node.meta["eager_input_vals"] = map_tensors(without, values)
    FakeTensorProp(graph, fake_mode).propagate_dont_convert_inputs(*inputs)
    return inputs


def _devices(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[torch.device]:
    """Those that a graph computes on. A single number on the CPU may be an argument of what another device does."""
    values = [*inputs, *(node.meta.get("val") for node in graph.graph.nodes)]
    tensors = [each for each in values if isinstance(each, torch.Tensor) and each.device.type != "meta"]
    return list(dict.fromkeys(each.device for each in tensors if each.device.type != "cpu" or each.dim()))


def _told_apart_by_processor(devices: Sequence[torch.device]) -> AbstractContextManager[None]:
    """Inside, Inductor finds in its cache what was made for this processor's vectors only.

    Why: its code for CPUs counts on a number of lanes, which its keys leave out. A cache that comes to a processor
    with other vectors (a folder that hosts share, a moved home) gave numbers that were wrong, without an error.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch.compiler import config

    if not any(device.type == "cpu" for device in devices):
        return nullcontext()
    return config.patch(cache_key_tag=f"{config.cache_key_tag} {pick_vec_isa()}")  # type: ignore[attr-defined]


def inductor_calls(operator: Any) -> None:
    """From now on Inductor calls an operator that is in a graph as it is.

    Why: without being told it would do so, too, but it copies arguments of operators that it does not know where they
    are not contiguous in a backward, as in each matmul for a weight's gradient. And with CI in the environment it
    refuses those that could be decomposed.
    """
    from torch._inductor.lowering import add_needs_realized_inputs, fallback_handler, lowerings, register_lowering

    if operator not in lowerings:
        add_needs_realized_inputs(operator)
        register_lowering(operator, type_promotion_kind=None)(fallback_handler(operator))


def inductor_reads_first(operators: Sequence[Any]) -> None:
    """From now on Inductor computes what reads the arguments of these operators before it runs them.

    Why: for an operator that writes an argument, as for any that it has no lowering for, Inductor puts the operator
    into its list and only then the elementwise reads that are pending, which then see the new value; those of
    views that it takes for new tensors (`view.dtype`) come later still.
    """
    from torch._inductor.ir import TensorBox
    from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
    from torch._inductor.virtualized import V

    def after_reads(operator: Any) -> Callable[..., Any]:
        fallback = fallback_handler(operator)

        def lower(*args: Any, **kwargs: Any) -> Any:
            lists = [value if isinstance(value, (list, tuple)) else [value] for value in (*args, *kwargs.values())]
            boxes = [value for values in lists for value in values if isinstance(value, TensorBox)]
            for box in boxes:
                box.realize()
            graph, names = V.graph, {box.get_name() for box in boxes}
            for buffer in graph.buffers:
                if not names.isdisjoint(buffer.get_inputs_that_alias_output()):
                    names.add(buffer.get_name())
            for name in sorted(names):
                graph.mark_buffer_mutated(name)
            return fallback(*args, **kwargs)

        return lower

    for operator in operators:
        if operator not in lowerings:
            register_lowering(operator, type_promotion_kind=None)(after_reads(operator))


def inductor_cache_hits() -> int:
    """How many graphs Inductor has found in its cache so far in this process. Why: nothing public tells it."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"])


def inductor_lock_folder() -> Path | None:
    """Where Inductor keeps its file locks, next to its cache; None where the cache is switched off.

    Why: ranks that share the cache share this folder.
    """
    from torch._inductor import config
    from torch._inductor.codecache import get_lock_dir

    return Path(get_lock_dir()) if config.fx_graph_cache and not config.force_disable_caches else None


def inductor_settings() -> str:
    """PyTorch's version and a hash of Inductor's options. Why: code and cache keys depend on them."""
    from torch._inductor import config

    return f"{torch.__version__} {config.get_hash().hex()}"


def pin_output_strides(graph: torch.fx.GraphModule) -> None:
    """Makes Inductor return every output with the strides that it has in the graph.

    Why: the program is to get the strides that it gets without a compiler. Views keep only the order of their strides.
    """
    output = graph.graph.output_node()
    nodes = output.args[0]
    assert isinstance(nodes, (tuple, list))
    output.meta["user_visible_output_idxs"] = [i for i, n in enumerate(nodes) if isinstance(n, torch.fx.Node)]
    values = [n.meta.get("val") if isinstance(n, torch.fx.Node) else None for n in nodes]
    output.meta["original_output_strides"] = [v.stride() if isinstance(v, torch.Tensor) else None for v in values]


def _fake_mode(graph: torch.fx.GraphModule) -> Any:
    """The fake mode of a traced graph's values."""
    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    values += [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
    return torch._guards.detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])
