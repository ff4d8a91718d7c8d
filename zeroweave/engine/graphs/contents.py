"""What steps change: by name, compared bit by bit, and where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

import torch

from zeroweave.engine.graphs.away import Away, put_back
from zeroweave.engine.graphs.held import Held, captured_by, held_by
from zeroweave.engine.graphs.nest import Uncapturable
from zeroweave.engine.parts import EngineParts
from zeroweave.runtime.bucket import Bucket

_WORDS: Final = 1 << 24
"""So many words of a tensor are looked at in one go."""
_FACTOR: Final = -7046029254386353131
"""2^64 / golden ratio, odd, as a signed number: multiples of it are spread over all 64 bits."""


Contents = Mapping[str, Sequence[torch.Tensor]]
"""Tensors by the names that people have for them, one for several that belong together."""


def contents(parts: EngineParts, functions: Iterable[Any] = ()) -> dict[str, list[torch.Tensor]]:
    """Names for people, and the tensors: shards of trained parameters, the optimizer's state, buffers.

    Of buckets that stay gathered from step to step, the flats, too.

    And what else modules, and `functions`, the losses, have at hand, which they may write.
    """
    found: dict[str, list[torch.Tensor]] = {}
    for bucket in _trained(parts):
        standing = []
        if bucket.standing:
            bucket.wait()
            standing.append(bucket.flat)
        found[f"parameters of {bucket.layout.name}"] = [*bucket.home.at_rest, *standing]
        if parts.optimizer is not None:
            found[f"optimizer state of {bucket.layout.name}"] = parts.optimizer.tensors(bucket.id)
    for name, buffer in parts.model.named_buffers():
        found[f"buffer {name}"] = [buffer]
    seen = {id(tensor) for tensors in found.values() for tensor in tensors}
    for each in _held(parts, functions):
        if _is_plain(each.tensor) and id(each.tensor) not in seen and parts.runtime.find(each.tensor) is None:
            seen.add(id(each.tensor))
            found[f"tensor {each.name}"] = [each.tensor]
    return found


def _held(parts: EngineParts, functions: Iterable[Any]) -> Iterator[Held]:
    yield from held_by(parts.model)
    for function in functions:
        if function is not None:
            yield from captured_by(function, parts.model.modules())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Is it a tensor with values of its own, no parameter at rest?"""
    return type(tensor) is torch.Tensor and not _shares(tensor) and tensor.device.type != "meta"


def _shares(tensor: torch.Tensor) -> bool:
    """Is it sparse, or do its elements share memory?"""
    strided = tensor.layout == torch.strided
    return not strided or any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def check(parts: EngineParts) -> None:
    """Uncapturable where some of that cannot be copied and compared."""
    for name, tensors in contents(parts).items():
        if any(map(_shares, tensors)):
            raise Uncapturable(f"{name} is sparse, or its elements share memory")


