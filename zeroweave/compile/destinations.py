"""Gradients of parameters that need no copy: matmuls write them to their destinations, or they have their own memory.

Before:  mm(a, b) · permute · permute · output
After:   matmul_into(destination, a, b, adds), for further arguments; that output is None

The caller of the code says each time whether it writes, or adds to the destination, as when backwards add up. So one
code serves all uses of the gradients. A destination that is written may have no memory until then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from zeroweave._torch.aot import aot_is_tangent
from zeroweave._torch.fx import makes_memory, operator_schema
from zeroweave.compile.bind import Roles, gradients_of, graph_outputs

_MATMUL: Final = torch.ops.aten.mm.default
_LIBRARY: Final = torch.library.Library("zeroweave", "FRAGMENT")
_LIBRARY.define("matmul_into(Tensor(a!) into, Tensor left, Tensor right, Tensor adds) -> ()")


def _matmul_into(into: Tensor, left: Tensor, right: Tensor, adds: Tensor) -> None:
    """Writes the product of two matrices to a contiguous tensor, or adds it there. `adds`: a bool on the CPU, 0-dim.

    What is written gets its memory now, if it has none. What is added to may be float32 where the matrices are in half
    precision; GPUs do not round the product then.
    """
    if not adds:
        storage = into.untyped_storage()
        if not storage.nbytes():
            storage.resize_(into.nbytes)
        torch.ops.aten.addmm_.default(into, left, right, beta=0)  # reads nothing there, and runs the kernel of a matmul
    elif into.dtype == left.dtype:
        torch.ops.aten.addmm_.default(into, left, right)
    elif into.is_cuda:
        torch.ops.aten.addmm.dtype_out(into, left, right, into.dtype, out=into)
    else:
        into.add_(torch.mm(left, right))


_LIBRARY.impl("matmul_into", _matmul_into, "CompositeExplicitAutograd")
_LIBRARY.impl("matmul_into", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("zeroweave::matmul_into", lambda into, left, right, adds: None, lib=_LIBRARY)
INTO: Final = torch.ops.zeroweave.matmul_into.default


@register_flop_formula(torch.ops.zeroweave.matmul_into)
def _operations(into: torch.Size, left: torch.Size, right: torch.Size, *_: object, **__: object) -> int:
    return 2 * left[0] * left[1] * right[1]


def may_add(gradient: torch.dtype, sums: torch.dtype) -> bool:
    """True if a matmul with a result of dtype `gradient` can add to sums of dtype `sums`."""
    return gradient == sums or (sums == torch.float32 and gradient in (torch.bfloat16, torch.float16))


def written_gradients(graph: fx.Graph, roles: Roles) -> dict[int, fx.Node]:
    """Output index -> the matmul of which the output, a parameter's gradient, is a view from end to end."""
    return {index: node for index, node in _makers(graph, roles) if node.target is _MATMUL}


def begins_with_losses(graph: fx.Graph) -> bool:
    """True for the backward of a region that has computed losses: it begins with gradients of single numbers only.

    All activations of the step are alive then. Memory for its gradients (many bytes in a head) would add to them if it
    were allocated already, and raise the step's peak.
    """
    tangents = [node for node in graph.find_nodes(op="placeholder") if aot_is_tangent(node.meta.get("desc"))]
    return all(node.meta["val"].dim() == 0 for node in tangents)


def made_gradients(graph: fx.Graph, roles: Roles) -> frozenset[int]:
    """Output indices of gradients that fill their own memory from end to end, which no other tensor ever shares.

    Those of embeddings and of heads, as a rule. A tangent, for instance, is the caller's, who may write it again.
    """
    return frozenset(index for index, node in _makers(graph, roles) if makes_memory(node))


def _makers(graph: fx.Graph, roles: Roles) -> Iterator[tuple[int, fx.Node]]:
    """(output index, node) of each gradient of a parameter that is the node's whole result, which nothing else reads.

    A node that is several outputs, such as the one gradient of two parameters that are added, is the result of neither:
    a matmul would run again for each destination.
    """
    times = Counter(value for value in graph_outputs(graph) if isinstance(value, fx.Node))
    for index, _, node in gradients_of(graph, roles):
        if times[node] > 1:
            continue
        whole = node.meta["val"]
        while len(node.users) == 1 and _is_view(node):
            (node,) = node.all_input_nodes[:1]
        if len(node.users) == 1 and _is_all_of(whole, node.meta.get("val")):
            yield index, node


def write_into_arguments(module: fx.GraphModule, written: Mapping[int, fx.Node]) -> list[Tensor]:
    """Gives the graph an argument for each of these, of the output's shape, and one that says whether it adds.

    Returns examples of them, in that order.
    """
    if not written:
        return []
    graph = module.graph
    output, values = graph.output_node(), graph_outputs(graph)
    behind = list(graph.find_nodes(op="placeholder"))[-1]
    examples: list[Tensor] = [values[index].meta["val"] for index in written]
    with examples[0].fake_mode:  # type: ignore[attr-defined]
        examples.append(torch.empty((), dtype=torch.bool, device="cpu"))
    arguments = []
    for name, example in zip([*(f"destination_{index}" for index in written), "adds"], examples, strict=True):
        with graph.inserting_after(behind):
            behind = graph.placeholder(name)
        behind.meta["val"] = example
        arguments.append(behind)
    *destinations, adds = arguments
    for destination, (index, matmul) in zip(destinations, written.items(), strict=True):
        with graph.inserting_before(matmul):
            if destination.meta["val"].shape != matmul.meta["val"].shape:
                shape = list(matmul.meta["val"].shape)
                destination = graph.call_function(torch.ops.aten.view.default, (destination, shape))
                destination.meta["val"] = matmul.meta["val"]
            into = graph.call_function(INTO, (destination, *matmul.args, adds))
            into.meta |= {"val": None, "autograd_backward": True}
        view_of_output, values[index] = values[index], None
        output.args = (tuple(values),)
        while not view_of_output.users:
            parents = view_of_output.all_input_nodes
            graph.erase_node(view_of_output)
            if view_of_output is matmul:
                break
            view_of_output = parents[0]
    graph.lint()
    module.recompile()
    return examples


def _is_view(node: fx.Node) -> bool:
    """True if the node is a view of its one input."""
    schema = operator_schema(node.target)
    if schema is None or len(schema.returns) != 1 or len(node.all_input_nodes) != 1:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def _is_all_of(view: Tensor, result: object) -> bool:
    """True if the view has all elements of a contiguous result in their order; False for several results."""
    if not isinstance(result, Tensor) or not all(isinstance(size, int) for size in (*view.shape, *result.shape)):
        return False
    alike = view.dtype == result.dtype and view.numel() == result.numel()
    return alike and view.is_contiguous() and result.is_contiguous() and view.storage_offset() == 0
