"""Ranks of one machine share what Inductor compiles: one compiles a graph, the others find it in the cache.

They meet at a file lock next to the cache, one for each graph. There is no collective, so that a rank that compiles
less than the others, or fails, delays no other rank for longer than the lock's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from filelock import FileLock, Timeout
from torch import fx

from zeroweave.compile.phases import Phases

TIMEOUT = 120.0
"""Seconds after which a rank no longer waits for the one that compiles, and compiles by itself."""


def graph_key(graph: fx.GraphModule, inputs: Sequence[Any], settings: str) -> str:
    """Equal for equal graphs on all ranks of a machine; devices count with their index, as in Inductor's own keys.

    Sizes that are symbols count by their names: ranks whose sequences differ in length share a symbolic graph.
    `settings` is what else decides on the code.
    """
    parts = [settings, *(str(module.graph) for module in graph.modules() if isinstance(module, fx.GraphModule))]
    for value in inputs:
        if isinstance(value, torch.Tensor):
            parts.append(f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.device}")
        else:
            parts.append(str(value))
    return xxhash.xxh128_hexdigest("\n".join(parts).encode())


@contextmanager
def compile_lock(folder: Path, key: str, phases: Phases, timeout: float = TIMEOUT) -> Iterator[None]:
    """Inside, no other process of this machine that uses `folder` compiles the graph of this key for the first time.

    A rank that had to wait continues without the lock: the graph is in the cache then, and all waiting ranks may load
    it at once. So does a rank that has waited for `timeout` seconds, a rank that cannot lock the folder, and every rank
    after the first success, which an empty file marks.
    """
    lock, done = FileLock(folder / f"zeroweave_{key}.lock"), folder / f"zeroweave_{key}.done"
    mine = False
    try:
        if not done.exists():
            try:
                lock.acquire(timeout=0)
                mine = True
            except Timeout:
                with phases("wait"), lock.acquire(timeout=timeout, poll_interval=0.01):
                    pass
    except (OSError, NotImplementedError):  # Timeout is an OSError
        pass
    try:
        yield
        if mine:
            done.touch()
    finally:
        if mine:
            lock.release()
