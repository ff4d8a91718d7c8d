"""Which arguments of a template are parameters, and where their values are.

At compile time the **roles**: which of Dynamo's placeholders are parameters. At call time the **binding**:
the runtime finds each argument's bucket and slot by its storage and offset, because one template serves
every region with the same code, so that the parameters seen while compiling say nothing about a later call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeGuard

import torch
from torch import Tensor, fx, nn

from zeroweave._torch.aot import aot_base, aot_gradient_of, aot_position
from zeroweave._torch.autograd import recomputing
from zeroweave._torch.dynamo import dynamo_example
from zeroweave._torch.fx import mark_boxed, operator_schema
from zeroweave._torch.storages import without_memory
from zeroweave.errors import EngineError, ParameterError
from zeroweave.layout import SlotKey

Part = tuple[int, int, Tensor | None]  # (bucket id, slot index, gradient)
Phase = Literal["forward", "backward"]
Boxed = Callable[[list[Any]], Any]  # takes its arguments in one list, which it empties


class TemplateHost(Protocol):
    """The part of the runtime that compiled templates call. All calls come from the thread that runs the template."""

    def find(self, tensor: Tensor) -> SlotKey | None:
        """The slot of `tensor`, by (storage identity, offset, size); None if in no flat. Values are not read.

        Slot index -1: a view of the flat that is not one whole slot.
        """

    def enter(self, name: str, phase: Phase, uses: tuple[int, ...]) -> Any:
        """Makes the buckets `uses` (ascending, may be empty) usable until `leave` gets the token back."""

    def leave(self, token: Any) -> None:
        """Ends an execution begun by `enter`; also called after an exception."""

    def execute(self, run: Boxed, args: list[Any], bound: Callable[[], Set[int]]) -> Any:
        """`run(args)`. `bound()`: the arguments that are parameters, and those that `run` writes."""

    def announce(self, parts: list[SlotKey]) -> None:
        """A forward has run whose backward will deliver one gradient for each of these."""

    def saved(self, tensors: list[tuple[Tensor, SlotKey]], read: bool) -> None:
        """The flat-backed tensors that the forward that just ran saves for its backward, which may `read` values.

        Autograd saves them right after this call, in this order and each exactly once, before anything else
        is saved on this thread, through the saved-tensors hooks that are innermost then.
        """

    def destinations(self, parts: list[SlotKey]) -> list[Tensor | None]:
        """Where the backward that was entered may write these gradients, before it leaves and delivers them.

        Each is contiguous, of its parameter's shape and dtype; None: anywhere.
        """

    def sums(self, parts: list[SlotKey]) -> list[Tensor | None] | None:
        """The sums to which it may add these gradients instead, each once; as `destinations`, but in any dtype.

        None: to none.
        """

    def deliver(self, announced: list[SlotKey], parts: list[Part], made: Set[SlotKey] = frozenset()) -> Set[SlotKey]:
        """The gradients of a backward that has left. `announced` is what its forward announced.

        Returned: those that `torch.autograd.grad` was asked for. They are not delivered, but left to autograd.

        Each gradient is contiguous in its parameter's shape and dtype. It is to be read only: it may be the
        output's own gradient, a saved activation, or the tensor of another part. Those of `made` may be written: no
        other tensor shares their memory.
        """

    def watch_writes(self) -> None:
        """A template is compiled that PyTorch cannot prove free of writes to parameters: values decide."""

    def template_ran(self) -> None:
        """A template was executed (forward, backward or inference)."""


@dataclass(frozen=True)
class Roles:
    """The parameters among Dynamo's placeholders: position -> the name to use in errors."""

    parameters: dict[int, str]

    def position(self, node: fx.Node) -> int | None:
        """The position of the parameter that an AOT placeholder represents, None if it is something else.

        Raises ParameterError if the placeholder is a base or a component made from a parameter.
        """
        desc = node.meta.get("desc")
        if (base := aot_base(desc)) is not None and (position := aot_position(base)) in self.parameters:
            raise ParameterError(
                f"[ZW209] the compiled code takes a base or a component of parameter {self.parameters[position]!r} "
                "instead of the parameter: write to copies of parameters, and use no tensor subclass"
            )
        position = aot_position(desc)
        return position if position in self.parameters else None


def roles_of(graph: fx.Graph, host: TemplateHost, module: nn.Module | None, name: str) -> Roles:
    """The roles of a graph captured by Dynamo while `module`, the region called `name`, was running."""
    known = {} if module is None else {id(p): key for key, p in module.named_parameters()}
    parameters = {}
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        example = dynamo_example(node)
        if isinstance(example, nn.Parameter) and host.find(example) is not None:
            own = known.get(id(example))
            parameters[position] = node.name if own is None else f"{name}.{own}" if name else own
    return Roles(parameters)


