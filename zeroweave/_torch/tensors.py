"""Tensors that are not ordinary: stubs, hooks on tensors, exchanged contents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


def wrapper_like(cls: type[AnyTensor], like: torch.Tensor) -> AnyTensor:
    """A `cls` without storage that has the metadata of `like`. Why: parameters at rest hold no bytes."""
    make: Callable[..., AnyTensor] = torch.Tensor._make_wrapper_subclass
    return make(
        cls,
        like.shape,
        strides=like.stride(),
        dtype=like.dtype,
        device=like.device,
        requires_grad=like.requires_grad,
    )


def metadata_getters() -> tuple[Callable[..., Any], ...]:
    """Private getters that describe a tensor without its values. Why: optimizers and `nn.Module` ask them."""
    names = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr")
    return tuple(getattr(torch.Tensor, name).__get__ for name in names)


def mark_as_parameter(tensor: torch.Tensor) -> None:
    """Makes `isinstance(tensor, nn.Parameter)` true. Why: stubs stay where modules and users ask that."""
    tensor._is_param = True


def tensor_hooks(tensor: torch.Tensor) -> OrderedDict[int, Callable[..., Any]]:
    """Where `register_hook` has put hooks, by number. Why: handles remove them from this object, wherever they run."""
    return cast("OrderedDict[int, Callable[..., Any]]", tensor._backward_hooks or OrderedDict())


def put_hooks(tensor: torch.Tensor, hooks: OrderedDict[int, Callable[..., Any]]) -> None:
    """Autograd runs these on the gradients of `tensor`. Why: as `tensor_hooks`."""
    tensor._backward_hooks = hooks or None


def post_accumulate_hooks(tensor: torch.Tensor) -> tuple[int, ...]:
    """The numbers of what `register_post_accumulate_grad_hook` has put on it. Why: it would never run when sharded."""
    return tuple(tensor._post_accumulate_grad_hooks or ())


def exchange(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the content of two tensor objects; graphs stay with the content. RuntimeError if it is weakly owned.

    Why: `torch.utils.swap_tensors`, which does the same, refuses or poisons what is part of a live graph, so that
    the graph is not changed by accident; here it is to continue with the old content.
    """
    torch._C._swap_tensor_impl(tensor, other)
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    with torch.DisableTorchFunctionSubclass():
        # Else a later hook would replace the earlier.
        tensor._backward_hooks, other._backward_hooks = other._backward_hooks, tensor._backward_hooks
        mine, theirs = tensor._post_accumulate_grad_hooks, other._post_accumulate_grad_hooks
        tensor._post_accumulate_grad_hooks, other._post_accumulate_grad_hooks = theirs, mine
