"""A runtime for one process: real flats that are freed whenever nobody holds them, no communication.

Reading a parameter whose flat is freed kills the process, so that a test that ends has held what it used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeroweave.compile.bind import Part
from zeroweave.compile.regions import find_regions, region_key
from zeroweave.compile.templates import Templates
from zeroweave.layout import SlotKey


class Flat:
    """One bucket: parameters of one dtype and `requires_grad`, as views of a buffer that comes and goes."""

    def __init__(self, ident: int, parameters: list[nn.Parameter]) -> None:
        self.ident = ident
        self.offsets = [0]
        for p in parameters:
            self.offsets.append(self.offsets[-1] + -(-max(p.numel(), 1) // 32) * 32)
        self.buffer = torch.zeros(self.offsets[-1], dtype=parameters[0].dtype, device=parameters[0].device)
        self.real = []
        for p, offset in zip(parameters, self.offsets, strict=False):
            view = self.buffer[offset : offset + p.numel()].view(p.shape)
            view.copy_(p.detach())
            real = nn.Parameter(torch.empty(0, dtype=p.dtype, device=p.device), requires_grad=p.requires_grad)
            real.data = view
            self.real.append(real)
        self.values = self.buffer.clone()
        self.storage = self.buffer.untyped_storage()
        self.nbytes = self.storage.nbytes()
        self.holds = 0
        self.storage.resize_(0)

    def take(self) -> None:
        self.holds += 1
        if self.holds == 1:
            self.storage.resize_(self.nbytes)
            self.buffer.data.copy_(self.values)

    def drop(self) -> None:
        self.holds -= 1
        if self.holds == 0:
            self.storage.resize_(0)


class FakeHost:
    """The host protocol, and what an engine does around it: regions installed on a model, hooks for the rest.

    `options`: `patterns` of regions, `dynamic`, and what `Templates` takes.
    """

    def __init__(self, model: nn.Module, lower: str = "aot_eager", **options: Any) -> None:
        self.model = model
        self.regions = find_regions(model, options.pop("patterns", "auto"), max_bytes=1 << 30)
        dynamic = options.pop("dynamic", None)
        self.flats: list[Flat] = []
        self.gradients: dict[SlotKey, Tensor] = {}
        self.expected: Counter[SlotKey] = Counter()
        self.entered: list[tuple[str, str, tuple[int, ...]]] = []
        self.log: list[str] = []
        self.ran = self.watched = 0
        self.pending: list[Tensor] = []
        self.lent: list[Tensor] = []
        self.seen_by_hooks: list[Tensor] = []
        self.activations: list[Tensor] = []
        self._split(model)
        names = {module: name for name, module in self.regions}
        self.templates = Templates(self, names, lower, **options)  # type: ignore[arg-type]
        self.place_of_name = {name: self.find(p) for name, p in model.named_parameters(remove_duplicate=False)}
        for _, region in self.regions:
            compiled = self.templates.compile(region_key(region), dynamic)
            region._compiled_call_impl = self._entry(region, compiled)

    def _split(self, model: nn.Module) -> None:
        """One bucket per region, dtype and requires_grad; each parameter in the first region that has it."""
        owner: dict[nn.Parameter, str] = {}
        for name, region in self.regions:
            for p in region.parameters():
                owner.setdefault(p, name)
        groups: dict[Any, list[nn.Parameter]] = {}
        for p in model.parameters():
            groups.setdefault((owner.get(p, "rest"), p.dtype, p.requires_grad), []).append(p)
        self.flats = [Flat(i, group) for i, group in enumerate(groups.values())]
        new = {
            old: real
            for group, flat in zip(groups.values(), self.flats, strict=True)
            for old, real in zip(group, flat.real, strict=True)
        }
        for module in model.modules():
            for key, p in list(module._parameters.items()):
                if p is not None:
                    module._parameters[key] = new[p]
        self.key = {flat.storage._cdata: flat for flat in self.flats}

    def _entry(self, region: nn.Module, compiled: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            own = sorted({self.find(p)[0] for p in region.parameters()})  # type: ignore[index]
            for b in own:
                self.flats[b].take()
            try:
                return compiled(region, *args, **kwargs)
            finally:
                for b in own:
                    self.flats[b].drop()

        return call

    @contextmanager
    def everything(self) -> Iterator[None]:
        """All buckets usable: for eager code outside the regions."""
        for flat in self.flats:
            flat.take()
        yield
        for flat in self.flats:
            flat.drop()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Saved-tensors hooks as the runtime has them: what templates announced passes, other flats fail."""

        def pack(tensor: Tensor) -> Tensor:
            self.seen_by_hooks.append(tensor)
            if self.find(tensor) is None:
                self.activations.append(tensor)
                return tensor
            key = (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape)
            for i, other in enumerate(self.pending):
                if key == (other.untyped_storage()._cdata, other.storage_offset(), other.shape):
                    del self.pending[i]
                    return tensor
            raise AssertionError("a flat is saved that no template has told of")

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    # The protocol.

    def find(self, tensor: Tensor) -> SlotKey | None:
        flat = self.key.get(tensor.untyped_storage()._cdata)
        if flat is None:
            return None
        offset = tensor.storage_offset()
        if offset in flat.offsets:
            slot = flat.offsets.index(offset)
            if slot < len(flat.real) and flat.real[slot].shape == tensor.shape and tensor.is_contiguous():
                return flat.ident, slot
        return flat.ident, -1

    def enter(self, name: str, phase: str, uses: tuple[int, ...]) -> tuple[int, ...]:
        self.entered.append((name, phase, uses))
        for b in uses:
            self.flats[b].take()
        return uses

    def leave(self, token: tuple[int, ...]) -> None:
        for b in token:
            self.flats[b].drop()

    def announce(self, parts: list[SlotKey]) -> None:
        self.expected.update(parts)

    def saved(self, tensors: list[tuple[Tensor, SlotKey]], read: bool) -> None:
        self.pending = [tensor for tensor, _ in tensors]

    def destinations(self, parts: list[SlotKey]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for b, slot in parts:
            real = self.flats[b].real[slot]
            found.append(torch.full(real.shape, torch.nan, dtype=real.dtype) if (b + slot) % 2 else None)
        self.lent += [tensor for tensor in found if tensor is not None]
        return found

    def sums(self, parts: list[SlotKey]) -> list[Tensor | None] | None:
        return None

    def deliver(self, announced: list[SlotKey], parts: list[Part], made: Set[SlotKey] = frozenset()) -> Set[SlotKey]:
        self.expected.subtract(announced)
        for b, slot, gradient in parts:
            assert gradient is not None and gradient.is_contiguous()
            real = self.flats[b].real[slot]
            assert gradient.shape == real.shape and gradient.dtype == real.dtype
            known = self.gradients.get((b, slot))
            self.gradients[b, slot] = gradient.clone() if known is None else known + gradient
        return frozenset()

    def watch_writes(self) -> None:
        self.watched += 1

    def execute(self, run: Any, args: list[Any], bound: Any) -> Any:
        return run(args)

    def template_ran(self) -> None:
        self.ran += 1

    # What tests look at.

    def gradient(self, name: str) -> Tensor | None:
        """What was delivered for a parameter, plus what plain autograd accumulated."""
        place = self.place_of_name[name]
        assert place is not None
        own, plain = self.gradients.get(place), self.flats[place[0]].real[place[1]].grad
        return plain if own is None else own if plain is None else own + plain

    def settled(self) -> bool:
        """Everything announced has come, nothing is held."""
        return not any(self.expected.values()) and all(flat.holds == 0 for flat in self.flats)
