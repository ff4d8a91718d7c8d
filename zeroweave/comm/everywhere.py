"""Conditions on all ranks: set-up steps that succeed, and GPUs of one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zeroweave.ranks.control import Control


def done_by_all(control: Control, step: Callable[[], object], what: str) -> str:
    """Takes a step that may fail; why it has on the first rank where it has, "" where it has on none. Collective."""
    why = ""
    try:
        step()
    except Exception as error:  # of any kind: of CUDA, its libraries, the compiler of kernels
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    reasons = control.all_gather_object(why, what)
    return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each), "")


def why_not_local(gpus: Sequence[tuple[str, str]]) -> list[str]:
    """For each rank, why its GPU (host, uuid) is not a further GPU of rank 0's machine; "" if it is."""
    hosts, uuids = zip(*gpus, strict=True)
    found = []
    for rank, (host, uuid) in enumerate(gpus):
        if host != hosts[0]:
            found.append(f"rank {rank} is on {host}, rank 0 on {hosts[0]}: it works inside one machine")
        elif (first := uuids.index(uuid)) != rank:
            found.append(f"ranks {first} and {rank} share a GPU")
        else:
            found.append("")
    return found
