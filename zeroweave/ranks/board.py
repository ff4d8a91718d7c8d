"""The board: one line of text per rank under each heading, in a store that rank 0 keeps.

It is a side channel over TCP (`TCPStore`), apart from all process groups, so that it still works when a
collective is stuck. Only calls that answer at once are used: a connection that waits for a key would keep
every other thread of the process from it. Each thread that polls has a connection of its own (`connect`).
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

HEADINGS = ("arrived", "status", "digest 0", "digest 1", "lines", "marks")


class Board:
    """One connection to the store. Every method raises `ConnectionError` once rank 0's process has gone.

    `reach` opens a connection; `server`, on rank 0, is the store itself, which lives as long as this board. `name`:
    what all ranks call it, and no other one.
    """

    def __init__(
        self, rank: int, world: int, reach: Callable[[], Store], server: Store | None = None, name: str = ""
    ) -> None:
        self.rank, self.world, self.name = rank, world, name
        self._reach, self._server = reach, server
        self._connection: Store | None = None
        self._asks: dict[int, float] = {}
        with self._connected() as store:
            for heading in HEADINGS:
                if not store.check([f"{heading}/{rank}"]):
                    store.set(f"{heading}/{rank}", "")

    @classmethod
    def meet(cls, process_group: dist.ProcessGroup | None, deadline_seconds: float) -> Callable[[], Board]:
        """Collective over `process_group`: rank 0 keeps a store on a free port and tells the others where.

        Returns what opens the board: that waits for rank 0's answer, and may be watched. The address is the loopback
        where all ranks run on one machine, else MASTER_ADDR where that is rank 0's, else rank 0's host name.
        """
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        timeout = timedelta(seconds=deadline_seconds)
        server = _tcp_store("127.0.0.1", 0, timeout, serve=True) if rank == 0 else None
        told: list[tuple[str, str, int, str]] = [("", "", 0, "")] * world
        # MASTER_ADDR belongs to the first rank of the job, which need not be in this group.
        first_of_job = dist.get_rank() == 0 and os.environ.get("MASTER_ADDR")
        mine = (machine(), first_of_job or socket.gethostname(), server.port if server else 0, uuid.uuid4().hex)
        dist.all_gather_object(told, mine, group=process_group)
        _, address, port, name = told[0]
        host = "127.0.0.1" if len({where for where, *_ in told}) == 1 else address
        return partial(cls, rank, world, partial(_tcp_store, host, port, timeout), server, name)

    @property
    def asks(self) -> Mapping[int, float]:
        """The threads that wait for an answer of rank 0's, by number, and since when (`time.monotonic`)."""
        return dict(self._asks)

    def connect(self) -> Board:
        """The same board over a connection of its own."""
        return Board(self.rank, self.world, self._reach, name=self.name)

    def part(self, name: str) -> Store:
        """A store inside this one, for the rendezvous of a process group."""
        with self._connected() as store:
            return PrefixStore(name, store)

    def post(self, heading: str, text: str) -> None:
        """Writes this rank's line; it does not wait for the store's answer."""
        with self._connected() as store:
            store.set(f"{heading}/{self.rank}", text)

    def read(self, heading: str) -> list[str]:
        """The lines of all ranks, "" where nothing has been posted. Every rank must have opened the board."""
        with self._connected() as store:
            lines = store.multi_get([f"{heading}/{rank}" for rank in range(self.world)])
        return [line.decode() for line in lines]

    def ring(self) -> None:
        """Asks every rank that polls `rung` to look at the board now."""
        with self._connected() as store:
            store.add("bell", 1)

    def rung(self) -> int:
        """How often anyone rang; the cheap call for polling."""
        with self._connected() as store:
            return store.add("bell", 0)

    def decide(self, question: str, answer: str) -> str:
        """Gives `answer` to `question` unless it has one; returns the one that stands, equal on all ranks."""
        with self._connected() as store:
            return store.compare_set(f"decided/{question}", "", answer).decode()

    def decided(self, question: str) -> str | None:
        """The answer that stands, None where there is none yet."""
        with self._connected() as store:
            if not store.check([f"decided/{question}"]):
                return None
            return store.get(f"decided/{question}").decode()

    def close(self) -> None:
        """Drops the connection, and on rank 0 the store: other ranks lose it."""
        self._connection = self._server = None
        self._reach = _closed

    @contextmanager
    def _connected(self) -> Iterator[Store]:
        thread = threading.get_ident()
        outer = self._asks.get(thread)  # where a signal came in between, and its handler asks
        self._asks[thread] = time.monotonic()
        try:
            if self._connection is None:
                self._connection = self._reach()
            yield self._connection
        except RuntimeError as error:
            raise ConnectionError(f"the store kept by rank 0 does not answer: {error}") from error
        finally:
            if outer is None:
                del self._asks[thread]
            else:
                self._asks[thread] = outer


def _tcp_store(host: str, port: int, timeout: timedelta, serve: bool = False) -> dist.TCPStore:  # type: ignore[name-defined]
    """A connection to the store at `host`:`port`; with `serve` the store itself (`port` 0: on a free one)."""
    return dist.TCPStore(host, port, is_master=serve, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]


def _closed() -> Store:
    raise ConnectionError("the board is closed")


def machine() -> str:
    """Names this machine: two may share a host name, but not the number of the boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
