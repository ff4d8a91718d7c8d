"""Graphs, operators and nested containers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, cast

import torch


def boxed(graph: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """A graph's own Python code, called with one list of arguments, which it empties.

    Why: the public calling convention keeps all arguments alive until the end.
    """
    from torch.fx.graph import _BoxedCodeGen

    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    return cast(Callable[[list[Any]], Any], graph.forward)


def mark_boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tells AOTAutograd that `run` takes one list of arguments and empties it.

    Why: inputs are freed early.
    """
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def operator_schema(target: Any) -> Any:
    """The schema of an ATen operator in a graph, None for anything else. Why: its class has no public name."""
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def is_kernel(target: Any) -> bool:
    """True if it wraps code that PyTorch does not look into, as Triton kernels and some custom operators are wrapped.

    Why: what PyTorch cannot prove to be only read by it counts as written.
    """
    return isinstance(target, torch._ops.HigherOrderOperator)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and how they are nested. Why: as `map_tensors`."""
    from torch.utils._pytree import tree_flatten

    return tree_flatten(tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A copy of nested containers with `function` applied to every tensor.

    Why: pytrees are a private module.
    """
    if isinstance(tree, torch.Tensor):  # most arguments and results of modules are no containers
        return function(tree)
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, function, tree)


def run_random_plainly(module: torch.fx.GraphModule) -> None:
    """Puts operators in the place of those that save or set the state of random numbers around them.

    A state becomes a tensor without elements.

    Why: AOTAutograd wraps random operators that are recomputed so, attention among them, and gives the state a symbol
    for a size and what is wrapped no value. On GPUs it hands generators in instead, which take no memory.
    """
    from torch._guards import detect_fake_mode
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    graph = module.graph
    wrapped = [node for node in graph.nodes if node.target in (run_and_save_rng_state, run_with_rng_state)]
    if not wrapped:
        return
    mode = cast(AbstractContextManager[Any], detect_fake_mode([each.meta.get("val") for each in graph.nodes]))
    with mode:
        module.register_buffer("no_state", torch.empty(0), persistent=False)
    for node in wrapped:
        saves = node.target is run_and_save_rng_state
        operator, *args = cast(Any, node.args if saves else node.args[1:])
        with graph.inserting_before(node):
            plain = graph.call_function(operator, tuple(args), node.kwargs)
        values, named = torch.fx.map_arg((plain.args, plain.kwargs), lambda each: each.meta["val"])
        with mode:
            plain.meta["val"] = operator(*values, **named)
        if not saves:
            node.replace_all_uses_with(plain)
        for use in list(node.users):
            with graph.inserting_before(use):
                use.replace_all_uses_with(plain if use.args[1] else graph.get_attr("no_state"))
            graph.erase_node(use)
        graph.erase_node(node)


_MAKING: Final = frozenset(
    (
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.index_put.default,
        torch.ops.aten._unsafe_index_put.default,
        torch.ops.aten._unsafe_masked_index_put_accumulate.default,
        torch.ops.aten.embedding_dense_backward.default,
    )
)
_CONVERTING: Final = frozenset((torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default))


def makes_memory(node: torch.fx.Node) -> bool:
    """True if the node's result is surely new memory. Compilers leave out operators that change nothing.

    Why: PyTorch makes gradients of embeddings by operators that it has for itself.
    """
    if node.target in _CONVERTING:
        return bool(node.all_input_nodes[0].meta["val"].dtype != node.meta["val"].dtype)
    return node.target in _MAKING
