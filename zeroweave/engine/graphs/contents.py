"""What steps change: by name, compared bit by bit, and where it lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import inf, isfinite
from operator import is_
from typing import Any, Final, NamedTuple

import torch

from zeroweave.engine.graphs.away import Away, put_back
from zeroweave.engine.graphs.held import Held, captured_by, held_by, lies
from zeroweave.engine.graphs.nest import Uncapturable
from zeroweave.engine.graphs.setting import options_of
from zeroweave.engine.parts import EngineParts
from zeroweave.runtime.bucket import Bucket

_WORDS: Final = 1 << 22
"""So many words of a tensor are looked at in one go: few enough that a GPU's cache holds them for the next kernel."""
_FACTOR: Final = -7046029254386353131
"""2^64 / golden ratio, odd, as a signed number: multiples of it are spread over all 64 bits."""
PARTS: Final = 31
"""Numbers of a sketch. So many have distances that are off by about an eighth. A prime number, because what differs in
one column of a matrix alone lies in all parts then."""


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
    """Copies of such contents, where the tensors are as long as `spare` bytes are left there; others in host memory."""

    def __init__(self, parts: EngineParts, named: Contents, spare: int | None = None) -> None:
        """`spare`: None for no limit."""
        self._parts, away = parts, Away(parts.device)
        self._kept: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        for tensor in (tensor for tensors in named.values() for tensor in tensors):
            stays = spare is None or tensor.nbytes <= spare
            self._kept.append((tensor, [tensor.detach().clone()] if stays else away.copy(tensor)))
            if spare is not None and stays:
                spare -= tensor.nbytes

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
        self._buffers = [(held, name, b, lies(b)) for held in owners for name, b in held.items() if b is not None]
        # Parameters lie somewhere else whenever they are gathered.
        held = ((each, parts.runtime.find(each.tensor) is None) for each in _held(parts, functions))
        self._held = [(each, lies(each.tensor) if stays else None) for each, stays in held]
        states = [] if parts.optimizer is None else parts.optimizer.states()
        self._states = [(fragment, state, dict(state)) for fragment, state in states]
        self._fragments = frozenset(id(fragment) for fragment, _ in states)
        self._stood = self._standing()

    def hold(self) -> bool:
        """Is all of it still there? A flat that is to be gathered first lies nowhere yet."""
        if (self._shards_now(), self._places) != (self._shards, self._parts.runtime.places.addresses):
            return False
        flats = self._flats_now()
        if any(flats.get(bucket, address) != address for bucket, address in self._flats.items()):
            return False
        if any(held.get(name) is not b or lies(b) != lay for held, name, b, lay in self._buffers):
            return False
        if not all(each.is_there and lay in (None, lies(each.tensor)) for each, lay in self._held):
            return False
        return self._states_hold() and self._options_now() == self._options

    def _states_hold(self) -> bool:
        """Thousands of tensors: first as they stand in their dictionaries, which takes little, then each by its key."""
        standing = self._standing()
        if len(standing) == len(self._stood) and all(map(is_, standing, self._stood)):
            return True
        now = {} if self._parts.optimizer is None else self._parts.optimizer.optimizer.state
        return all(
            now.get(fragment) is state and all(state.get(key) is value for key, value in items.items())
            for fragment, state, items in self._states
        )

    def _standing(self) -> list[object]:
        """The optimizer's dictionaries of the fragments, their keys, and their values, in the order of each."""
        if (optimizer := self._parts.optimizer) is None:
            return []
        states = [state for key, state in optimizer.optimizer.state.items() if id(key) in self._fragments]
        return [*states, *chain(*states), *chain(*(state.values() for state in states))]

    def _shards_now(self) -> list[int]:
        homes = [bucket.home for bucket in self._parts.runtime.buckets.values()]
        return [tensor.data_ptr() for home in homes for tensor in home.at_rest]

    def _flats_now(self) -> dict[int, int]:
        """Of those that stay gathered, by bucket. No graph gathers them."""
        return {id: bucket.flat.data_ptr() for id, bucket in self._parts.runtime.buckets.items() if bucket.standing}

    def _options_now(self) -> list[str]:
        if (optimizer := self._parts.optimizer) is None:
            return []
        options = [repr(value) for group in options_of(optimizer.optimizer) for value in group.values()]
        return [*options, repr(sorted(optimizer.uneven))]


def _trained(parts: EngineParts) -> list[Bucket]:
    return [bucket for bucket in parts.runtime.buckets.values() if bucket.layout.trainable]