class Copies:
    """Copies of such contents; `home`: where they live, the host's memory, None for where the tensors do."""

    def __init__(self, parts: EngineParts, named: Contents, home: torch.device | None) -> None:
        self._parts = parts
        tensors = [tensor for tensors in named.values() for tensor in tensors]
        away = None if home is None else Away(parts.device)
        self._kept = [(t, [t.detach().clone()] if away is None else away.copy(t)) for t in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """The tensors have their contents again; between two windows. Autograd is not told, as it is not by graphs.

        What has to be gathered anew still has.
        """
        for tensor, pieces in self._kept:
            put_back(tensor.data, pieces)
        for bucket in _trained(self._parts):
            bucket.renew(regathered=bucket.standing)


class Whereabouts:
    """Where everything lay that graphs read and write, and what of the optimizer's options they took for constant.

    Loading, for instance, puts other tensors there. Asked before each window, so it looks for the objects themselves.
    """

    def __init__(self, parts: EngineParts, functions: Iterable[Any] = ()) -> None:
        """`functions`: the losses that are captured. What these and the modules hold beside parameters stays alive."""
        self._parts = parts
        self._shards, self._flats = self._shards_now(), self._flats_now()
        self._places = parts.runtime.places.addresses
        self._options = self._options_now()
        owners = [module._buffers for module in parts.model.modules() if module._buffers]
        self._buffers = [(held, name, b, b.data_ptr()) for held in owners for name, b in held.items() if b is not None]
        self._held = list(_held(parts, functions))
        states = [] if parts.optimizer is None else parts.optimizer.states()
        self._states = [(fragment, state, list(state.items())) for fragment, state in states]

    def hold(self) -> bool:
        """Is all of it still there? A flat that is to be gathered first lies nowhere yet."""
        if (self._shards_now(), self._places) != (self._shards, self._parts.runtime.places.addresses):
            return False
        flats = self._flats_now()
        if any(flats.get(bucket, address) != address for bucket, address in self._flats.items()):
            return False
        if any(held.get(name) is not b or b.data_ptr() != address for held, name, b, address in self._buffers):
            return False
        if not all(each.is_there for each in self._held):
            return False
        optimizer = self._parts.optimizer
        if optimizer is None:
            return True
        now = optimizer.optimizer.state
        if any(now.get(fragment) is not state for fragment, state, _ in self._states):
            return False
        if any(state.get(key) is not value for _, state, items in self._states for key, value in items):
            return False
        return self._options_now() == self._options

    def _shards_now(self) -> list[int]:
        homes = [bucket.home for bucket in self._parts.runtime.buckets.values()]
        return [tensor.data_ptr() for home in homes for tensor in home.at_rest]

    def _flats_now(self) -> dict[int, int]:
        """Of those that stay gathered, by bucket. No graph gathers them."""
        return {id: bucket.flat.data_ptr() for id, bucket in self._parts.runtime.buckets.items() if bucket.standing}

    def _options_now(self) -> list[str]:
        if (optimizer := self._parts.optimizer) is None:
            return []
        changing, groups = ("params", "lr", "initial_lr"), optimizer.optimizer.param_groups
        options = [repr(value) for group in groups for key, value in group.items() if key not in changing]
        return [*options, repr(sorted(optimizer.uneven))]


def _trained(parts: EngineParts) -> list[Bucket]:
    return [bucket for bucket in parts.runtime.buckets.values() if bucket.layout.trainable]


@torch.no_grad()
def digest(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64, 0-dim, on the tensors' device: equal for tensors that are equal bit by bit, and else almost never.

    The words w of all tensors enter as the sum of w_i * (2 i + 1) * c modulo 2^64: in another order or with another
    word it is another sum.
    """
    total, begin = None, 0
    for tensor in tensors:
        flat = tensor.detach().resolve_conj().contiguous().view(-1)
        flat = flat.clone() if flat.data_ptr() % 4 else flat
        words = flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8)
        for piece in words.split(_WORDS):
            index = torch.arange(begin, begin + piece.numel(), device=piece.device)
            part = (piece.to(torch.int64) * (2 * index + 1) * _FACTOR).sum()
            total = part if total is None else total + part
            begin += piece.numel()
    return torch.zeros((), dtype=torch.int64) if total is None else total


def digests(named: Contents) -> dict[str, int]:
    """Of each. Waits for the device."""
    sums = {name: digest(tensors) for name, tensors in named.items()}
    return {name: int(value) for name, value in sums.items()}


def different(one: Mapping[str, int], other: Mapping[str, int]) -> set[str]:
    """The names under which two have different digests."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """float64, 0-dim, on the tensor's device: a sum with weights, so that what differs little moves it little.

    Of the elements x_i, whatever their dtype: the sum of x_i * w_i, with w_i in [-1, 1] made of i alone. Infinite where
    one of them is not finite.
    """
    flat = tensor.detach().resolve_conj().contiguous().view(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    total, begin = torch.zeros((), dtype=torch.float64, device=tensor.device), 0
    for piece in flat.split(_WORDS):
        index = torch.arange(begin, begin + piece.numel(), device=piece.device)
        weights = ((index + 1) * (2 * index + 1) * _FACTOR).to(torch.float64) * 2.0**-63
        total += (piece.to(torch.float64) * weights).sum()
        begin += piece.numel()
    return total.nan_to_num_(inf, inf, inf)


class Print(NamedTuple):
    """What a tensor is compared by: equal or not, and by how much it differs."""

    digest: int
    sketch: float


def prints(named: Contents) -> dict[tuple[str, int], Print]:
    """Of each tensor, by its name and its number among those of that name. Waits for the device.

    One by one: in a sum over several, what is small would be lost beside what is large.
    """
    each = {(name, number): t for name, tensors in named.items() for number, t in enumerate(tensors)}
    both = {place: (digest([tensor]), sketch(tensor)) for place, tensor in each.items()}
    return {place: Print(int(bits), float(value)) for place, (bits, value) in both.items()}
