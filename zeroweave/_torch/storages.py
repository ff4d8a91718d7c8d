"""Storages and their owners."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch._C._dynamo.guards import _reinterpret_tensor  # type: ignore[attr-defined]
from torch.multiprocessing.reductions import StorageWeakRef


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many tensors (and storage objects) share `storage`.

    Why: a flat is freed only when no tensor views it.
    """
    return int(torch._C._storage_Use_Count(storage._cdata))


def lent(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, 1-D, under its own storage object, which does not own it.

    The caller must keep `tensor` until the memory is not used any more. Why: backends keep what they are handed for
    as long as their threads please. The storage that counts its users is not among it.
    """
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
    return tensor.new_empty(0).set_(cast(Any, storage))


def unfilled(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor [numel] whose memory nothing writes.

    Why: where algorithms are deterministic `torch.empty` fills it on the current stream, which may wait for no other.
    """
    memory = torch.UntypedStorage(numel * dtype.itemsize, device=device)
    return torch.empty(0, dtype=dtype, device=device).set_(memory, 0, (numel,), (1,))


def contiguous_stride(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def without_memory(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous tensor whose storage has no bytes yet.

    Why: one that is made as usual has its memory for a moment, and the step may need most in that moment.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    nothing = torch.empty(0, dtype=dtype, device=device)
    made = reinterpreted(nothing, shape, contiguous_stride(shape), 0)
    if isinstance(nothing, FakeTensor):  # this function does not know them
        made = FakeTensor(nothing.fake_mode, made, nothing.device)
    return made


def reinterpreted(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """The memory of `tensor` from `offset` elements on in another shape, with its own version, and no view of it.

    Why: the public way takes two operators, and is asked for with each argument of each call.
    """
    return _reinterpret_tensor(tensor, shape, stride, offset)


def borrowed_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The memory of `storage` under its own identity, which does not own it.

    Why: the pool of a graph owns it, and no tensor must.
    """
    made = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    return cast(torch.UntypedStorage, made)


class StorageReference(StorageWeakRef):
    """A weak reference to a storage. Why: its owners are tensors of C++, which Python does not see."""

    @property
    def alive(self) -> bool:
        """True if some tensor has the storage."""
        return not self.expired()


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of the storage of `tensor`, kept over `resize_`; 0 for a wrapper subclass, which has none.

    Why: call-time binding needs it, cheaply.
    """
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def view_key(tensor: torch.Tensor) -> tuple[int, int]:
    """The storage of `tensor` and its offset there, in elements. Why: as `storage_key`."""
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a view of, None if it is none. Why: a view is an owner of its base."""
    return tensor._base


def version(tensor: torch.Tensor) -> int:
    """How often `tensor` was written in place. Why: a write into a gathered parameter would be lost."""
    return tensor._version


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of each. Why: as `version`, asked for all parameters in each step."""
    return [tensor._version for tensor in tensors]


def marks(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, bool]]:
    """`version`, `storage_key` and `requires_grad` of each. Why: as theirs, asked for with each call."""
    return [(tensor._version, tensor.untyped_storage()._cdata, tensor.requires_grad) for tensor in tensors]


def unattached(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor that is part of no graph and no view, with the version of `tensor`. Why: as `version` and `view_base`.

    A node that saves its own output would keep itself alive, and a view what it views.
    """
    return tensor if tensor.is_leaf and tensor._base is None else tensor.detach(), tensor._version


def use_count(tensor: torch.Tensor) -> int:
    """How many owners the C++ tensor has: 1, 2 with an AccumulateGrad node, more in a live graph.

    Why: `swap_tensors` fails half way where a graph of an earlier forward still holds a parameter.
    """
    return int(tensor._use_count())  # type: ignore[attr-defined]


def owners(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How many references to each there are, in Python and in C++, without those of its AccumulateGrad node.

    To be compared with counts that the same code took earlier. Why: the storage of a parameter that the program
    keeps must not be freed. While C++ also owns a tensor, PyTorch holds one more reference to its Python object; the
    node, which lives as long as any graph that the parameter is part of, reads no values.
    """
    counts = sys.getrefcount
    return [
        counts(tensor) + (cpp - 3 if (cpp := tensor._use_count()) > 1 else 0)  # type: ignore[attr-defined]
        for tensor in tensors
    ]
