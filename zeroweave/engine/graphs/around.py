"""What a call runs under, and what else decides what it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, cast

import torch

from zeroweave._torch.modes import attention_order
from zeroweave._torch.modules import Hooks
from zeroweave.eager.hooks import hooks_beside
from zeroweave.engine.graphs.nest import CONSTANTS
from zeroweave.parameters.places import Places
from zeroweave.runtime.bucket import Bucket


class Modes:
    """Which modules train, whether gradients are asked for, and how the program casts by itself: all of that now."""

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device) -> None:
        self._modules, self._kind, self._gradients = modules, device.type, torch.is_grad_enabled()
        self._training = [module.training for module in modules]
        self._casts = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside they are what they were.

        What autocast has cast and kept goes before and afterwards: it is no part of a graph, which would read it for
        ever, although parameters change and it goes. That it keeps something is as it was: code is compiled for that,
        and would be compiled anew, which inside of a capture it cannot be.
        """
        now = [module.training for module in self._modules]
        self._set(self._training)
        enabled, dtype = self._casts
        try:
            with torch.autocast(self._kind, dtype, enabled), torch.set_grad_enabled(self._gradients):
                torch.clear_autocast_cache()
                yield
        finally:
            torch.clear_autocast_cache()
            self._set(now)

    def _set(self, training: Sequence[bool]) -> None:
        for module, trains in zip(self._modules, training, strict=True):
            module.training = trains


class Surroundings:
    """What else decides what a step computes, as far as it can be seen from outside. Asked before each replay."""

    def __init__(self, model: torch.nn.Module, device: torch.device, places: Places, buckets: Iterable[Bucket]) -> None:
        self._modules, self._kind = tuple(model.modules()), device.type
        self._hooks, self._on_parameters = Hooks(model), _OnParameters(places, buckets)

    def now(self, loss_fn: Callable[..., Any] | None) -> tuple[Any, ...]:
        """Equal for calls that they let compute the same, on equal batches."""
        return (
            hash(tuple(module.training for module in self._modules)),
            self._hooks.now(),
            self._hooks.exchanges,
            self._on_parameters.now(),
            None if loss_fn is None else identity(loss_fn),
            torch.is_autocast_enabled(self._kind) and torch.get_autocast_dtype(self._kind),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_anomaly_enabled(),
            torch.get_default_dtype(),
            _kernels(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        )


def _kernels() -> tuple[object, ...]:
    """Which kernels matmuls and convolutions may take, and the order in which those of attention are asked."""
    matmul, cudnn = torch.backends.cuda.matmul, cast(Any, torch.backends.cudnn)  # it is no module, but looks like one
    return (
        (matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision),
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        attention_order(),
    )


class _OnParameters:
    """The hooks that the model's code has registered on real parameters, which it sees only while anybody computes."""

    def __init__(self, places: Places, buckets: Iterable[Bucket]) -> None:
        self._places, self._buckets = places, tuple(buckets)
        self._changes = places.changes
        """of what the modules show, when all parameters were looked at last"""
        self._hooked: list[tuple[Bucket, int]] = []
        """where those are that had hooks then"""

    def now(self) -> tuple[object, ...]:
        """What is off, and which hooks there are, by number. In replays no code sees a parameter: hooks only go."""
        if self._changes != self._places.changes:
            self._changes = self._places.changes
            found = ((bucket, slot) for bucket in self._buckets for slot in range(len(bucket.real)))
            self._hooked = [(b, slot) for b, slot in found if hooks_beside(b.real[slot], b.layout.trainable)]
        hooks = (hooks_beside(b.real[slot], b.layout.trainable) for b, slot in self._hooked)
        return frozenset(self._places.status.off), *filter(None, hooks)


class _Same:
    """Equal to what stands for the same object, which lives as long: another one cannot come in its place."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def identity(function: Any, depth: int = 0) -> object:
    """Equal for functions that do the same, made anew or not: of the same code, with the same things at hand.

    A method is made anew whenever it is asked for, and a function inside another one with each call of that. Keeps what
    it tells apart.
    """
    if depth == 4:  # functions may refer to themselves
        return _Same(function)
    known = partial(_known, depth=depth + 1)
    match function:
        case MethodType():
            return _Same(function.__self__), identity(function.__func__, depth + 1)
        case FunctionType():
            cells = [known(content_of(cell)) for cell in function.__closure__ or ()]
            defaults = [known(value) for value in (function.__defaults__ or ())]
            named = [(name, known(value)) for name, value in (function.__kwdefaults__ or {}).items()]
            return _Same(function.__code__), _Same(function.__globals__), *cells, *defaults, *named
        case partial():
            named = [(name, known(value)) for name, value in function.keywords.items()]
            return identity(function.func, depth + 1), *map(known, function.args), *named
        case _:
            return _Same(function)


def _known(value: object, depth: int) -> object:
    """Something that a function has at hand."""
    if isinstance(value, CONSTANTS):
        return type(value), repr(value)
    return identity(value, depth)


def content_of(cell: Any) -> object:
    """What a function's closure has there; None where there is nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
