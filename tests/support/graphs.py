"""Graphs on the CPU: what a capture executes is written down, and a replay executes it again on the same memory.

As on a GPU, a replay runs no Python of the program, reads and writes the memory that the capture did, and takes no
notice of what the host believes about it. Unlike there, a capture executes: what it has changed is set back at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from zeroweave.engine.graphs.contents import Copies, contents
from zeroweave.runtime.bucket import Bucket


class InFlat:
    """A tensor that lies in the flat of a bucket. It is not kept: who refers to a flat is counted."""

    def __init__(self, bucket: Bucket, tensor: torch.Tensor) -> None:
        self._bucket, self._dtype = bucket, tensor.dtype
        offset = (tensor.data_ptr() - bucket.flat.data_ptr()) // tensor.itemsize
        self._place = offset, tuple(tensor.shape), tensor.stride()

    def tensor(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._dtype).set_(self._bucket.flat.untyped_storage(), *self._place)


class Tape(TorchDispatchMode):
    """Operations, with the tensors that they read and wrote."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._reducing: set[int] = set()
        """where reduce-scatters that nobody has waited for put their results"""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = func(*args, **(kwargs or {}))
        # gloo copies the result of a reduce-scatter in `wait`, and a replay waits by itself
        if func is torch.ops.c10d._reduce_scatter_base_.default:
            self._reducing.add(args[0].data_ptr())
        elif func is torch.ops.aten.copy_.default and args[0].data_ptr() in self._reducing:
            self._reducing.discard(args[0].data_ptr())
            return out
        self._calls.append((func, *(tree_map_only(torch.Tensor, self._kept, each) for each in (args, kwargs, out))))
        return out

    def _kept(self, tensor: torch.Tensor) -> Any:
        bucket = self._device.bucket_of(tensor)
        return tensor.data if bucket is None else InFlat(bucket, tensor)

    @torch.no_grad()
    def replay(self) -> None:
        with self._device.flats_of_graphs():
            for func, args, kwargs, out in self._calls:
                given = [tree_map_only(InFlat, InFlat.tensor, each) for each in (args, kwargs or {})]
                result = func(*given[0], **given[1])
                for work in tree_leaves(result):
                    if isinstance(work, torch.ScriptObject) and func.namespace == "c10d":
                        dist.Work.unbox(work).wait()  # type: ignore[attr-defined]
                read = {t.untyped_storage()._cdata for t in tree_leaves(given) if isinstance(t, torch.Tensor)}
                for kept, new in zip(tree_leaves(out), tree_leaves(result), strict=True):
                    if isinstance(kept, torch.Tensor) and kept.untyped_storage()._cdata not in read:
                        kept.copy_(new)


class Device:
    """A capturer without a GPU; `engine` has to be said before anything is captured."""

    def __init__(self) -> None:
        self._parts: Any = None
        self._flats: dict[int, torch.Tensor] = {}
        self.captured = 0
        self.nbytes = 0

    def serve(self, engine: Any) -> None:
        self._parts = engine._parts

    def bucket_of(self, tensor: torch.Tensor) -> Bucket | None:
        """By its address: what a backend is lent has a storage of its own."""
        at = tensor.data_ptr()
        buckets = (b for b in self._parts.runtime.buckets.values() if b.resident)
        return next((b for b in buckets if 0 <= at - b.flat.data_ptr() < b.layout.nbytes), None)

    @contextmanager
    def flats_of_graphs(self) -> Iterator[None]:
        """Inside, the flats have the memory of graphs, where their contents stay from one replay to the next."""
        buckets = list(self._parts.runtime.buckets.values())
        host = {b.id: b.flat.data.clone() if b.resident else None for b in buckets}
        for bucket in buckets:
            bucket.storage.resize_(bucket.layout.nbytes)
            whole = torch.empty(0, dtype=bucket.dtype).set_(bucket.storage, 0, (bucket.layout.numel,))
            whole.copy_(self._flats.get(bucket.id, torch.zeros(())))
        yield
        for bucket in buckets:
            whole = torch.empty(0, dtype=bucket.dtype).set_(bucket.storage, 0, (bucket.layout.numel,))
            self._flats[bucket.id] = whole.clone()
            if (before := host[bucket.id]) is None:
                del whole
                bucket.storage.resize_(0)
            else:
                whole.copy_(before)

    # ------------------------------------------------------------------ as a capturer
    @contextmanager
    def graph(self) -> Iterator[Tape]:
        self.captured += 1
        with Tape(self) as tape:
            yield tape

    @contextmanager
    def alone(self, first: bool) -> Iterator[None]:
        before, numbers = Copies(self._parts, contents(self._parts), None), torch.get_rng_state()
        try:
            yield
        finally:
            before.restore()
            torch.set_rng_state(numbers)

    @property
    def random(self) -> torch.Tensor:
        return torch.get_rng_state()

    def resume_random(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def home(self, nbytes: int) -> None:
        return None

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
        yield device