class _Sums:
    """Sums over tensors of one device, with weights that are made once."""

    def __init__(self, device: torch.device, words: int) -> None:
        self._odd = (2 * torch.arange(words, device=device) + 1) * _FACTOR
        index = torch.arange(words, device=device) + 1
        self._signs = torch.where(index * (2 * index + 1) * _FACTOR < 0, -1.0, 1.0).to(torch.float64)

    def digest(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """int64, 0-dim. See `digests`."""
        total, begin = torch.zeros((), dtype=torch.int64, device=self._odd.device), 0
        for tensor in tensors:
            flat = tensor.detach().resolve_conj().contiguous().view(-1)
            flat = flat.clone() if flat.data_ptr() % 4 else flat
            words = flat.view(torch.int32 if flat.nbytes % 4 == 0 else torch.uint8)
            for piece in words.split(len(self._odd)):
                wide = piece.to(torch.int64)
                # w_i * (2 (begin + i) + 1) * c, in two sums
                total += wide.sum() * _wrapped(2 * begin * _FACTOR)
                total += wide.mul_(self._odd[: len(wide)]).sum()
                begin += len(wide)
        return total

    def sketch(self, tensor: torch.Tensor) -> torch.Tensor:
        """float64 [PARTS + 1]. See `sketch`."""
        flat = tensor.detach().resolve_conj().contiguous().view(-1)
        flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        total = torch.zeros(PARTS + 1, dtype=torch.float64, device=tensor.device)
        for piece in flat.split(len(self._signs)):
            wide = piece.to(torch.float64, copy=True)
            total[PARTS] += torch.dot(wide, wide)
            wide *= self._signs[: len(wide)]
            whole = len(wide) // PARTS * PARTS
            total[:PARTS] += wide[:whole].view(-1, PARTS).sum(0)
            total[: len(wide) - whole] += wide[whole:]
        total[PARTS] = total[PARTS].sqrt() if tensor.is_floating_point() or tensor.is_complex() else inf
        finite = total[:PARTS].isfinite().all() & ~total[PARTS].isnan()
        return torch.where(finite, total, inf)


def _wrapped(number: int) -> int:
    """Modulo 2^64, as a signed number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _sums(tensors: Iterable[torch.Tensor]) -> dict[torch.device, _Sums]:
    """For each device that they lie on."""
    most: dict[torch.device, int] = {}
    for tensor in tensors:
        most[tensor.device] = max(most.get(tensor.device, 1), min(_WORDS, tensor.nbytes))
    return {device: _Sums(device, words) for device, words in most.items()}


@torch.no_grad()
def digests(named: Contents) -> dict[str, int]:
    """Of each name's tensors, which lie on one device: equal where they are equal bit by bit, and else almost never.

    The words w of all tensors of a name enter as the sum of w_i * (2 i + 1) * c modulo 2^64: in another order or with
    another word it is another sum. Waits for the devices.
    """
    by_device = _sums(tensor for tensors in named.values() for tensor in tensors)
    sums = {name: by_device[ts[0].device].digest(ts) if ts else 0 for name, ts in named.items()}
    return {name: int(value) for name, value in sums.items()}


def different(one: Mapping[str, int], other: Mapping[str, int]) -> set[str]:
    """The names under which two have different digests."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


class Print(NamedTuple):
    """What a tensor is compared by: equal or not, and by how much it differs. See `digests`, `sketch`."""

    digest: int
    sketch: tuple[float, ...]
    norm: float

    @property
    def finite(self) -> bool:
        return isfinite(self.sketch[0])


@torch.no_grad()
def sketch(tensor: torch.Tensor) -> tuple[tuple[float, ...], float]:
    """PARTS sums, in which tensors that differ little lie side by side; and the norm. Waits for the device.

    Of the elements x_i, whatever their dtype: part k is the sum of s_i * x_i over the i that leave the remainder k, and
    the signs s_i are made of i alone (modulo the elements that are looked at in one go). So the distance of two
    sketches is about the norm of what the tensors differ by.

    All is infinite where an element is not finite. The norm is, too, where elements are integers: those may be the
    lower bits of something, of which the norm says nothing.

    Source: Charikar, Chen, Farach-Colton, Finding frequent items in data streams, 2002 (the count sketch).
    """
    *parts, norm = _sums([tensor])[tensor.device].sketch(tensor).tolist()
    return tuple(parts), norm


@torch.no_grad()
def prints(named: Contents) -> dict[tuple[str, int], Print]:
    """Of each tensor, by its name and its number among those of that name. Waits for the devices.

    One by one: in a sum over several, what is small would be lost beside what is large.
    """
    each = {(name, number): t for name, tensors in named.items() for number, t in enumerate(tensors)}
    sums = _sums(each.values())
    both = {place: (sums[t.device].digest([t]), sums[t.device].sketch(t)) for place, t in each.items()}
    told = {place: (int(bits), values.tolist()) for place, (bits, values) in both.items()}
    return {place: Print(bits, tuple(values[:PARTS]), values[PARTS]) for place, (bits, values) in told.items()}
