"""Gradients of parameters that need no copy: matmuls write them where the caller wants them, or they are memory alone.

Before:  mm(a, b) · permute · permute · output
After:   addmm_(destination, a, b, beta=0), for a further argument; that output is None

So it writes. Where backwards add up, the same with `beta=1` adds to what lies there: nothing is written, read and added
once more.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, fx

from zeroweave._torch.aot import aot_is_tangent
from zeroweave._torch.fx import makes_memory, operator_schema
from zeroweave.compile.bind import Roles, gradients_of, graph_outputs

_MATMUL: Final = torch.ops.aten.mm.default
INTO: Final = torch.ops.aten.addmm_.default
"""With beta=0 it does not read what it writes, and runs the kernel that a matmul does."""


def matmul_gradients(graph: fx.Graph, roles: Roles) -> dict[int, fx.Node]:
    """Output index -> the matmul of which the output, a parameter's gradient, is a view from end to end."""
    return {index: node for index, node in _makers(graph, roles) if node.target is _MATMUL}


def written_gradients(graph: fx.Graph, roles: Roles) -> dict[int, fx.Node]:
    """Those of `matmul_gradients` that may be written into memory which is there before the graph runs.

    Nothing in the backward of a region that has computed a loss. All activations of the step are alive when it begins,
    and so would be the memory of all its gradients, which a head has many bytes of: the step would need more at most.
    What gradients are added to is there in any case.
    """
    return {} if _begins_with_losses(graph) else matmul_gradients(graph, roles)


def made_gradients(graph: fx.Graph, roles: Roles) -> frozenset[int]:
    """Output indices of gradients that lie in memory of their own, from end to end, which nobody else ever has.

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


def added_gradients(module: fx.GraphModule, roles: Roles) -> tuple[fx.GraphModule, list[int], list[Tensor]]:
    """A copy of the graph that adds its `matmul_gradients` to further arguments; their indices, and examples."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    added = matmul_gradients(copied.graph, roles)
    return copied, [*added], write_into_arguments(copied, added, adds=True)


def write_into_arguments(module: fx.GraphModule, written: Mapping[int, fx.Node], adds: bool = False) -> list[Tensor]:
    """Gives the graph an argument for each of these, of the output's shape; returns examples of them, in order.

    `adds`: to what lies there.
    """
    graph = module.graph
    output, values = graph.output_node(), graph_outputs(graph)
    behind = list(graph.find_nodes(op="placeholder"))[-1]
    examples = []
    for index, matmul in written.items():
        example = values[index].meta["val"]
        with graph.inserting_after(behind):
            behind = destination = graph.placeholder(f"destination_{index}")
        destination.meta["val"] = example
        with graph.inserting_before(matmul):
            if example.shape != matmul.meta["val"].shape:
                shape = list(matmul.meta["val"].shape)
                destination = graph.call_function(torch.ops.aten.view.default, (destination, shape))
                destination.meta["val"] = matmul.meta["val"]
            into = graph.call_function(INTO, (destination, *matmul.args), {"beta": int(adds)})
            into.meta |= {"val": matmul.meta["val"], "autograd_backward": True}
        view_of_output, values[index] = values[index], None
        output.args = (tuple(values),)
        while not view_of_output.users:
            parents = view_of_output.all_input_nodes
            graph.erase_node(view_of_output)
            if view_of_output is matmul:
                break
            view_of_output = parents[0]
        examples.append(example)
    if written:
        graph.lint()
        module.recompile()
    return examples


def _begins_with_losses(graph: fx.Graph) -> bool:
    """Does a backward begin with gradients of single numbers only?"""
    tangents = [node for node in graph.find_nodes(op="placeholder") if aot_is_tangent(node.meta.get("desc"))]
    return all(node.meta["val"].dim() == 0 for node in tangents)


def _is_view(node: fx.Node) -> bool:
    """Does the node only say differently what its one input is?"""
    schema = operator_schema(node.target)
    if schema is None or len(schema.returns) != 1 or len(node.all_input_nodes) != 1:
        return False
    alias = schema.returns[0].alias_info
    return alias is not None and not alias.is_write


def _is_all_of(view: Tensor, result: object) -> bool:
    """Has the view all elements of a contiguous result in their order? Operators with several results have no such."""
    if not isinstance(result, Tensor) or not all(isinstance(size, int) for size in (*view.shape, *result.shape)):
        return False
    alike = view.dtype == result.dtype and view.numel() == result.numel()
    return alike and view.is_contiguous() and result.is_contiguous() and view.storage_offset() == 0
