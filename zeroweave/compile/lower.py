"""From AOTAutograd's graphs to code: the partition into forward and backward, and the two lowerings.

"inductor" uses Inductor's decompositions, passes, partitioner and code. "aot_eager" runs the traced graph's
own Python code with eager's kernels and random numbers: no decompositions, AOT's min-cut partitioner.

The partition guarantees what the templates rely on:
* nothing computed from parameters alone is saved for the backward: it is recomputed from the parameters,
  which are references and cost no bytes;
* every parameter whose gradient the backward returns is among its arguments, so that each gradient can be
  bound to its place at run time, whichever region the template served.

Ranks of one machine share what Inductor compiles: one compiles a graph, the others find it in the cache. They meet at a
file lock next to the cache, one for each graph. There is no collective, so that a rank that compiles less than the
others, or fails, delays no other rank for longer than the lock's timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Literal

import torch
import xxhash
from filelock import FileLock, Timeout
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from zeroweave._torch.aot import aot_partition, aot_saved
from zeroweave._torch.fx import boxed, is_kernel, operator_schema
from zeroweave._torch.inductor import (
    inductor_calls,
    inductor_compile,
    inductor_decompositions,
    inductor_lock_folder,
    inductor_partition,
    inductor_settings,
)
from zeroweave.compile.bind import Boxed, Roles, Split, gradients_of, graph_outputs
from zeroweave.compile.destinations import INTO
from zeroweave.compile.progress import Phases
from zeroweave.errors import ParameterError

Lower = Literal["inductor", "aot_eager"]
Kind = Literal["forward", "backward", "inference"]
Code = Callable[[Lower, fx.GraphModule, Sequence[Any], Kind, Phases], Boxed]
"""Turns a graph into code, as `compile_graph` does."""
TIMEOUT: Final = 120.0
"""Seconds after which a rank no longer waits for the one that compiles, and compiles by itself."""


def decompositions(lower: Lower) -> dict[Any, Callable[..., Any]]:
    return inductor_decompositions() if lower == "inductor" else {}


def compile_graph(lower: Lower, graph: fx.GraphModule, inputs: Sequence[Any], kind: Kind, phases: Phases) -> Boxed:
    """Code for one graph; its outputs have the shapes and strides of the graph's outputs.

    Under Inductor a graph that another rank of this machine is compiling is waited for, and found in the cache.
    """
    with phases("lower"):
        if lower == "aot_eager":
            return boxed(graph)
        inductor_calls(INTO)
        folder = inductor_lock_folder()
        key = graph_key(graph, inputs, f"{kind} {inductor_settings()}")
        with compile_lock(folder, key, phases) if folder else nullcontext():
            return inductor_compile(graph, inputs, is_backward=kind == "backward", is_inference=kind == "inference")


def graph_key(graph: fx.GraphModule, inputs: Sequence[Any], settings: str) -> str:
    """Equal for equal graphs on all ranks of a machine; devices count with their index, as in Inductor's own keys.

    Sizes that are symbols count by their names: ranks whose sequences differ in length share a symbolic graph.
    `settings` is what else decides on the code.
    """
    parts = [settings, *(str(module.graph) for module in graph.modules() if isinstance(module, fx.GraphModule))]
    for value in inputs:
        if isinstance(value, torch.Tensor):
            parts.append(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}")
        else:
            parts.append(str(value))
    return xxhash.xxh128_hexdigest("\n".join(parts).encode())


@contextmanager
def compile_lock(folder: Path, key: str, phases: Phases, timeout: float = TIMEOUT) -> Iterator[None]:
    """Inside, no other process of this machine that uses `folder` compiles the graph of this key for the first time.

    A rank that had to wait continues without the lock: the graph is in the cache then, and all waiting ranks may load
    it at once. So does a rank that has waited for `timeout` seconds, a rank that cannot lock the folder, and every rank
    after the first success, which an empty file marks.
    """
    lock, done = FileLock(folder / f"zeroweave_{key}.lock"), folder / f"zeroweave_{key}.done"
    mine = False
    try:
        if not done.exists():
            try:
                lock.acquire(timeout=0)
                mine = True
            except Timeout:
                with phases("wait"), lock.acquire(timeout=timeout, poll_interval=0.01):
                    pass
    except (OSError, NotImplementedError):  # Timeout is an OSError
        pass
    try:
        yield
        if mine:
            done.touch()
    finally:
        if mine:
            lock.release()


def partition(
    lower: Lower, roles: Roles, activation_budget: float, joint: fx.GraphModule, inputs: Any, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule, Split]:
    """Splits a joint graph; `options` are AOTAutograd's, among them `num_fwd_outputs`.

    `activation_budget`: the share of activation bytes that may be saved, 0 to 1; the rest is recomputed.

    Raises ParameterError if a parameter enters the graph in any other form.
    """
    tag_recomputed(joint.graph, roles)
    split = inductor_partition if lower == "inductor" else aot_partition
    forward, backward = split(joint, inputs, activation_budget, **options)
    save_parameters(forward, backward, roles, options["num_fwd_outputs"])
    argument = {roles.position(node): i for i, node in enumerate(_placeholders(forward.graph))}
    positions = [roles.position(node) for node in _placeholders(backward.graph)]
    values = graph_outputs(forward.graph)
    outputs = options["num_fwd_outputs"]
    saved = _saved_tensors(forward.graph, outputs)
    aliases = tuple(i for i in saved if _may_alias(values[i]))
    first = _sizes(forward.graph, outputs) - outputs  # from the forward's outputs to the backward's arguments
    return (
        forward,
        backward,
        Split(
            announce=tuple(argument[position] for _, position, _ in gradients_of(backward.graph, roles)),
            shared=tuple(argument[position] for position in positions if position is not None),
            aliases=aliases,
            fresh=frozenset(first + i for i in saved if i not in aliases),
            reads=any(node.users for node in _placeholders(backward.graph) if roles.position(node) is not None),
        ),
    )


def may_write(graph: fx.Graph, roles: Roles, inputs: Sequence[Any]) -> bool:
    """True if PyTorch cannot rule out that a kernel writes to a parameter; `inputs` is AOTAutograd's `input_info`.

    Raises ParameterError if the graph writes to one without such a kernel.
    """
    suspected, kernels = False, any(is_kernel(node.target) for node in graph.nodes)
    for node, info in zip(_placeholders(graph), inputs, strict=False):
        position = roles.position(node)
        if position is None or not (info.mutates_data or info.mutates_metadata):
            continue
        if info.mutates_metadata or not kernels:
            raise ParameterError(
                f"[ZW204] the forward writes to parameter {roles.parameters[position]!r}, which would be lost: the "
                "values live in shards; write inside engine.full_parameters(), or use a buffer"
            )
        suspected = True
    return suspected


def tag_recomputed(graph: fx.Graph, roles: Roles) -> None:
    """Tags values computed from parameters alone to be recomputed in the backward, never saved.

    Values of fresh constants (`full`, `arange`) do not count as inputs. Random and mutating operators are
    left alone, and what depends on them. The tags form a separate checkpointed region, with an id above
    all others: AOTAutograd saves what leaves one region for a *later* one.
    """
    constant: set[fx.Node] = set()
    cone = {node for node in _placeholders(graph) if roles.position(node) is not None}
    tagged = []
    for node in graph.nodes:
        if node.op == "placeholder" and not isinstance(node.meta.get("val"), Tensor):
            constant.add(node)  # a size
        if node.op != "call_function" or not _is_pure(node):
            continue
        inputs = node.all_input_nodes
        if all(n in constant for n in inputs):
            constant.add(node)
        elif all(n in cone or n in constant for n in inputs):
            cone.add(node)
            tagged.append(node)
    region = 1 + max((node.meta.get("ac_graph_id", 0) for node in graph.nodes), default=0)
    for node in tagged:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = region


def _is_pure(node: fx.Node) -> bool:
    """True if the node's value depends on its inputs only. Higher-order operators are not inspected."""
    if (schema := operator_schema(node.target)) is None:
        return getattr(node.target, "__module__", None) == "_operator"
    return not (schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags)  # type: ignore[union-attr]


