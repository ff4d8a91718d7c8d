"""What the backward that runs now is, and what is run again inside it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def current_graph_task() -> int:
    """The id of the backward that this thread runs, -1 outside of one.

    Why: it distinguishes nested backwards.
    """
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` when the current backward has finished. Why: there is no public hook for it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def accumulates(parameter: torch.Tensor) -> bool:
    """True if the backward that runs now adds to the `.grad` of this leaf.

    Why: `torch.autograd.grad` and `backward(inputs=...)` run backwards for other gradients only.
    """
    return _goes_into(parameter) is True


def returns(parameter: torch.Tensor) -> bool:
    """True if the backward that runs now returns the gradient of this leaf, as `torch.autograd.grad` does.

    Why: the caller of that gets what autograd has of it.
    """
    return _goes_into(parameter) is None


def _goes_into(parameter: torch.Tensor) -> bool | None:
    """True if the backward that runs now accumulates into this leaf. None where it returns the gradient instead."""
    if not parameter.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def recomputing() -> bool:
    """True if this forward is run again inside a backward by non-reentrant checkpointing.

    Why: its graph is thrown away, so that no gradient may be expected from it. Only the innermost saved-tensors
    hook tells.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "_recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def checkpoint_segment() -> weakref.ref[Any] | None:
    """The identity of this non-reentrant checkpoint while its function runs for the first time; None outside.

    One object for each, to be compared by identity. Why: in a backward everything inside runs again before anything
    inside is differentiated. The reference is weak because a checkpoint's hook holds its inputs.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    inside = hooks is not None and "_checkpoint_hook" in getattr(hooks[1], "__qualname__", "")
    return weakref.ref(hooks[1]) if inside else None


def past_hooks(hooks: torch.autograd.graph.saved_tensors_hooks, run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """`run(*args)`. What autograd saves inside passes `hooks` if there are no others; then it calls none.

    Why: a layer saves dozens of tensors, and each takes a call of Python in the forward and one in the backward.
    """
    own: Any = torch._C._autograd
    pair = own._top_saved_tensors_default_hooks(True)
    if pair is None or pair[0] is not hooks.pack_hook:
        return run(*args)
    own._pop_saved_tensors_default_hooks()
    try:
        if own._top_saved_tensors_default_hooks(True) is None:
            return run(*args)
    finally:
        own._push_saved_tensors_default_hooks(*pair)
    return run(*args)


def saves_through_hooks() -> bool:
    """True if what autograd saves now goes through hooks. Why: see `past_hooks`."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def allowing_hooks_again() -> Iterator[None]:
    """At the end hooks for saved tensors are allowed if they were at the beginning.

    Why: `torch.func.grad` forbids them while it runs, and Dynamo, which traces that, leaves it so where it fails.
    """
    own: Any = torch._C._autograd
    allowed = own._saved_tensors_hooks_is_enabled()
    try:
        yield
    finally:
        if allowed and not own._saved_tensors_hooks_is_enabled():
            own._saved_tensors_hooks_enable()


def refuses_hooks(error: BaseException) -> bool:
    """True if this was raised because `torch.func.grad`, or one like it, takes no hooks for saved tensors.

    Why: the error does not have its own class.
    """
    return "support saved tensor hooks" in str(error)
