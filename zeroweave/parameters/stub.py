"""The stubs that stand in for parameters between engine calls: they answer metadata and refuse values."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import FrameType
from typing import Any, NoReturn, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from zeroweave._torch.fx import map_tensors
from zeroweave._torch.tensors import mark_as_parameter, metadata_getters, wrapper_like
from zeroweave.errors import ParameterError

Hooks: TypeAlias = OrderedDict[int, Callable[[torch.Tensor], torch.Tensor | None]]
"""What `register_hook` was given, by number. Each takes a gradient and returns another one, or None to keep it."""


class Showing(Enum):
    """What the modules of a model show."""

    STUBS = "parameters without values"
    REAL = "the engine's own parameters, while it computes"
    OPEN = "parameters with values for anyone to read and write, as in `engine.full_parameters()`"
    LENT = "parameters with values of their own, as in `engine.full_on_rank_0()`"


@dataclass(slots=True)
class StubStatus:
    """What all stubs of one engine know about it, and what the program has told them.

    `ModuleParameters` tells what the modules show, the engine of gradients.
    """

    gradients_pending: bool = False
    """Gradients of the open window wait in the engine: `.grad` refuses instead of saying None."""
    showing: Showing = Showing.STUBS
    off: set[str] = field(default_factory=set)
    """trained parameters whose `requires_grad` the program has set to False, by name"""
    hooks: dict[str, Hooks] = field(default_factory=dict)
    """those of parameters, by name"""
    read: Callable[[str, bool], torch.Tensor | None] = field(default=lambda name, values: None)
    """See `ParameterVisibility.read`. Without an engine no parameter can be read."""

    def attach(self, read: Callable[[str, bool], torch.Tensor | None]) -> None:
        """Called once, by what shows the real parameters: `read` is a method of it."""
        self.read = _weakly(read)

    def gradients_wait(self) -> None:
        """A backward has trained."""
        self.gradients_pending = True

    def gradients_gone(self) -> None:
        """The optimizer had them, or they are dropped."""
        self.gradients_pending = False

    def show(self, showing: Showing) -> None:
        """The modules show this from now on."""
        self.showing = showing


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method while its object is alive: an optimizer keeps stubs, and must not keep engines."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return None if (alive := reference()) is None else alive(*args)

    return call


def _of_tensors(names: str) -> Iterator[Callable[..., Any]]:
    """The methods of these names, and what reads the attributes."""
    for found in (getattr(torch.Tensor, name) for name in names.split() if hasattr(torch.Tensor, name)):
        yield found if callable(found) else found.__get__


# What a stub answers: everything that a tensor knows without looking at its values.
_ANSWERED = frozenset(
    (
        *_of_tensors("shape dtype device layout is_leaf grad_fn grad_dtype ndim name names itemsize"),
        *_of_tensors("nbytes retains_grad is_cuda is_cpu is_meta is_sparse is_sparse_csr is_quantized is_nested"),
        *_of_tensors("is_mkldnn is_mps is_xpu is_xla is_mtia is_ipu is_maia is_vulkan"),
        *metadata_getters(),
        *_of_tensors("size stride dim ndimension numel nelement element_size dim_order is_contiguous has_names"),
        *_of_tensors("storage_offset get_device is_floating_point is_complex is_signed is_inference is_conj is_neg"),
        *_of_tensors("is_shared is_distributed __len__ __hash__ __dir__"),
        *(getattr(torch, name) for name in "numel get_device is_floating_point is_complex is_signed".split()),
        *(torch.is_inference, torch.is_conj, torch.is_neg),
    )
)
_GRAD: Any = torch.Tensor.grad  # the descriptor, which the stubs of torch take for a value
_REQUIRES_GRAD: Any = torch.Tensor.requires_grad
_READ_GRAD, _WRITE_GRAD, _DELETE_GRAD = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__
_READ_REQUIRES_GRAD = _REQUIRES_GRAD.__get__
_DATA: Any = torch.Tensor.data
_UNREADABLE = (_DATA.__get__, _DATA.__set__, torch.Tensor.__reduce_ex__, torch.Tensor.__deepcopy__)
"""What no gathered copy can stand in for: a write through `.data` leaves no trace, and a pickle would be the copy's."""
_DIFFERENTIATES = (torch.autograd.grad, torch.autograd.backward)
"""Functions that ask for gradients of a parameter and read no values of it."""
_WRITE_REQUIRES_GRAD = (_REQUIRES_GRAD.__set__, torch.Tensor.requires_grad_)

VALUES = (
    "its values are sharded over the ranks between engine calls; read or write them inside "
    "`with engine.full_parameters():`, or take engine.state_dict(), which all ranks call. A method beside forward that "
    "computes with parameters is to be marked: zeroweave.mark_forward(module, 'name')"
)
_GRADIENTS = (
    "its gradients are kept by the engine, sharded over the ranks; use engine.clip_grad_norm_() to clip "
    "them, engine.step() to apply them, engine.zero_grad() to drop them"
)
_FROZEN = (
    "zeroweave.initialize found it frozen, so it has no gradient and no optimizer state; call engine.destroy(), set "
    "requires_grad, and initialize again"
)
_SHOWN = "the module shows another parameter in its place now; set it there, or between engine calls"
_RESIZED = (
    "the shapes of parameters are part of how they are sharded; call engine.destroy(), resize, and initialize again "
    "with a new optimizer"
)
NO_POST_HOOKS = (
    "the engine takes gradients before they are accumulated; use register_hook, which sees the local gradient of a "
    "backward, or engine.gradients()"
)


