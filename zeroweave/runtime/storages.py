"""Freeing the storage of tensors that nobody else can read: activations, before their owner lets go of them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import torch

from zeroweave._torch import storage_key, storage_use_count, use_count, view_base


def owners_beside(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor, how many owners it has beside `tensors`: variables, containers, autograd nodes."""
    own = _owners([torch.empty(0)])[0]
    return [count - own for count in _owners(tensors)]


def _owners(tensors: Sequence[torch.Tensor]) -> list[int]:
    # The Python object is one of the C++ tensor's owners, and has one reference more while there are others.
    return [sys.getrefcount(tensor) + max(0, use_count(tensor) - 2) for tensor in tensors]


def unshared(tensors: Sequence[torch.Tensor], held: int = 0) -> list[list[torch.Tensor]]:
    """`tensors` by storage, without those whose storage somebody else could read.

    That is where one of its tensors has an owner beside `tensors` and the `held` ones that the caller accounts for,
    or a tensor that is not among `tensors` shares it (a view, or what a view was made of).
    """
    owned = owners_beside(tensors)  # before anything here holds them
    views = Counter(id(base) for base in map(view_base, tensors) if base is not None)  # a view owns its base
    groups: dict[int, list[torch.Tensor]] = {}
    kept = set()
    for tensor, count in zip(tensors, owned, strict=True):
        groups.setdefault(storage_key(tensor), []).append(tensor)
        if count > held + views[id(tensor)]:
            kept.add(storage_key(tensor))
    return [group for key, group in groups.items() if key not in kept and not _has_other_views(group)]


def _has_other_views(group: list[torch.Tensor]) -> bool:
    storage = group[0].untyped_storage()
    return storage_use_count(storage) - 1 > len(group)  # one is `storage`


def free_storages(tensors: Sequence[torch.Tensor], threshold: int, held: int = 0) -> int:
    """Frees the storages of `tensors` that have more than `threshold` elements; returns the bytes.

    In order of the current stream: whatever was issued on it may still read them. `held`: how many owners the
    caller accounts for, for each tensor, beside `tensors`; they must not be read any more. A storage stays where
    somebody else could read it, see `unshared`. So does memory that is not PyTorch's.
    """
    freed = 0
    for group in unshared(tensors, held):
        storage = group[0].untyped_storage()
        nbytes = storage.nbytes()
        if nbytes > threshold * group[0].itemsize and storage.resizable():
            storage.resize_(0)
            freed += nbytes
    return freed
