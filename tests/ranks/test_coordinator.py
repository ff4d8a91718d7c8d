"""What reaches the coordinator: ranks, and others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from zeroweave.errors import AgreementError
from zeroweave.ranks import coordinator
from zeroweave.ranks.channel import STRANGERS, WELCOME, Channel, Codec, Forged
from zeroweave.ranks.control import Address, Control, coordinate, listen
from zeroweave.ranks.process import own

TOKEN = b"secret"


@pytest.fixture
def address() -> Iterator[Address]:
    listener = listen("127.0.0.1")
    where = Address("127.0.0.1", listener.getsockname()[1], "test", own(), TOKEN)
    made = coordinate(3, listener, TOKEN, 30.0)
    yield where
    made.close()


def controls(address: Address) -> list[Control]:
    return [Control(rank, 3, 30.0, address) for rank in range(3)]


def meet(ranks: list[Control]) -> list[list[bytes]]:
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda control: control.all_gather_bytes(bytes([control.rank])), ranks))


def garbage() -> list[bytes]:
    greeting = ("control", 0, own())
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 9,
        bytes(5000),
        b"\xff" * 5000,
        Codec(b"another", b"up").pack(greeting),
        Codec(TOKEN, b"down").pack(greeting),
        Codec(TOKEN, b"up").pack(greeting)[:-1] + b"x",
    ]


def test_what_no_rank_has_written_changes_nothing(address: Address) -> None:
    ranks = controls(address)
    for content in garbage():
        with socket.create_connection(("127.0.0.1", address.port)) as stranger:
            stranger.sendall(content)
            assert meet(ranks) == [[b"\0", b"\1", b"\2"]] * 3
    for rank in ranks:
        rank.close()


def test_what_has_no_hash_is_not_read() -> None:
    codec = Codec(TOKEN, b"up", STRANGERS)
    whole = codec.pack(("control", 0, ""))
    assert codec.feed(whole[:7]) == [] and codec.feed(whole[7:] + whole) == [("control", 0, "")] * 2
    for content in garbage()[2:]:
        with pytest.raises(Forged):
            Codec(TOKEN, b"up", STRANGERS).feed(content)


def test_a_greeting_that_was_recorded_takes_no_ranks_place(address: Address) -> None:
    ranks = controls(address)
    again = Channel(("127.0.0.1", address.port), TOKEN, ("control", 1, own()), 0.5)
    assert meet(ranks) == [[b"\0", b"\1", b"\2"]] * 3
    with pytest.raises(ConnectionError):
        again.receive(5.0)
    again.close()


def test_a_rank_connects_among_more_strangers_than_are_kept(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay, and say nothing. One that is a rank's, and comes so slowly that it is dropped, is made again."""
    monkeypatch.setattr(coordinator, "_NEWCOMERS", 3)
    where = "127.0.0.1", address.port
    with ExitStack() as ends:
        for _ in range(20):
            ends.enter_context(socket.create_connection(where))
        slow = ends.enter_context(socket.create_connection(where))
        for _ in range(20):
            ends.enter_context(socket.create_connection(where))
        slow.settimeout(30.0)
        assert slow.recv(1) == b"", "it was kept"
        ranks = controls(address)
        assert meet(ranks) == [[b"\0", b"\1", b"\2"]] * 3


def test_a_connection_that_is_dropped_before_it_is_welcome_is_made_again() -> None:
    """As by a coordinator that has too many newcomers. What was sent by then is sent again."""
    hello = ("control", 0, own())
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        channel = Channel(listener.getsockname()[:2], TOKEN, hello, 60.0)
        channel.send("early")
        answer = threads.submit(channel.receive, 60.0)
        for content in (b"", b"\xff" * 64):
            with listener.accept()[0] as dropped:
                dropped.sendall(content)
        with listener.accept()[0] as kept:
            down, up, come = Codec(TOKEN, b"down"), Codec(TOKEN, b"up"), list[object]()
            kept.sendall(down.pack(WELCOME) + down.pack("answer"))
            assert answer.result(60.0) == "answer"
            channel.send("late")
            kept.settimeout(60.0)
            while len(come) < 3:
                come += up.feed(kept.recv(4096))
            assert come == [hello, "early", "late"]
        with pytest.raises(ConnectionError):
            channel.receive(60.0)
        channel.close()


def test_what_ranks_have_alike_travels_once(address: Address) -> None:
    ranks = controls(address)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda control: control.all_gather_bytes(bytes(100_000)), ranks))
    assert found == [[bytes(100_000)] * 3] * 3
    assert all(rank.channel is not None and rank.channel.received < 101_000 for rank in ranks)


def test_a_rank_that_has_gone_is_named_to_who_comes_later(address: Address) -> None:
    ranks = controls(address)
    meet(ranks)
    ranks[2].close()
    for rank in ranks[:2]:
        with pytest.raises(AgreementError, match=r"at 'here': rank 2 \(last seen at 'all_gather_bytes'\) will not arr"):
            rank.barrier("here")
        assert rank.broken is not None and not rank.late


def listening(port: int) -> set[str]:
    """The addresses, as the kernel writes them, at which something listens on a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")}


@pytest.mark.oldest
def test_where_it_listens() -> None:
    with listen("127.0.0.1") as listener:
        assert listening(listener.getsockname()[1]) == {"0100007F"}
    for name in ("localhost", "192.0.2.1"):  # this machine's name for itself; an address of none of its interfaces
        with listen(name) as listener:
            assert listening(listener.getsockname()[1]) <= {"0" * 32, "0" * 8}
            with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
                pass
