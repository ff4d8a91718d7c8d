"""Saved tensors: eager code saves a handle where it would save a view of a flat.

A view would be read in the backward after its storage was freed. The handle says which bucket the view is
in and where; unpacking it enters the backward of the call that saved it, which unshards and holds the bucket.
Views that a compiled forward saves pass through: its backward binds and holds their buckets itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zeroweave._torch.storages import unattached, version
from zeroweave.errors import EngineError
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.runtime import Runtime
from zeroweave.runtime.storages import Saved
from zeroweave.runtime.tape import Frame


class _Handle(NamedTuple):
    bucket: Bucket
    generation: int
    frame: Frame
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Parameter(NamedTuple):
    """A real parameter, without a reference to it: that would count as one from outside the engine."""

    bucket: Bucket
    slot: int
    version: int


class SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of one engine, entered for each outermost forward. Compiled code may go past them; see `Templates`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._find, self._save = runtime, runtime.find, runtime.activations.save
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> object:
        runtime, place = self._runtime, self._find(tensor)
        if place is None or (frame := runtime.frame) is None:
            # The version is kept because autograd checks for later writes only where there are no hooks.
            return self._save(*unattached(tensor))
        bucket, slot = runtime.buckets[place[0]], place[1]
        if runtime.saved_views.take(tensor, place):
            real = bucket.real[slot]
            if slot >= 0 and (tensor.shape, tensor.stride()) == (real.shape, real.stride()):  # and no other view of it
                return _Parameter(bucket, slot, version(real))
            return Saved(tensor.detach(), version(tensor))
        frame.handed_out()
        return _Handle(
            bucket, bucket.generation, frame, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        )

    def _unpack(self, saved: object) -> torch.Tensor:
        if isinstance(saved, Saved):
            tensor = self._runtime.activations.use(saved)
        elif isinstance(saved, _Parameter):
            tensor = saved.bucket.real[saved.slot]
        else:
            assert isinstance(saved, _Handle)
            return self._view(saved)
        if version(tensor) != saved.version:
            raise EngineError(
                "[ZW407] one of the variables needed for gradient computation has been modified since the forward, by "
                f"an inplace operation or engine.step(): {tensor.dtype} {list(tensor.shape)} is at "
                f"version {version(tensor)}; expected version {saved.version}"
            )
        return tensor

    def _view(self, saved: _Handle) -> torch.Tensor:
        """The tensor that eager code has saved, once its bucket is usable."""
        if saved.generation != saved.bucket.generation:
            raise EngineError(
                f"[ZW407] parameters of {saved.bucket.layout.name!r} have changed since the forward of this backward: "
                "call backward before engine.step()"
            )
        self._runtime.use_in_backward(saved.bucket, saved.frame)
        with torch.no_grad():
            base = saved.bucket.flat.detach()
            if saved.dtype != base.dtype:
                base = base.view(saved.dtype)
            return base.as_strided(saved.shape, saved.stride, saved.offset)