@dataclass
class Split:
    """How one joint graph was split; shared by its forward and its backward.

    `announce` and `shared` are indices of the forward's arguments: the parameters whose gradients the backward
    delivers, in the order in which it does, and the parameters that the backward takes as well, in its order.
    `aliases` are the forward's outputs that autograd saves and that may view an argument, `fresh` the
    backward's arguments that are saved tensors and do not. `reads`: the backward reads values of parameters.
    `regions`: slots of the shared parameters -> the region whose forward ran last with them. `elsewhere`: forwards
    have run for another engine, see `Engine`.
    """

    announce: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    aliases: tuple[int, ...] = ()
    fresh: frozenset[int] = frozenset()
    reads: bool = False
    regions: dict[tuple[SlotKey | None, ...], str] = field(default_factory=dict)
    elsewhere: bool = False

    def runs_elsewhere(self) -> None:
        """A forward runs for another engine."""
        self.elsewhere = True


class Engine(Protocol):
    """What a bound template asks the engine that it was compiled for, while that exists.

    Dynamo keeps the code of a frame below a graph break for all engines, and past its limit runs it for any of them,
    also when the one that it was compiled for has ended. There it is ordinary code: parameters are arguments, and their
    gradients are results.
    """

    host: TemplateHost | None
    """the runtime; None where the engine has ended"""

    def region(self) -> tuple[str, frozenset[int]] | None:
        """The name of the region that is running, and the buckets that are usable while it does.

        None if no region of this engine is running.
        """


FindEngine = Callable[[], Engine | None]


def forward_binder(find_engine: FindEngine, graph: fx.Graph, split: Split | None) -> Callable[[Boxed], Boxed]:
    """Puts the compiled code of a forward graph on the runtime; `split` is None for an inference graph.

    The graph is read now, before it is compiled, which consumes it.
    """
    tensors, written = tensor_arguments(graph), written_arguments(graph)

    def forward(run: Boxed, args: list[Any]) -> Any:
        engine = find_engine()
        host, running = (None, None) if engine is None else (engine.host, engine.region())
        if host is None or running is None:
            if split is not None:
                split.runs_elsewhere()
            return run(args)
        region, held = running
        find = host.find
        keys = {i: find(args[i]) for i in tensors}
        others = {key[0] for key in keys.values() if key is not None} - held
        announced: list[SlotKey] = []
        if split is not None:
            split.regions[tuple(keys[i] for i in split.shared)] = region
            announced = [key for i in split.announce if _is_slot(key := keys[i])]

        def execute(args: list[Any]) -> Any:
            return host.execute(run, args, lambda: written | _parameters(keys))

        outputs = _hold(host, region, "forward", others, execute, args) if others else execute(args)
        host.template_ran()
        if announced and not recomputing():
            host.announce(announced)
        if split is not None:
            if flats := [(outputs[i], key) for i in split.aliases if (key := host.find(outputs[i])) is not None]:
                host.saved(flats, split.reads or len(flats) > len(split.shared))  # others are views
        return outputs

    return lambda run: mark_boxed(partial(forward, run))


