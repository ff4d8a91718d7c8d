"""Graphs of calls without a GPU: a pool of memory that is reused as CUDA's is, and graphs that run code again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroweave._torch.storages import StorageReference, borrowed_storage
from zeroweave.runtime.graph_recording import View, distinct, part_of

ALIGNMENT = 64


class Pool:
    """Memory of `nbytes`. What is allocated is free again when no tensor has it. What is free holds NaN."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._memory = nbytes, torch.zeros(nbytes, dtype=torch.uint8)
        self._taken: list[tuple[int, int, StorageReference]] = []

    def empty(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if 0 not in size else 0
        nbytes = max(ALIGNMENT, -(-span * dtype.itemsize // ALIGNMENT) * ALIGNMENT)
        self._taken = sorted((begin, end, owner) for begin, end, owner in self._taken if owner.alive)
        at = 0
        for begin, end, _ in self._taken:
            if begin - at >= nbytes:
                break
            at = end
        assert at + nbytes <= self._memory.numel(), "the pool is too small"
        storage = self._lies_at(at, nbytes)
        made = torch.empty(0, dtype=dtype).set_(storage, 0, tuple(size), tuple(stride))  # type: ignore[call-overload]
        self._taken.append((at, at + nbytes, StorageReference(made.untyped_storage())))
        return made

    def _lies_at(self, at: int, nbytes: int) -> torch.UntypedStorage:
        address = self._memory.data_ptr() + at
        return torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), nbytes)

    def free(self) -> list[tuple[int, int]]:
        """The pieces that nobody has."""
        pieces, at = [], 0
        for begin, end, owner in sorted(self._taken, key=lambda each: each[0]):
            if owner.alive:
                pieces.append((at, begin))
                at = end
        return [(begin, end) for begin, end in [*pieces, (at, self._memory.numel())] if end > begin]

    def spoil(self, pieces: Sequence[tuple[int, int]]) -> None:
        for begin, end in pieces:
            self._memory[begin:end] = 255  # NaN in each floating dtype


class ReplayedCode:
    """Runs the code again, on what lies at the addresses of its arguments, and leaves its results where they were."""

    def __init__(self, double: GraphDouble, run: Callable[[list[Any]], Any], args: list[Any], into: list[Any]) -> None:
        self._double, self._run, self._fresh = double, run, True
        self._args, self._into = [_at(arg) for arg in args], [_at(tensor) for tensor in into]
        self._spoils = double.pool.free()

    def replay(self) -> None:
        self._double.replays += 1
        if self._fresh:  # the capture has run it
            self._fresh = False
            return
        self._double.pool.spoil(self._spoils)  # a graph's own memory is what was free when it was captured
        results = list(self._run([make() for make in self._args]))
        for result, make in zip(results, self._into, strict=True):
            if isinstance(result, Tensor) and (target := make()) is not None and target.data_ptr() != result.data_ptr():
                _fill(target, result)


class GraphDouble:
    """A `zeroweave.runtime.graph_recording.Capture`. `fails(run)`: its capture fails. `roomy`: what `has_room` says."""

    def __init__(self, nbytes: int = 1 << 22, fails: Callable[[Any], bool] = lambda run: False) -> None:
        self.pool = Pool(nbytes)
        self.replays = self.captures = self.cleared = 0
        self.roomy, self._spoilt = True, False
        self._fails = fails

    def capture(self, run: Callable[[list[Any]], Any], args: list[Any]) -> tuple[ReplayedCode, Any]:
        assert not self._spoilt, "the pool of a failed capture is used"
        if self._fails(run):
            self._spoilt = True
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures += 1
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        empty = [tensor for tensor in tensors if tensor.numel() and not tensor.untyped_storage().nbytes()]
        storages = {arg.untyped_storage()._cdata for arg in tensors}
        results = list(run(list(args)))
        for tensor in (each for each in empty if each.untyped_storage().nbytes()):
            moved = self.pool.empty(tensor.shape, tensor.stride(), tensor.dtype).copy_(tensor)
            tensor.set_(moved.untyped_storage(), 0, tensor.shape, tensor.stride())  # type: ignore[call-overload]
        into = []
        for index, result in enumerate(results):
            if isinstance(result, Tensor) and result.untyped_storage()._cdata not in storages and result.numel():
                results[index] = _fill(self.pool.empty(result.shape, result.stride(), result.dtype), result)
            into.append(results[index])
        return ReplayedCode(self, run, args, into), results

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.pool.empty((numel,), (1,), dtype)

    def has_room(self) -> bool:
        return self.roomy

    def make_room(self) -> None:
        pass

    def clear(self) -> None:
        assert self.nbytes == self.pool.nbytes, "a tensor has memory of the pool"
        self.cleared, self._spoilt = self.cleared + 1, False

    def close(self) -> None:
        pass

    @property
    def nbytes(self) -> int:
        return sum(end - begin for begin, end in self.pool.free())


def _fill(target: Tensor, values: Tensor) -> Tensor:
    """Copies values of the same shape and strides, by which several elements may share their memory."""
    part = distinct(values)
    assert part is not None
    part_of(target, part).copy_(part_of(values, part))
    return target


def _at(value: Any) -> Callable[[], Any]:
    """Makes a tensor again where the value lies now; what is no tensor is a constant."""
    if not isinstance(value, Tensor) or not value.untyped_storage().nbytes():
        return lambda: value
    view, storage = View.of(value), borrowed_storage(value.untyped_storage())
    return lambda: view.on(storage)
