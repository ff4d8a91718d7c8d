"""What was written into gathered parameters, compared between ranks: each keeps its own part, so all must be alike."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
import xxhash

from zeroweave._torch.storages import version
from zeroweave.comm.rounding import cast
from zeroweave.errors import listed
from zeroweave.ranks.control import Control
from zeroweave.runtime.bucket import Bucket


def digest(tensor: torch.Tensor) -> bytes:
    """8 bytes that tell of another shape or other bits."""
    values = tensor.detach().contiguous().cpu()
    hasher = xxhash.xxh3_64(f"{values.dtype} {list(values.shape)}".encode())
    # Not through numpy, after which a storage cannot be resized any more: a flat's is.
    hasher.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
    return hasher.digest()


def versions(buckets: Iterable[Bucket]) -> list[int]:
    """How often each real parameter has been written in place."""
    return [version(parameter) for bucket in buckets for parameter in bucket.real]


def compared(
    names: Sequence[tuple[str, int]], mine: Sequence[bytes], wrote: Sequence[bool], label: str, control: Control
) -> tuple[str, list[bool]]:
    """Which values the ranks do not share, and so do not keep, in words; "" where they share all. Collective.

    And of each value, whether any rank has written it. `names`: of the values, with the number of sharding groups that
    have one of that name, which need not share it; `mine`: their digests here; `wrote`: true if this rank wrote them. A
    rank that has nothing to compare any more calls `gives_up` instead.
    """
    ranks = control.all_gather_object((mine, wrote), label)
    if None in ranks:
        return f"rank {ranks.index(None)} left {label} with an exception: nothing that was written there is kept", []
    told, written = list[str](), list[bool]()
    for index, (name, groups) in enumerate(names):
        digests = [theirs[index] for theirs, _ in ranks]
        writers = [str(rank) for rank, (_, theirs) in enumerate(ranks) if theirs[index]]
        written.append(bool(writers))
        if any(own != digests[rank % groups] for rank, own in enumerate(digests)):
            alone = f" (written on rank {', '.join(writers)} only)" if 0 < len(writers) < control.world else ""
            told.append(f"{name!r}{alone}")
    if not told:
        return "", written
    return (
        f"{label}: the ranks have different values of {listed(told, 4)}; none is kept. Write the same on all ranks, or "
        "use engine.load_state_dict(), which takes what rank 0 has"
    ), []


@torch.no_grad()
def moved(shown: Mapping[str, torch.Tensor], buckets: Sequence[Bucket]) -> str:
    """Copies to where they belong the values of parameters that have other memory, as after ``p.data = …``.

    `shown`: what was handed out, by name. Returns in words what cannot be copied; else "".
    """
    slots = (each for b in buckets for each in zip(b.layout.slots, b.real, b.views(b.flat), strict=True))
    for slot, real, there in slots:
        name, view = slot.name, shown[slot.name]
        if view.data_ptr() == there.data_ptr() and view.stride() == there.stride() and view.shape == there.shape:
            continue
        if view.shape != there.shape or view.dtype != there.dtype or view.device != there.device:
            now, then = (f"{tuple(each.shape)} of {each.dtype} on {each.device}" for each in (view, there))
            return f"full_parameters(): {name!r} is {now} now, and was {then}: what takes its place must be like it"
        real.copy_(view)
    return ""


def gives_up(label: str, control: Control) -> None:
    """Tells the ranks that come to `compared` that this one does not. Collective in its place."""
    control.all_gather_object(None, label)


@torch.no_grad()
def keep(buckets: Sequence[Bucket], before: list[int], control: Control, label: str) -> str:
    """Keeps what was written into gathered parameters: this rank's part goes into the shard. Collective.

    `before`: the `versions` when they were handed out. A shard that is a master keeps its own, finer value wherever the
    parameter still has the one rounded from it. Where the ranks do not have the same values, nothing is kept, and all
    are told why; else "".
    """
    wrote = [now != then for now, then in zip(versions(buckets), before, strict=True)]
    if control.world > 1:
        slots = [(slot.name, bucket.layout.groups) for bucket in buckets for slot in bucket.layout.slots]
        mine = [digest(view) for bucket in buckets for view in bucket.views(bucket.flat)]
        refused, wrote = compared(slots, mine, wrote, label, control)
        if refused:
            return refused
    written_anywhere = iter(wrote)
    for bucket in buckets:
        written, values = bucket.slice(bucket.flat), bucket.values()
        changed = written != cast(values, bucket.dtype)
        bucket.put(torch.where(changed, written.to(values.dtype), values))
        if any(tuple(islice(written_anywhere, len(bucket.real)))):  # on all ranks alike: they gather it again
            bucket.renew()
    return ""


def abort(buckets: Iterable[Bucket]) -> None:
    """Takes what was written as not written: the shards have the old values, and a gather brings them back."""
    for bucket in buckets:
        if bucket.written:
            bucket.renew()