def backward_binder(
    find_engine: FindEngine,
    graph: fx.Graph,
    split: Split,
    roles: Roles,
    written: Sequence[int] = (),
    made: Set[int] = frozenset(),
    early: bool = True,
) -> Callable[[Boxed], Boxed]:
    """Puts a backward on the runtime: gradients of parameters go to the host, autograd gets None for them.

    But `torch.autograd.grad` gets what it was asked for.

    `written`: the outputs that the code will write into further arguments, or add there. `early`: True if these may
    have their memory before the code runs. `made`: the outputs that have their own memory. See `compile.destinations`.
    """
    arguments = {roles.position(node): i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    shared = tuple(i for position, i in arguments.items() if position is not None)
    gradients = tuple((output, arguments[position]) for output, position, _ in gradients_of(graph, roles))
    targets = tuple((output, dict(gradients)[output]) for output in written)
    reads = tuple(i for i in tensor_arguments(graph, with_users=True) if i not in split.fresh)
    bound = tuple(dict.fromkeys(shared + reads))

    def backward(run: Boxed, args: list[Any]) -> Any:
        host = None if (engine := find_engine()) is None else engine.host
        if host is None and not split.elsewhere:
            raise EngineError("[ZW403] compiled code of a destroyed engine was called: its parameters are gone")
        keys = dict.fromkeys(bound) if host is None else {i: host.find(args[i]) for i in bound}
        if host is None or (shared and split.elsewhere and not any(keys.values())):
            return _run_into(run, args, [(output, _like(args[i])) for output, i in targets])
        uses = {key[0] for i in reads if (key := keys[i]) is not None}
        count = len(args)

        def execute(args: list[Any]) -> Any:
            return host.execute(run, args, lambda: _parameters(keys).union(range(count, len(args))))

        def run_into(args: list[Any]) -> list[Any]:
            slots = {i: key for _, i in targets if _is_slot(key := keys[i])}
            parts = list(slots.values())
            lent = sums = host.sums(parts)
            if lent is None and early:
                lent = host.destinations(parts)
            found = dict(zip(slots, lent, strict=True)) if lent else {}
            other = _like if sums is None else torch.zeros_like
            into = [(o, other(args[i]) if (t := found.get(i)) is None else t) for o, i in targets]
            return _run_into(execute, args, into, adds=sums is not None)

        if shared or uses:
            region = split.regions.get(tuple(keys[i] for i in shared), "")
            outputs = list(_hold(host, region, "backward", uses, run_into if targets else execute, args))
        else:
            outputs = list(execute(args))
        parts: list[Part] = []
        taken: list[int] = []
        alone = set[SlotKey]()
        for output, i in gradients:
            if _is_slot(key := keys[i]):
                gradient, outputs[output] = outputs[output], None
                parts.append((*key, gradient.contiguous()))
                taken.append(output)
                if output in made:
                    alone.add(key)
        host.template_ran()
        if parts and (asked := host.deliver([part[:2] for part in parts], parts, alone)):
            for output, part in zip(taken, parts, strict=True):
                if part[:2] in asked:
                    outputs[output] = part[2]
        return outputs

    return lambda run: mark_boxed(partial(backward, run))


_ADDS: Final = {adds: torch.tensor(adds, device="cpu") for adds in (True, False)}


def _run_into(run: Boxed, args: list[Any], into: Sequence[tuple[int, Tensor]], adds: bool = False) -> list[Any]:
    """The results of code that writes some of them, by index, into further arguments, or adds them there."""
    if into:
        args.extend(tensor for _, tensor in into)
        args.append(_ADDS[adds])
    outputs = list(run(args))
    for output, tensor in into:
        outputs[output] = tensor
    return outputs


def _like(parameter: Tensor) -> Tensor:
    """A tensor for a gradient, which has its memory when it is written."""
    return without_memory(parameter.shape, parameter.dtype, parameter.device)


def _hold(host: TemplateHost, region: str, phase: Phase, uses: set[int], run: Boxed, args: list[Any]) -> Any:
    token = host.enter(region, phase, tuple(sorted(uses)))
    try:
        return run(args)
    finally:
        host.leave(token)


def _parameters(keys: Mapping[int, SlotKey | None]) -> set[int]:
    """The arguments that are in flats."""
    return {i for i, key in keys.items() if key is not None}


def _is_slot(key: SlotKey | None) -> TypeGuard[SlotKey]:
    return key is not None and key[1] >= 0


def gradients_of(graph: fx.Graph, roles: Roles) -> list[tuple[int, int, fx.Node]]:
    """(output index, position, node) of each gradient of a parameter that a backward graph returns."""
    descs = graph.output_node().meta["desc"]
    found = []
    for index, (node, desc) in enumerate(zip(graph_outputs(graph), descs, strict=True)):
        position = aot_gradient_of(desc)
        if isinstance(node, fx.Node) and position is not None and position in roles.parameters:
            found.append((index, position, node))
    return found


def graph_outputs(graph: fx.Graph) -> list[Any]:
    """The values that a graph of AOTAutograd returns: nodes, or None."""
    values = graph.output_node().args[0]
    assert isinstance(values, (list, tuple))
    return list(values)


def written_arguments(graph: fx.Graph) -> frozenset[int]:
    """The indices of a graph's arguments that it writes, by its operators' schemas: buffers, as a rule."""
    index = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    written = set[int]()
    for node in graph.nodes:
        if (schema := operator_schema(node.target)) is None:
            continue
        for argument, value in zip(schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written |= {index[source] for source in _sources(value) if source in index}
    return frozenset(written)


def _sources(value: Any) -> set[fx.Node]:
    """A value's node, and the nodes that it may be a view of."""
    found, left = set[fx.Node](), [value] if isinstance(value, fx.Node) else list(value or ())
    while left:
        node = left.pop()
        if isinstance(node, fx.Node) and node not in found:
            found.add(node)
            schema = operator_schema(node.target)
            if schema is None or any(result.alias_info is not None for result in schema.returns):
                left += node.all_input_nodes
    return found


def tensor_arguments(graph: fx.Graph, *, with_users: bool = False) -> tuple[int, ...]:
    """The indices of a graph's tensor arguments, on request only of those that the graph reads."""
    return tuple(
        index
        for index, node in enumerate(graph.find_nodes(op="placeholder"))
        if isinstance(node.meta.get("val"), torch.Tensor) and (node.users or not with_users)
    )
