"""Process groups: the default one of a job that has none, connections over gloo, and how groups end."""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from zeroweave._torch.distributed import end_process_group, set_timeout
from zeroweave.errors import RankFailure

BACKSTOP_SECONDS = 60.0
"""How long after the deadline a backend ends its wait; by then the alarm has told which rank is missing."""

TRIES: Final = 6
"""How often ranks that something disturbs connect over gloo."""
TRY: Final = timedelta(seconds=10.0)
"""How long they have for that; twice as long each further time, and the last time as long as for a collective."""


def backstop(deadline_seconds: float) -> timedelta:
    """The timeout of a communicator whose ranks have an alarm with this deadline."""
    return timedelta(seconds=deadline_seconds + BACKSTOP_SECONDS)


def local_gpu() -> torch.device:
    """The GPU of this process: the only one that it sees, else that of LOCAL_RANK, without which the current one."""
    index = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    return torch.device("cuda", index if torch.cuda.device_count() > 1 else 0)


def start_process_group(deadline_seconds: float) -> None:
    """Starts the default process group from the environment (torchrun's variables). Collective.

    It stays for later engines: ranks leave an engine at different times, and one that met the others anew while they
    are still leaving would find the addresses, or the store, of the group that they leave. It ends with the process,
    or when somebody calls `torch.distributed.destroy_process_group()`.
    """
    timeout = backstop(deadline_seconds)
    if torch.cuda.is_available():
        device = local_gpu()
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        turn = store.add(f"zeroweave start of rank {rank}", 1)  # a launcher's store has what earlier ones left

        def make(place: Store, timeout: timedelta) -> dist.ProcessGroup:
            try:
                dist.init_process_group("gloo", store=place, rank=rank, world_size=world, timeout=timeout)
            except RuntimeError:
                # PyTorch has counted it, and ranks meet by that number. The end of any group begins it anew.
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
                dist.destroy_process_group()
                raise
            assert dist.group.WORLD is not None
            return dist.group.WORLD

        connect_gloo(PrefixStore(f"zeroweave start {turn}", store), rank, world, timeout, make)
    atexit.register(_end, os.getpid())


def connect_gloo(
    store: Store, rank: int, world: int, timeout: timedelta, make: Callable[[Store, timedelta], dist.ProcessGroup]
) -> dist.ProcessGroup:
    """The process group that `make(store, timeout)` makes over gloo, with connections between ranks and no others.

    Why: while ranks connect, gloo takes whoever sends the small number that it expects for a rank. So each rank sends
    each other one a secret before the group is used. Where one does not come, all ranks make another group. `store`:
    in which only these ranks meet, and only once.
    """
    why = ""
    for attempt in range(TRIES):
        place = PrefixStore(f"attempt {attempt}", store)
        if rank == 0:
            place.set("secret", secrets.token_bytes(7).hex())
        if place.add("there", 1) == world:
            place.set("all are there", "")
        place.wait(["all are there", "secret"], timeout)  # gloo listens for a moment only
        secret = int(place.get("secret"), 16)
        patience = timeout if attempt == TRIES - 1 else min(timeout, TRY * 2**attempt)
        group, broken = None, ""
        try:
            group = make(PrefixStore("group", place), patience)
            found = torch.empty(world, dtype=torch.int64)
            dist.all_to_all_single(found, torch.full((world,), secret + rank), group=group)
            if found.tolist() != [secret + each for each in range(world)]:
                broken = "it has something else than what the others sent"
        except RuntimeError as error:
            broken = f"{type(error).__name__}: {error}"
        if broken:
            place.set("end", f"rank {rank}: {broken}")
        elif place.add("connected", 1) == world:
            place.set("end", "")
        place.wait(["end"], timeout)
        why = place.get("end").decode()
        if not why and group is not None:
            set_timeout(group, timeout)
            return group
        if group is not None:
            end_process_group(group)
    raise RankFailure(f"the ranks' connections over gloo broke {TRIES} times while they were made: {why}")


def _end(process: int) -> None:
    """Ends the default process group: with a live one the interpreter often aborts on its way out.

    Not after an exception: the other ranks may be anywhere, and it could wait for them for ever.
    """
    if os.getpid() == process and dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()
        gc.collect()


def at_end(ends: ExitStack, own: ExitStack, failed: Callable[[], bool]) -> None:
    """Has `own` closed with `ends`, or else when the process ends, unless nobody has it any more by then.

    Not where this rank has `failed`, or after an exception: the other ranks may be anywhere.
    """
    process, found = os.getpid(), weakref.ref(own)

    def leave() -> None:
        left = found()
        raised = getattr(sys, "last_value", None) is not None
        if left is not None and os.getpid() == process and not raised and not failed():
            left.close()

    atexit.register(leave)
    ends.callback(own.close)
    ends.callback(atexit.unregister, leave)


def groups_at_end(ends: ExitStack, own: ExitStack, device: torch.device, failed: Callable[[], bool]) -> None:
    """Has `own`, which ends process groups, closed with `ends`; gloo's with the process at the latest, see `at_end`.

    Gloo's threads must have ended when the interpreter does. NCCL has none that must, and its end may wait for other
    ranks, which may be anywhere.
    """
    if device.type == "cpu":
        at_end(ends, own, failed)
    else:
        ends.callback(own.close)
