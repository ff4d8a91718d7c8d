"""The board: one line of text per rank under each heading, in a store that rank 0 keeps.

It is a side channel over TCP (`TCPStore`), apart from all process groups, so that it still works when a
collective is stuck. Whoever reaches its port can write into it, so what is not marked with the ranks' common token is
none of theirs, and counts as not written. Only calls that answer at once are used: a connection that waits for a key
would keep every other thread of the process from it. Each thread that polls has a connection of its own (`connect`).
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from zeroweave.notices import warn

HEADINGS = ("arrived", "status", "digest 0", "digest 1", "lines", "marks")


class Board:
    """One connection to the store. Every method raises `ConnectionError` once rank 0's process has gone.

    `reach` opens a connection; `server`, on rank 0, is the store itself, which lives as long as this board. `name`:
    what all ranks call it, and no other one. `token`: what they have in common, and nobody else knows.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        reach: Callable[[], Store],
        server: Store | None = None,
        name: str = "",
        token: bytes = b"",
    ) -> None:
        self.rank, self.world, self.name = rank, world, name
        self.forged = 0
        """lines that had no mark of the ranks"""
        self._reach, self._server, self._token = reach, server, token
        self._connection: Store | None = None
        self._asks: dict[int, float] = {}
        self._read: dict[str, str] = {}  # the last lines with a mark
        with self._connected() as store:
            for key in ("bell", *(f"{heading}/{rank}" for heading in HEADINGS)):
                if not store.check([key]):
                    store.set(key, "")

    @classmethod
    def meet(cls, process_group: dist.ProcessGroup | None, deadline_seconds: float) -> Callable[[], Board]:
        """Collective over `process_group`: rank 0 keeps a store on a free port and tells the others where.

        Returns what opens the board: that waits for rank 0's answer, and may be watched. The address is the loopback
        where all ranks have the same, else MASTER_ADDR where that is rank 0's, else rank 0's host name.
        """
        rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
        timeout = timedelta(seconds=deadline_seconds)
        # MASTER_ADDR belongs to the first rank of the job, which need not be in this group.
        first_of_job = dist.get_rank() == 0 and os.environ.get("MASTER_ADDR")
        places = [("", "")] * world
        dist.all_gather_object(places, (_network(), first_of_job or socket.gethostname()), group=process_group)
        host = "127.0.0.1" if len({where for where, _ in places}) == 1 else places[0][1]
        server = _serve(host, timeout) if rank == 0 else None
        told: list[tuple[int, str, bytes]] = [(0, "", b"")] * world
        mine = (server.port if server else 0, uuid.uuid4().hex, secrets.token_bytes(32))
        dist.all_gather_object(told, mine, group=process_group)
        port, name, token = told[0]
        return partial(cls, rank, world, partial(_tcp_store, host, port, timeout), server, name, token)

    def mark(self, text: bytes, place: str = "") -> bytes:
        """What only a rank can write in front of a text, at that place."""
        return hmac.digest(self._token, f"{place}\0".encode() + text, "sha256")

    @property
    def asks(self) -> Mapping[int, float]:
        """The threads that wait for an answer of rank 0's, by number, and since when (`time.monotonic`)."""
        return dict(self._asks)

    def connect(self) -> Board:
        """The same board over a connection of its own."""
        return Board(self.rank, self.world, self._reach, name=self.name, token=self._token)

    def part(self, name: str) -> Store:
        """A store inside this one, for the rendezvous of a process group."""
        with self._connected() as store:
            return PrefixStore(name, store)

    def post(self, heading: str, text: str) -> None:
        """Writes this rank's line; it does not wait for the store's answer."""
        with self._connected() as store:
            store.set(f"{heading}/{self.rank}", self._marked(f"{heading}/{self.rank}", text))

    def read(self, heading: str) -> list[str]:
        """The lines of all ranks, "" where nothing has been posted. Every rank must have opened the board."""
        keys = [f"{heading}/{rank}" for rank in range(self.world)]
        with self._connected() as store:
            lines = store.multi_get(keys)
        for key, line in zip(keys, lines, strict=True):
            if line and (text := self._checked(key, line)) is not None:
                self._read[key] = text
        return [self._read.get(key, "") for key in keys]

    def ring(self) -> None:
        """Asks every rank that polls `rung` to look at the board now."""
        with self._connected() as store:
            store.set("bell", uuid.uuid4().hex)

    def rung(self) -> bytes:
        """Another one whenever anyone has rung; the cheap call for polling."""
        with self._connected() as store:
            return store.get("bell")

    def decide(self, question: str, answer: str) -> str:
        """Gives `answer` to `question` unless it has one; returns the one that stands, equal on all ranks."""
        key, stands = f"decided/{question}", b""
        mine = self._marked(key, answer)
        while True:  # what has no mark is no answer
            with self._connected() as store:
                stands = store.compare_set(key, stands.decode(errors="replace"), mine)
            if (found := self._checked(key, stands)) is not None:
                return found

    def decided(self, question: str) -> str | None:
        """The answer that stands, None where there is none yet."""
        with self._connected() as store:
            if not store.check([key := f"decided/{question}"]):
                return None
            return self._checked(key, store.get(key))

    def close(self) -> None:
        """Drops the connection, and on rank 0 the store: other ranks lose it."""
        self._connection = self._server = None
        self._reach = _closed

    def _marked(self, key: str, text: str) -> str:
        return f"{self.mark(text.encode(), key).hex()} {text}"

    def _checked(self, key: str, line: bytes) -> str | None:
        """A line without its mark; None, and counted, where it has none."""
        mark, _, text = line.partition(b" ")
        if hmac.compare_digest(mark, self.mark(text, key).hex().encode()):
            return text.decode()
        self.forged += 1
        if self.forged == 1:
            warn(f"something that is no rank of this job has written to its board ({key}): it is ignored", self.rank)
        return None

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
            raise ConnectionError(f"[ZW503] the store kept by rank 0 does not answer: {error}") from error
        finally:
            if outer is None:
                del self._asks[thread]
            else:
                self._asks[thread] = outer


def _tcp_store(host: str, port: int, timeout: timedelta, **more: Any) -> dist.TCPStore:  # type: ignore[name-defined]
    """A connection to the store at `host`:`port`."""
    return dist.TCPStore(host, port, wait_for_workers=False, timeout=timeout, **more)  # type: ignore[attr-defined]


def _serve(host: str, timeout: timedelta) -> dist.TCPStore:  # type: ignore[name-defined]
    """The store itself, on a free port of the interface that has the address `host`.

    On all interfaces where none here has it, as behind a translated address, or where it is only this machine's name
    for itself.
    """
    listening = None
    with suppress(OSError):
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family, backlog=1024)
        if host != "127.0.0.1" and ip_address(listening.getsockname()[0].partition("%")[0]).is_loopback:
            listening.close()
            listening = None
    if listening is None:
        return _tcp_store("127.0.0.1", 0, timeout, is_master=True)
    port = listening.getsockname()[1]
    return _tcp_store(host, port, timeout, is_master=True, master_listen_fd=listening.detach())


def _closed() -> Store:
    raise ConnectionError("the board is closed")


def _network() -> str:
    """Names this process's loopback: containers of one machine may each have their own, under the same host name."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return f"{machine()} {namespace}"


def machine() -> str:
    """Names this machine: two may share a host name, but not the number of the boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
