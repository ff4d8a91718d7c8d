"""What compiled graphs and single operators take: kernels, the memory between them, and seconds.

A graph becomes a `Program`, which computes nothing: it takes memory, frees it and takes time as the graph's code
would. Which operators share a kernel is Inductor's decision, made here in its simplest form: neighbours that are no
matmul, attention or scatter do, as long as none of these is between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain
from operator import getitem
from typing import Any, Final

import torch
from torch import Tensor, fx

from zeroweave._torch.fx import flatten, operator_schema
from zeroweave._torch.modes import counted_operations, operator_name
from zeroweave.compile.bind import graph_outputs
from zeroweave.compile.destinations import INTO
from zeroweave.plan.hardware import Hardware

_ATTENTION: Final = "_scaled_dot_product_"
_ALONE: Final = frozenset(
    {"index_put", "index_put_", "scatter", "scatter_add", "sort", "topk", "embedding_dense_backward"}
)
_LOOK_UP: Final = frozenset({"embedding", "index", "index_select", "gather"})
"""They read as much of their first argument as they return."""
_VIEWS: Final = frozenset({"_unsafe_view", "reshape"})
"""Views that do not say so."""


def _is_view(target: Any) -> bool:
    if (schema := operator_schema(target)) is None:
        return False
    aliases = [value.alias_info for value in schema.returns]
    return operator_name(target) in _VIEWS or any(alias is not None and not alias.is_write for alias in aliases)


def _nbytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.itemsize for leaf in flatten(value)[0] if isinstance(leaf, Tensor))


def _itemsize(value: Any) -> int:
    """Of the first tensor: attention also returns others, of other dtypes."""
    return next((leaf.itemsize for leaf in flatten(value)[0] if isinstance(leaf, Tensor)), 4)


def _written(target: Any, args: Any) -> list[Any]:
    """The arguments that an operator writes to and does not return."""
    schema = operator_schema(target)
    if schema is None or schema.returns:
        return []
    pairs = zip(schema.arguments, args, strict=False)
    return [value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write]


def _operations(target: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> int:
    """Floating-point operations of a matmul, a convolution or attention; 0 for anything else."""
    name = operator_name(target)
    if not name.startswith(_ATTENTION):
        return counted_operations(target, args, kwargs, out)
    back = name.endswith("_backward")
    query, key = args[1:3] if back else args[:2]
    schema = operator_schema(target)
    named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    batch, heads, rows, width = query.shape
    matmuls = 5 if back else 2  # a backward computes the scores again
    return 2 * matmuls * batch * heads * rows * key.shape[2] * width // (2 if named.get("is_causal") else 1)


def eager_seconds(hardware: Hardware, target: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> float:
    """Seconds of one operator that runs by itself, by the shapes of its arguments and of what it returns."""
    name, written = operator_name(target), _nbytes(out) + _nbytes(_written(target, args))
    if not written or _is_view(target) or name.startswith(("empty", "new_empty")) or name == "detach_":
        return 0.0
    read = _nbytes((args[1:], out)) if name in _LOOK_UP else _nbytes((args, kwargs))
    operations = _operations(target, args, kwargs, out)
    return hardware.compute(operations, read + written, _itemsize(out), name.startswith(_ATTENTION))


@dataclass(eq=False)
class _Kernel:
    """Nodes that run together. `alone`: it is one node, which shares its kernel with no other."""

    alone: bool
    stage: int
    nodes: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """One kernel of a program: what it makes, which arguments it writes, what is unused after it, and its time."""

    makes: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    last: tuple[fx.Node, ...]
    seconds: float


class Program:
    """A graph of AOTAutograd as memory and time.

    It takes its arguments in one list, which it empties, and returns what the graph would, of the same shapes, strides
    and storages, under `scope`. `spend(seconds)` hears of each kernel. `fuses`: true if operators share kernels.
    """

    def __init__(
        self,
        graph: fx.Graph,
        hardware: Hardware,
        fuses: bool,
        spend: Callable[[float], None],
        scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._spend, self._scope = spend, scope
        self._arguments = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
        self._outputs = graph_outputs(graph)
        self._constants = {n: getattr(graph.owning_module, str(n.target)) for n in graph.find_nodes(op="get_attr")}
        self._base: dict[fx.Node, fx.Node] = {}
        self._hardware, self._fuses = hardware, fuses
        kernels = self._kernels(graph)
        self._steps = self._ordered(graph, kernels)

    # ------------------------------------------------------------------ when it is made
    def _kernels(self, graph: fx.Graph) -> dict[fx.Node, _Kernel]:
        """The kernel of each node that computes, by the node."""
        kernel: dict[fx.Node, _Kernel] = {}
        base = self._base
        for node in graph.nodes:
            base[node] = node
            inputs = node.all_input_nodes
            if node.op != "call_function":
                continue
            if node.target is getitem:
                parent = inputs[0]
                if _is_view(parent.target):
                    base[node] = base[parent]
                elif parent in kernel:
                    kernel[node] = kernel[parent]
                continue
            schema = operator_schema(node.target)
            if inputs and (_is_view(node.target) or (schema is not None and schema.is_mutable)):
                base[node] = base[inputs[0]]
                if _is_view(node.target):
                    continue
            before = dict.fromkeys(kernel[base[each]] for each in inputs if base[each] in kernel)
            args, kwargs = _values((node.args, node.kwargs))
            operations = _operations(node.target, args, kwargs, node.meta.get("val"))
            name = operator_name(node.target)
            alone = not self._fuses or operations > 0 or name in _ALONE or name.startswith(_ATTENTION)
            stage = max((each.stage + (alone or each.alone) for each in before), default=0)
            same = [each for each in before if not (alone or each.alone) and each.stage == stage]
            own, *others = same or [_Kernel(alone, stage)]
            for other in others:
                own.nodes.extend(other.nodes)
                kernel |= dict.fromkeys([each for each, its in kernel.items() if its is other], own)
            own.nodes.append(node)
            kernel[node] = own
        return kernel

    def _ordered(self, graph: fx.Graph, kernels: Mapping[fx.Node, _Kernel]) -> tuple[_Step, ...]:
        base, position = self._base, {node: index for index, node in enumerate(graph.nodes)}
        returned = {base[node] for node in self._outputs if isinstance(node, fx.Node)}
        makes: dict[_Kernel, list[fx.Node]] = {kernel: [] for kernel in kernels.values()}
        last: dict[_Kernel, list[fx.Node]] = {kernel: [] for kernel in makes}
        due = {kernel: float(max(map(position.__getitem__, kernel.nodes))) for kernel in makes}
        readers: dict[fx.Node, set[_Kernel]] = {}
        for node, kernel in kernels.items():
            for each in node.all_input_nodes:
                if base[each] is not base[node] or node.target is not getitem:
                    readers.setdefault(base[each], set()).add(kernel)
                if (made := kernels.get(base[each])) is not None and made is not kernel:
                    due[made] = min(due[made], position[node] - 0.5)
        for node, kernel in kernels.items():
            outside = readers.get(node, set()) - {kernel}
            if base[node] is node and isinstance(node.meta.get("val"), Tensor) and (outside or node in returned):
                makes[kernel].append(node)
        order = sorted(makes, key=due.__getitem__)
        number = {kernel: index for index, kernel in enumerate(order)}
        freed = {*self._arguments, *chain.from_iterable(makes.values())} - returned
        for node, using in readers.items():
            if node in freed:
                last[max(using, key=number.__getitem__)].append(node)
        steps = []
        for kernel in order:
            writes = tuple(base[node] for node in kernel.nodes if node.target is INTO)
            seconds = self._seconds(kernel, makes[kernel])
            steps.append(_Step(tuple(makes[kernel]), writes, tuple(last[kernel]), seconds))
        return tuple(steps)

    def _seconds(self, kernel: _Kernel, made: Iterable[fx.Node]) -> float:
        inside, read = set(kernel.nodes), dict[fx.Node, int]()
        operations, itemsize = 0, 4
        for node in kernel.nodes:
            args, kwargs = _values((node.args, node.kwargs))
            out = node.meta.get("val")
            looks_up = operator_name(node.target) in _LOOK_UP
            for index, each in enumerate(node.all_input_nodes):
                base = self._base[each]
                if base in inside or (base.target is getitem and base.args[0] in inside):
                    continue
                nbytes = min(_nbytes(each.meta.get("val")), _nbytes(base.meta.get("val")))
                nbytes = min(nbytes, _nbytes(out)) if looks_up and index == 0 else nbytes
                read[base] = max(nbytes, read.get(base, 0))
            operations += _operations(node.target, args, kwargs, out)
            itemsize = _itemsize((out, args))  # one that only writes an argument returns nothing
        nbytes = sum(read.values()) + sum(_nbytes(node.meta["val"]) for node in made)
        attention = operator_name(kernel.nodes[0].target).startswith(_ATTENTION)
        return self._hardware.compute(operations, nbytes, itemsize, attention)

    # ------------------------------------------------------------------ when it runs
    def __call__(self, args: list[Any]) -> list[Any]:
        given = {node: args[index] for node, index in self._arguments.items()} | self._constants
        args.clear()
        with self._scope(), torch.no_grad():
            for step in self._steps:
                for node in step.makes:
                    value = node.meta["val"]
                    size, stride = tuple(value.shape), value.stride()
                    given[node] = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
                for node in step.writes:
                    if not (into := given[node]).untyped_storage().nbytes():
                        into.set_(torch.empty_like(into))
                for node in step.last:
                    given.pop(node, None)
                self._spend(step.seconds)
            return [self._output(given, node) for node in self._outputs]

    def _output(self, given: Mapping[fx.Node, Any], node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        value, base = node.meta.get("val"), self._base[node]
        if node is base or not isinstance(value, Tensor):
            return given[base]
        source = given[base]
        if source.dtype != value.dtype:
            source = source.view(value.dtype)
        own = base.meta["val"]
        offset = source.storage_offset() + value.storage_offset() - own.storage_offset()
        return source.as_strided(tuple(value.shape), value.stride(), offset)


def _values(tree: Any) -> Any:
    """Arguments of nodes with their values in the place of nodes."""
    return fx.node.map_arg(tree, lambda node: node.meta.get("val"))