def save_parameters(forward: fx.GraphModule, backward: fx.GraphModule, roles: Roles, outputs: int) -> None:
    """Lets the forward save every parameter whose gradient the backward returns, where it does not yet.

    The references follow the last saved tensor on both sides: among the forward's outputs, of which the first
    `outputs` are the caller's, and among the backward's arguments (sizes, saved tensors, …, tangents).
    """
    primals = {roles.position(node): node for node in _placeholders(forward.graph)}
    known = {roles.position(node) for node in _placeholders(backward.graph)}
    missing = [position for _, position, _ in gradients_of(backward.graph, roles) if position not in known]
    if not missing:
        return
    output = forward.graph.output_node()
    values = graph_outputs(forward.graph)
    stop = _saved_tensors(forward.graph, outputs).stop
    nodes = [primals[position] for position in missing]
    values[stop:stop] = nodes
    output.args = (tuple(values),)
    if "desc" in output.meta:  # checkpointing with random operators drops them
        saved = [aot_saved(i) for i in range(len(values) - outputs)]
        output.meta["desc"] = [*output.meta["desc"][:outputs], *saved]

    index = _sizes(forward.graph, outputs) + stop - outputs
    with backward.graph.inserting_before(_placeholders(backward.graph)[index]):  # tangents follow, at least one
        for node in nodes:
            backward.graph.placeholder(node.name).meta = dict(node.meta)
    for module in (forward, backward):
        module.graph.lint()
        module.recompile()


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="placeholder"))


def _saved_tensors(forward: fx.Graph, outputs: int) -> range:
    """The outputs of a forward that autograd saves as tensors, with version checks.

    They follow the first `outputs`; after them come tensors kept without checks, opaque objects and sizes.
    """
    stop = outputs
    for value in graph_outputs(forward)[outputs:]:
        if not isinstance(value.meta.get("val"), Tensor) or value.meta.get("saved_tensor_with_no_vc_check"):
            break
        stop += 1
    return range(outputs, stop)


def _sizes(forward: fx.Graph, outputs: int) -> int:
    """How many sizes the forward saves; they come first among the backward's arguments."""
    kinds = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return sum(isinstance(value.meta.get("val"), kinds) for value in graph_outputs(forward)[outputs:])


def _may_alias(node: fx.Node) -> bool:
    """True if a value may be an argument or a view of one."""
    if node.op != "call_function":
        return True
    if (schema := operator_schema(node.target)) is not None:
        return any(value.alias_info is not None for value in schema.returns)
    return any(_may_alias(parent) for parent in node.all_input_nodes)
