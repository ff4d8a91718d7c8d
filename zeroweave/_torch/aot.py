"""AOTAutograd: its backend, its descriptors and its partitioner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils.checkpoint import CheckpointPolicy

from zeroweave._torch.fx import operator_schema


def dynamo_backend(**compilers: Any) -> Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """AOTAutograd as a Dynamo backend. Why: with plain callables AOTAutogradCache is never consulted."""
    from torch._dynamo.backends.common import aot_autograd

    return cast(Callable[..., Any], aot_autograd(**compilers))


def aot_position(desc: Any) -> int | None:
    """The position among Dynamo's placeholders that an AOT input descriptor describes, if it is plain."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    return desc.idx if isinstance(desc, PlainAOTInput) else None


def aot_base(desc: Any) -> Any:
    """The input that an AOT input was made from (a view's base, a subclass's component), else None."""
    from torch._functorch._aot_autograd import descriptors

    if isinstance(desc, (descriptors.ViewBaseAOTInput, descriptors.SyntheticBaseAOTInput)):
        return desc.base_of
    subclass = (
        descriptors.SubclassGetAttrAOTInput,
        descriptors.SubclassSizeAOTInput,
        descriptors.SubclassStrideAOTInput,
    )
    return desc.base if isinstance(desc, subclass) else None


def aot_gradient_of(desc: Any) -> int | None:
    """The position of the placeholder whose gradient an AOT output is, None if it is something else."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput

    return aot_position(desc.grad_of) if isinstance(desc, GradAOTOutput) else None


def aot_is_tangent(desc: Any) -> bool:
    """True if an AOT input is the gradient of an output of the forward."""
    from torch._functorch._aot_autograd.descriptors import TangentAOTInput

    return isinstance(desc, TangentAOTInput)


def aot_saved(index: int) -> Any:
    """The descriptor of the forward's `index`-th output that is saved for the backward."""
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    return SavedForBackwardsAOTOutput(index)


def aot_metadata() -> Any:
    """What AOTAutograd knows about the graph that is being compiled (`ViewAndMutationMeta`), None outside.

    Why: mutated inputs, and donated buffers, which must be off (a backward may run with retain_graph).
    """
    context = torch._guards.TracingContext.try_get()
    return None if context is None else context.fw_metadata


def aot_partition(
    joint: torch.fx.GraphModule, inputs: Any, activation_budget: float = 1.0, **options: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """AOTAutograd's min-cut partitioner, which leaves operators as they are.

    `activation_budget`: the share of the activation bytes which it would save by itself that it may save. Why the
    rest: the budget is an option of the process. Below 1 the partitioner also recomputes what it takes for too costly
    otherwise. Random numbers are among it, and differ then, unless they must be saved; at 0 it does not look.
    Where nothing else is left to choose, it saves the tuple of an operator with several outputs, which cannot be
    saved; recomputing all that it may is the same choice.
    """
    import torch._functorch.config as config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    if activation_budget == 1:
        with config.patch(activation_memory_budget=1.0):
            return min_cut_rematerialization_partition(joint, inputs, **options)
    keep_random_numbers(joint.graph)
    with config.patch(activation_memory_budget=max(activation_budget, 1e-6)):
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
    (values,) = forward.graph.output_node().args
    assert isinstance(values, (tuple, list))
    if any(isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), tuple) for value in values):
        with config.patch(activation_memory_budget=1.0, aggressive_recomputation=True):
            return min_cut_rematerialization_partition(joint, inputs, **options)
    return forward, backward


def keep_random_numbers(graph: torch.fx.Graph) -> None:
    """Tags what draws random numbers to be saved, but for what a user's checkpoint recomputes.

    Attention draws none where its dropout is 0, though its operators count as random.
    """
    for node in graph.nodes:
        schema = operator_schema(node.target)
        if schema is None or torch.Tag.nondeterministic_seeded not in node.target.tags:
            continue
        names = [argument.name for argument in schema.arguments]
        values = {argument.name: argument.default_value for argument in schema.arguments}
        values |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if values.get("dropout_p") != 0:
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
