"""What a recording of graphs of calls is made of: graphs, memory at fixed addresses, and what each argument must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from zeroweave._torch.storages import StorageReference, borrowed_storage, reinterpreted, storage_use_count, version

Run = Callable[[list[Any]], Any]
"""Code of a template: takes its arguments in one list, which it empties."""


class Graph(Protocol):
    """Kernels with their arguments."""

    def replay(self) -> None:
        """Launches them on the current stream."""


class Capture(Protocol):
    """The device, as graphs of calls need it."""

    def capture(self, run: Run, args: list[Any]) -> tuple[Graph, Any]:
        """The graph of what `run` launches, and what it returns, in memory of the pool. Nothing is executed.

        After an exception only `clear` may be called.
        """

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor [numel] in memory of the pool."""

    def has_room(self) -> bool:
        """True if the device has memory for two units, of which the pool may have one. Nothing of a unit is alive."""

    def make_room(self) -> None:
        """Gives cached memory back: a recording begins, which needs memory of the pool."""

    def clear(self) -> None:
        """Begins a new pool, and gives the memory of the old one back. There is no graph and no tensor of that."""

    def close(self) -> None:
        """Gives the pool's memory back, for good."""

    @property
    def nbytes(self) -> int:
        """Bytes of the pool that no tensor has."""


@dataclass(frozen=True, slots=True)
class View:
    """The layout of a tensor in its storage: offset, sizes and strides in elements."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def of_argument(self, arg: Tensor) -> Tensor:
        """A tensor with its own version counter. The offset is from the argument on."""
        if arg.dtype == self.dtype:
            return reinterpreted(arg, self.size, self.stride, self.offset)
        return replace(self, offset=int(arg.storage_offset()) + self.offset).on(arg.untyped_storage())

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """A tensor with its own version counter, in any autograd mode."""
        with torch.inference_mode(False), torch.no_grad():
            made = torch.empty(0, dtype=self.dtype, device=storage.device)
            return made.set_(storage, self.offset, self.size, self.stride)


class Block:
    """A piece of memory at a fixed address, which tensors use in one unit after the other.

    `storage`: the one that uses it now. `owner`: the tensor that keeps the memory; None: the graphs' pool keeps it.
    """

    __slots__ = ("_first", "_own", "_storage", "address", "owner")

    def __init__(self, storage: torch.UntypedStorage, owner: Tensor | None = None) -> None:
        self.address, self.owner = storage.data_ptr(), owner
        self._first = None if owner is not None else StorageReference(storage)
        self._storage, self._own = borrowed_storage(storage), 1
        """and how many of its uses are the block's own"""

    @property
    def alive(self) -> bool:
        """True if some tensor has the memory."""
        if self._first is not None:
            if self._first.alive:
                return True
            self._first = None
        return storage_use_count(self._storage) > self._own

    def pattern(self, view: View) -> Tensor:
        """A tensor over the memory that does not make it `alive`. Its `data` does, and has a version of its own."""
        self._own += 1
        return view.on(self._storage)

    def owned(self, view: View) -> Tensor:
        """A tensor through which the owner writes. It does not count as one that has the memory."""
        assert self.owner is not None
        return view.on(self.owner.untyped_storage())


@dataclass(frozen=True, slots=True)
class Copied:
    """An argument that is copied: its index, what it must look like, where to, and what of it."""

    index: int
    view: View
    block: Block
    static: Tensor
    part: View


@dataclass(slots=True)
class Execution:
    """A template's execution in a recording. `graph`: None where it could not be captured."""

    run: Run
    dead: list[Block]
    """what has died since the step before"""
    graph: Graph | None = None
    constants: list[tuple[int, Any]] = field(default_factory=list)
    """arguments that are no tensors of the device: they must be equal"""
    bound: list[tuple[int, int]] = field(default_factory=list)
    """arguments that must be at these addresses"""
    copied: list[Copied] = field(default_factory=list)
    filled: list[tuple[int, Tensor]] = field(default_factory=list)
    """arguments that get their memory from the code, with its pattern"""
    outputs: list[Any] = field(default_factory=list)
    """what is returned; None where it is new, or is or views an argument"""
    new: list[tuple[int, Tensor]] = field(default_factory=list)
    """patterns of new outputs"""
    given: list[tuple[int, int, View | None]] = field(default_factory=list)
    """outputs that are arguments, or views of them, with an offset from the argument on"""


@dataclass(slots=True)
class Loan:
    """Memory that was lent for a gradient flat."""

    pattern: Tensor
    dead: list[Block]


@dataclass(slots=True)
class Recording:
    """The steps of a unit."""

    steps: list[Execution | Loan] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    at: dict[int, Block] = field(default_factory=dict)
    """the latest block at each address"""
    misses: int = 0

    def followed(self) -> None:
        """A unit has followed it."""
        self.misses = 0

    def missed(self) -> int:
        """Counts a unit that has departed from it; returns how many have in a row."""
        self.misses += 1
        return self.misses


UNKNOWN: Final = object()
"""The constant of an argument that no graph can have."""


def constant(arg: Any) -> Any:
    """The constant that a graph keeps of an argument that is no tensor of its device."""
    if isinstance(arg, Tensor):
        return (arg.dtype, arg.item()) if arg.dim() == 0 and arg.device.type == "cpu" else UNKNOWN
    if arg is None or isinstance(arg, bool | int | float | complex | str | torch.dtype | torch.device):
        return arg
    return UNKNOWN


def stamp(arg: Tensor) -> int | None:
    """How often an argument was written in place; None where PyTorch does not count, as in inference mode."""
    return None if arg.is_inference() else version(arg)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one is not UNKNOWN and one == other


def distinct(arg: Tensor) -> View | None:
    """The part of a tensor in which each element has its own memory; None if there is no simple one."""
    size = tuple(n if stride else min(n, 1) for n, stride in zip(arg.shape, arg.stride(), strict=True))
    part = View(arg.dtype, int(arg.storage_offset()), size, arg.stride())
    reach = 1
    for n, stride in sorted(zip(size, arg.stride(), strict=True), key=lambda each: each[1]):
        if n > 1:
            if stride < reach:
                return None
            reach = stride * (n - 1) + reach
    return part


def part_of(arg: Tensor, part: View) -> Tensor:
    """The same part of an argument, whose storage and offset may differ."""
    return arg if part.size == arg.shape else arg.as_strided(part.size, part.stride)