class AtRest(torch.Tensor):
    """A stub: shape, dtype, device and the like of a parameter, without its values.

    It holds no storage, counts as an `nn.Parameter`, and carries the attributes that the user had set on the parameter.
    `requires_grad` of a trained one can be set, and tensor hooks can be registered. Its values can be read where
    `StubStatus.read` allows it, as between a forward and its backward. Any other read or write of values, and of
    gradients while some wait, raises `ParameterError` with the parameter's name and the way out. The one exception is
    the C function `torch.utils.dlpack.to_dlpack`, which calls no Python.
    """

    _zeroweave_name: str
    _zeroweave_status: StubStatus

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str, status: StubStatus) -> AtRest:
        stub = wrapper_like(cls, like)
        stub._zeroweave_name, stub._zeroweave_status = name, status
        mark_as_parameter(stub)
        return stub

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        what = f"shape {tuple(self.shape)}, {self.dtype}, {self.device}, requires_grad={self.requires_grad}"
        return f"Parameter {self._zeroweave_name!r}, sharded: {what}"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def refuse(self, what: str, why: str = VALUES) -> NoReturn:
        """Raises the error for a use `what` of this parameter."""
        message = f"{what} on parameter {self._zeroweave_name!r}: {why}"
        if why is VALUES and _resizes():
            message = f"resize_token_embeddings(...) under an engine: {_RESIZED}"
        elif self._zeroweave_status.showing is not Showing.STUBS and why is VALUES:
            message += ". This reference was taken earlier: reach it through the module"
        raise ParameterError(f"[ZW203] {message}")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _ANSWERED or (func is torch.Tensor.type and len(args) == 1 and not kwargs):
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        stub = _first_stub((args, kwargs))
        assert stub is not None, func  # else PyTorch would not have asked this class
        status, name = stub._zeroweave_status, stub._zeroweave_name
        if func == _READ_REQUIRES_GRAD:
            return stub._is_trained() and name not in status.off
        pending = status.gradients_pending
        if func == _READ_GRAD and not pending:
            return None
        if func == _WRITE_GRAD and args[0] is stub and args[1] is None and not pending:
            return None  # nothing waits, so there is nothing to drop: optimizer.zero_grad() and the like
        if func in (_READ_GRAD, _WRITE_GRAD, _DELETE_GRAD):
            stub.refuse(".grad", _GRADIENTS)
        if func in _WRITE_REQUIRES_GRAD:
            wanted = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
            if wanted != stub.requires_grad:
                if status.showing is not Showing.STUBS:
                    stub.refuse(f"requires_grad = {wanted}", _SHOWN)
                stub.toggle(wanted)
            return stub
        if func is torch.Tensor.register_hook and stub.requires_grad:
            hooks = status.hooks.setdefault(name, OrderedDict())
            handle = RemovableHandle(hooks)
            hooks[handle.id] = args[1] if len(args) > 1 else (kwargs or {})["hook"]
            return handle
        if func is torch.Tensor.register_hook:
            stub.refuse(func.__name__, "it does not require gradients")
        if func is torch.Tensor.register_post_accumulate_grad_hook:
            stub.refuse(func.__name__, NO_POST_HOOKS)
        if func not in _UNREADABLE:
            reads = func not in _DIFFERENTIATES
            args, kwargs = map_tensors(lambda tensor: _real(tensor, reads), (args, kwargs or {}))
        if _first_stub((args, kwargs)) is not None:
            stub.refuse(_name_of(func))
        return func(*args, **(kwargs or {}))

    def toggle(self, on: bool) -> None:
        """Sets `requires_grad`. ParameterError for a parameter that `initialize` took as frozen."""
        status, name = self._zeroweave_status, self._zeroweave_name
        if not self._is_trained():
            self.refuse(f"requires_grad = {on}", _FROZEN)
        (status.off.discard if on else status.off.add)(name)

    def _is_trained(self) -> bool:
        """True if `initialize` took it as one that requires gradients."""
        with torch.DisableTorchFunctionSubclass():
            return self.requires_grad

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], types: object, *values: Any) -> Any:  # type: ignore[override]
        """Refuses what reaches the operators past `__torch_function__` (constructors written in C++)."""
        stub = _first_stub(values)
        assert stub is not None, func
        stub.refuse(str(func))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        self.refuse("copying or pickling")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.refuse("deepcopy")

    def __dlpack__(self, *args: object, **kwargs: object) -> NoReturn:
        self.refuse("dlpack")


def _real(tensor: torch.Tensor, reads: bool) -> torch.Tensor:
    """The real parameter in the place of a stub where it can be read now; otherwise `tensor` itself."""
    if not isinstance(tensor, AtRest):
        return tensor
    real = tensor._zeroweave_status.read(tensor._zeroweave_name, reads)
    return tensor if real is None else real


def _resizes() -> bool:
    """True if transformers' method of this name reads or writes here: the error can name what the user called then."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "resize_token_embeddings":
        frame = frame.f_back
    return frame is not None


def _first_stub(values: object) -> AtRest | None:
    """The first stub in nested sequences and mappings."""
    if isinstance(values, AtRest):
        return values
    if isinstance(values, Mapping):
        values = tuple(values.values())
    if isinstance(values, (tuple, list)):
        return next((stub for value in values if (stub := _first_stub(value)) is not None), None)
    return None


def _name_of(func: Callable[..., Any]) -> str:
    """The name of a function; for the getter or setter of an attribute that of the attribute."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f".{func.__self__.__name__}"  # type: ignore[attr-defined]
    return name
