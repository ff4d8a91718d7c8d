"""Which memory has room for the optimizer's state of whole parameters. Every rank is to have all of it.

It goes where the engine computes if every rank has the room there, else to host memory if every machine has it for all
of its ranks. Otherwise no rank gets it. Numbers only; `Room.now` alone looks at the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import torch

from zeroweave.layout import round_up
from zeroweave.ranks.process import machine

_SMALL: Final = 10 * 2**20
_GRAIN: Final = 512
_SEGMENT: Final = 2 * 2**20


class Room(NamedTuple):
    """The memory that a rank could take at this moment, in bytes."""

    machine: str
    host: int
    """host memory of the machine, for all its ranks together"""
    device: int | None = None
    """None where the engine computes in host memory"""

    @classmethod
    def now(cls, device: torch.device) -> Room:
        """Local. What torch's allocator has cached is released first, so that it counts as free."""
        if device.type != "cuda":
            return cls(machine(), available())
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))
        return cls(machine(), available(), min(free, allowed - torch.cuda.memory_reserved(device)))

    def without(self, nbytes: int) -> Room:
        """What is left when so many are taken where the engine computes."""
        if self.device is None:
            return self._replace(host=self.host - nbytes)
        return self._replace(device=self.device - nbytes)


class Need(NamedTuple):
    """The memory that a rank needs for the state, in bytes."""

    host: int = 0
    """if it is in host memory"""
    device: int = 0
    """if it is on the device: what torch's allocator takes for it at most"""
    passing: int = 0
    """in addition, where the engine computes, while it is gathered"""

    @classmethod
    def of(cls, kept: Iterable[int], gathered: Iterable[int]) -> Need:
        """`kept`: bytes of each tensor of the result; `gathered`: of each that is gathered, one after the other."""
        kept = list(kept)
        # The transport may stage as much as it gathers.
        return cls(sum(kept), sum(map(on_device, kept)), 2 * max(gathered, default=0))


def on_device(nbytes: int) -> int:
    """What torch's allocator takes on a GPU for a tensor of `nbytes` at most.

    Several that are below 10 MiB share a segment, of which they fill two thirds at least; a larger one has its own.
    """
    if nbytes < _SMALL:
        return round_up(nbytes, _GRAIN) * 3 // 2
    return round_up(nbytes, _SEGMENT)


def decide(rooms: Sequence[Room], needs: Sequence[Need]) -> Literal["device", "host"] | None:
    """Where every rank has the room for its state; None: nowhere. Both by rank. A twentieth of all room stays free."""
    ranks = list(zip(rooms, needs, strict=True))
    if all(r.device is not None and n.device + n.passing <= _usable(r.device) for r, n in ranks):
        return "device"
    if any(r.device is not None and n.passing > _usable(r.device) for r, n in ranks):
        return None
    by_machine = _by_machine(rooms, needs)
    return "host" if all(needed <= _usable(room) for needed, room, _ in by_machine.values()) else None


def shortage(rooms: Sequence[Room], needs: Sequence[Need]) -> str:
    """Why `decide` said None: how much it takes, and how much there is where there is least."""
    most = max(range(len(needs)), key=lambda rank: needs[rank].device)
    words = [f"of whole parameters it is {_gib(needs[most].host)} on each rank"]
    devices = [(room.device, rank) for rank, room in enumerate(rooms) if room.device is not None]
    if devices:
        least, rank = min(devices)
        words.append(f"the GPU of rank {rank} has {_gib(least)}")
    found = _by_machine(rooms, needs).values()
    needed, room, ranks = max(found, key=lambda one: one[0] - one[1])
    who = f"{ranks} ranks there need" if ranks > 1 else "the rank there needs"
    words.append(f"a machine has {_gib(room)} of host memory, {who} {_gib(needed)}")
    return "; ".join(words)


def available(root: Path = Path("/")) -> int:
    """Bytes of host memory that this machine has left, by what limits this process; no limit where nothing says."""
    try:
        fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        left = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        left = sys.maxsize
    return max(0, min([left, *_control_groups(root)]))


def _control_groups(root: Path) -> Iterator[int]:
    """What the limit of each control group leaves that this process is in: a container's, or a batch job's."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents[: len(inner.parts) - len(top.parts)]):
            try:
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):  # another namespace's folder, or no limit
                continue
            yield limit - used + int(stat.get(names[2], 0))  # files that were read count as used until room is needed


def _by_machine(rooms: Sequence[Room], needs: Sequence[Need]) -> dict[str, tuple[int, int, int]]:
    """What each machine's ranks need in host memory, what there is, and how many they are."""
    found: dict[str, tuple[int, int, int]] = {}
    for room, need in zip(rooms, needs, strict=True):
        needed, left, ranks = found.get(room.machine, (0, room.host, 0))
        needed += need.host + (need.passing if room.device is None else 0)
        found[room.machine] = needed, min(left, room.host), ranks + 1
    return found


def _usable(nbytes: int) -> int:
    return nbytes - nbytes // 20


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"
