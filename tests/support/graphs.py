"""Graphs on the CPU: what a capture executes is written down, and a replay executes it again on the same memory.

As on a GPU, a replay runs no Python of the program, reads and writes the memory that the capture did, and takes no
notice of what the host believes about it. Unlike there, a capture executes: what it has changed is set back at its end.

What a GPU punishes with wrong numbers or an error is punished here, too:

* Memory that a capture has made is that of whoever comes next, once nobody on the host refers to it. So each replay
  begins and ends with all of it overwritten (`POISON`) that nobody referred to at that point of the capture.
* Memory that a capture has found must be there in a replay: somebody on the host must still refer to it.
* Collectives that are under way at the end of a capture make it fail, and nobody can wait for them afterwards.
* Operations that wait for the device make it fail, and so do the collectives that are asked for behind them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zeroweave._torch.storages import lent
from zeroweave.engine.graphs.contents import Copies, contents
from zeroweave.engine.graphs.nest import Uncapturable
from zeroweave.engine.graphs.numbers import DRAWS, HostNumbers
from zeroweave.engine.graphs.parts import Left
from zeroweave.runtime.bucket import Bucket

POISON: Final = 255
"""In each byte: not a number in each floating dtype, and no index."""
Call = tuple[Any, Any, Any, Any]
"""An operation, what it is given by place and by name, and what it returns."""
_WAITS: Final = frozenset(
    ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "bincount", "equal")
) | {"lift_fresh"}
"""Operators that wait for a GPU; the last one copies what the host has made there, as `torch.tensor` does."""


class InFlat:
    """A tensor that lies in the flat of a bucket. It is not kept: who refers to a flat is counted."""

    def __init__(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        self._bucket, self._dtype = bucket, tensor.dtype
        offset = (tensor.data_ptr() - bucket.flat.data_ptr()) // tensor.itemsize
        self._place = offset, tuple(tensor.shape), tensor.stride()

    def tensor(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype).set_(self._bucket.flat.untyped_storage(), *self._place)

    def lent(self) -> torch.Tensor:
        """As backends have it: their threads may refer to it for a moment longer than anybody waits."""
        return lent(self.tensor()).view(self._place[1])


class Unjoined:
    """In the place of a collective that a capture has left under way."""

    def wait(self) -> None:
        raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")


class Pool:
    """The memory that captures have made and found."""

    def __init__(self) -> None:
        self._tapes: weakref.WeakSet[Tape] = weakref.WeakSet()
        self._made: dict[int, torch.UntypedStorage] = {}
        self._found: dict[int, torch.UntypedStorage] = {}

    def begin(self, tape: Tape) -> None:
        """A capture begins. What only graphs that are gone have referred to goes."""
        self._tapes.add(tape)
        referred = {key for each in self._tapes for key in each.kept}
        self._made = {key: storage for key, storage in self._made.items() if key in referred}
        self._found = {key: storage for key, storage in self._found.items() if key in referred}

    def note(self, tensor: torch.Tensor, made: bool) -> tuple[int, bool]:
        """A capture uses a tensor. `made`: an operation has returned it. Its memory, and was that found there?"""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._made and key not in self._found:
            known = {**self._made, **self._found}.items()
            inside = (k for k, each in known if 0 <= storage.data_ptr() - each.data_ptr() < each.nbytes())
            if (owner := next(inside, None)) is not None:
                return owner, owner in self._found  # it was lent, under a storage that does not own it
            (self._made if made else self._found)[key] = storage
        return key, key in self._found

    def _is_used(self, storage: torch.UntypedStorage) -> bool:
        """Does somebody refer to it, beside the tapes and this object?"""
        uses = int(torch._C._storage_Use_Count(storage._cdata))
        return uses > 1 + sum(tape.kept[storage._cdata] for tape in self._tapes)

    def used(self) -> frozenset[int]:
        """The memory that was made, and that somebody on the host refers to now."""
        return frozenset(key for key, storage in self._made.items() if self._is_used(storage))

    def check_found(self, keys: Iterable[int]) -> None:
        """What a capture has found must still be there."""
        for key in keys:
            if not self._is_used(self._found[key]):
                raise AssertionError(f"a graph uses {self._found[key].nbytes()} bytes that are nobody's any more")

    def poison(self, but: frozenset[int]) -> None:
        """Overwrites what was made, but for these."""
        for key, storage in self._made.items():
            if key not in but:
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)


class Tape(TorchDispatchMode):
    """Operations, with the tensors that they read and wrote."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device, self._pool = device, device.pool
        self._calls: list[Call] = []
        self.kept: Counter[int] = Counter()
        """how often this refers to a storage"""
        self._pool.begin(self)
        self._found: set[int] = set()
        self._failed = False
        """has it been asked for what a capture cannot have?"""
        self._before = self._pool.used()
        self._after = self._before
        """the memory of the pool that was in use at its begin and at its end"""
        self._flats_after: frozenset[int] = frozenset()
        """the buckets that were unsharded then"""
        self._reducing: set[int] = set()
        """where reduce-scatters that nobody has waited for put their results"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") in _WAITS or _looks_up_by_mask(func, args):
            self._failed = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self._failed and func.namespace == "c10d":
            raise RuntimeError("operation failed due to a previous error during capture")
        # gloo takes the result of a reduce-scatter out of a buffer of its own in `wait`, and a replay waits by itself
        if self._reducing and func is torch.ops.aten.split.Tensor:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() in self._reducing:
            self._reducing.discard(args[0].data_ptr())
            return func(*args, **kwargs)
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            self._reducing.add(args[0].data_ptr())
        given = tree_map_only(torch.Tensor, self._read, (args, kwargs))
        out = func(*args, **kwargs)
        self._calls.append((func, *given, tree_map_only(torch.Tensor, self._made, out)))
        return out

    def _read(self, tensor: torch.Tensor) -> Any:
        return self._kept(tensor, made=False)

    def _made(self, tensor: torch.Tensor) -> Any:
        return self._kept(tensor, made=True)

    def _kept(self, tensor: torch.Tensor, made: bool) -> Any:
        bucket = self._device.bucket_of(tensor)
        if bucket is not None:
            return InFlat(bucket, tensor)
        key, found = self._pool.note(tensor, made)
        if found:
            self._found.add(key)
        self.kept[tensor.untyped_storage()._cdata] += 1
        return tensor.data

    def ended(self, unsharded: frozenset[int]) -> None:
        """The capture is over."""
        self._after, self._flats_after = self._pool.used(), unsharded

    @torch.no_grad()
    def replay(self) -> None:
        self._pool.check_found(self._found)
        self._pool.poison(but=self._before)
        with self._device.flats_of_graphs(self._flats_after):
            for call in self._calls:
                execute(call)
        self._pool.poison(but=self._after)


def execute(call: Call) -> None:
    """Executes an operation again, on the memory that it had."""
    func, args, kwargs, out = call
    take = InFlat.lent if func.namespace == "c10d" else InFlat.tensor
    args, kwargs = tree_map_only(InFlat, take, (args, kwargs))
    results = tree_leaves(func(*args, **kwargs))
    for work in results:
        if isinstance(work, torch.ScriptObject) and func.namespace == "c10d":
            dist.Work.unbox(work).wait()  # type: ignore[attr-defined]
    read = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    for kept, new in zip(tree_leaves(out), results, strict=True):
        if isinstance(kept, torch.Tensor) and kept.untyped_storage()._cdata not in read:
            kept.copy_(new)


def _looks_up_by_mask(func: Any, args: Any) -> bool:
    if func is not torch.ops.aten.index.Tensor:
        return False
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


class Device:
    """A capturer without a GPU; `engine` has to be said before anything is captured."""

    def __init__(self) -> None:
        self._parts: Any = None
        self._flats: dict[int, torch.Tensor] = {}
        self.pool = Pool()
        self.captured = 0
        self.nbytes = 0

    def serve(self, engine: Any) -> None:
        self._parts = engine._parts

    @property
    def _buckets(self) -> list[Bucket]:
        return list(self._parts.runtime.buckets.values())

    def bucket_of(self, tensor: torch.Tensor) -> Bucket | None:
        """By its address: what a backend is lent has a storage of its own."""
        at = tensor.data_ptr()
        buckets = (b for b in self._buckets if b.resident)
        return next((b for b in buckets if 0 <= at - b.flat.data_ptr() < b.layout.nbytes), None)

    @contextmanager
    def flats_of_graphs(self, stay: frozenset[int]) -> Iterator[None]:
        """Inside, the flats have the memory of graphs, where the contents of those that `stay` are found by the next.

        Of others they are poison. Those that stay gathered for good have none: they were gathered outside of captures.
        """
        buckets = [bucket for bucket in self._buckets if not bucket.standing]
        host = {b.id: b.flat.data.clone() if b.resident else None for b in buckets}
        for bucket in buckets:
            bucket.storage.resize_(bucket.layout.nbytes)
            if (content := self._flats.pop(bucket.id, None)) is None:
                torch.empty(0, dtype=torch.uint8).set_(bucket.storage).fill_(POISON)
            else:
                torch.empty(0, dtype=bucket.dtype).set_(bucket.storage, 0, (bucket.layout.numel,)).copy_(content)
        yield
        for bucket in buckets:
            whole = torch.empty(0, dtype=bucket.dtype).set_(bucket.storage, 0, (bucket.layout.numel,))
            if bucket.id in stay:
                self._flats[bucket.id] = whole.clone()
            if (before := host[bucket.id]) is None:
                del whole
                bucket.storage.resize_(0)
            else:
                whole.copy_(before)

    def gathered(self, left: Left) -> dict[int, torch.Tensor]:
        """As `Left.gathered`: the addresses of flats say nothing here."""
        return {bucket: self._flats[bucket] for bucket in left.flats}

    # ------------------------------------------------------------------ as a capturer
    @contextmanager
    def graph(self) -> Iterator[Tape]:
        self.captured += 1
        tape = Tape(self)
        try:
            with tape:
                yield tape
        finally:
            unjoined = self._cut_off()
        if unjoined:
            raise RuntimeError("capturing stream has unjoined work")
        tape.ended(frozenset(bucket.id for bucket in self._buckets if bucket.resident))

    def _cut_off(self) -> bool:
        """The capture is over, and what is under way never comes. Is something?"""
        flights = self._parts.runtime.gradients.reductions._flights
        gathering = [bucket for bucket in self._buckets if bucket._pending is not None]
        for pending in (*(flight.pending for flight in flights), *(bucket._pending for bucket in gathering)):
            if isinstance(work := getattr(pending, "_work", None), dist.Work):
                work.wait()  # gloo's threads write what nobody will wait for
        flights.extend([flights.popleft()._replace(pending=Unjoined()) for _ in range(len(flights))])
        for bucket in gathering:
            bucket._pending = Unjoined()
        return bool(flights or gathering)

    @contextmanager
    def alone(self, first: bool) -> Iterator[None]:
        before, numbers, more = Copies(self._parts, contents(self._parts)), torch.get_rng_state(), HostNumbers()
        try:
            yield
            drawn = more.drawn
        finally:
            before.restore()
            torch.set_rng_state(numbers)
            more.restore()
        if drawn:
            raise Uncapturable(DRAWS)

    @property
    def random(self) -> torch.Tensor:
        return torch.get_rng_state()

    def resume_random(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def spare(self, peak: int) -> int:
        return sys.maxsize

    def finish(self) -> None:
        pass

    forget = finish


@contextmanager
def on_cpu() -> Iterator[Device]:
    """Inside, engines on the CPU capture; one at a time."""
    device = Device()
    with ExitStack() as stack:
        for where in ("assembly", "graphs.limits"):
            stack.enter_context(patch(f"zeroweave.engine.{where}.captures_on", lambda _: True))
        stack.enter_context(patch("zeroweave.engine.assembly.Capturer", lambda _: device))
        stack.enter_context(patch.object(Left, "gathered", lambda left: device.gathered(left)))
        yield device
