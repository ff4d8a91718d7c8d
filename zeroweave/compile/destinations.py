"""Gradients of parameters that need no copy: matmuls write them where the caller wants them, or they are memory alone.

Before:  mm(a, b) · permute · permute · output
After:   addmm_(destination, a, b, beta=0), for a further argument; that output is None

So it writes. Where backwards add up, other code adds to what lies there: by the same with `beta=1`, or by `add_matmul`
where sums have a wider dtype than the gradients. That saves writing, reading and adding each once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, fx

from zeroweave._torch.aot import aot_is_tangent
from zeroweave._torch.fx import makes_memory, operator_schema
from zeroweave.compile.bind import Roles, gradients_of, graph_outputs

_MATMUL: Final = torch.ops.aten.mm.default
_INTO: Final = torch.ops.aten.addmm_.default
"""With beta=0 it does not read what it writes, and runs the kernel that a matmul does."""

_LIBRARY: Final = torch.library.Library("zeroweave", "FRAGMENT")
_LIBRARY.define("add_matmul(Tensor(a!) sum, Tensor left, Tensor right) -> ()")


def _add_matmul(sum: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds the product [n, m] of two matrices in half precision to a float32 sum. On GPUs it is not rounded before."""
    if sum.is_cuda:
        torch.ops.aten.addmm.dtype_out(sum, left, right, sum.dtype, out=sum)
    else:  # which has no such matmul
        sum.add_(torch.mm(left, right))


_LIBRARY.impl("add_matmul", _add_matmul, "CompositeExplicitAutograd")
torch.library.register_fake("zeroweave::add_matmul", lambda sum, left, right: None, lib=_LIBRARY)
_ADD: Final = torch.ops.zeroweave.add_matmul.default
INTO: Final = (_INTO, _ADD)
"""The operators that write into arguments."""


def may_add(gradient: torch.dtype, sums: torch.dtype) -> bool:
    """Can a matmul whose result has the one dtype add to sums of the other?"""
    return gradient == sums or (sums == torch.float32 and gradient in (torch.bfloat16, torch.float16))


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


def write_into_arguments(
    module: fx.GraphModule, written: Mapping[int, fx.Node], sums: Sequence[torch.dtype] | None = None
) -> list[Tensor]:
    """Gives the graph an argument for each of these, of the output's shape; returns examples of them, in order.

    `sums`: it adds to what lies there, of which these are the dtypes.
    """
    graph = module.graph
    output, values = graph.output_node(), graph_outputs(graph)
    behind = list(graph.find_nodes(op="placeholder"))[-1]
    examples = []
    for number, (index, matmul) in enumerate(written.items()):
        example = values[index].meta["val"]
        if sums is not None:
            with example.fake_mode:
                example = example.to(sums[number])
        with graph.inserting_after(behind):
            behind = destination = graph.placeholder(f"destination_{index}")
        destination.meta["val"] = example
        with graph.inserting_before(matmul):
            if example.shape != matmul.meta["val"].shape:
                shape = list(matmul.meta["val"].shape)
                destination = graph.call_function(torch.ops.aten.view.default, (destination, shape))
                with example.fake_mode:
                    destination.meta["val"] = example.view(shape)
            if example.dtype == matmul.meta["val"].dtype:
                into = graph.call_function(_INTO, (destination, *matmul.args), {"beta": 0 if sums is None else 1})
                into.meta |= {"val": matmul.meta["val"], "autograd_backward": True}
            else:
                into = graph.call_function(_ADD, (destination, *matmul.args))
                into.meta |= {"val": None, "autograd_backward": True}
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
