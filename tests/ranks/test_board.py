"""The board in one process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from zeroweave.ranks.board import Board, _serve, _tcp_store


def boards(world: int) -> list[Board]:
    store = dist.HashStore()
    return [Board(rank, world, lambda: store) for rank in range(world)]


@pytest.mark.oldest
def test_lines_and_bells() -> None:
    first, second = boards(2)
    assert first.read("status") == ["", ""]
    first.post("status", "here")
    second.post("arrived", "there")
    assert second.read("status") == ["here", ""] and first.read("arrived") == ["", "there"]
    assert first.connect().read("status") == ["here", ""]
    heard = second.rung()
    assert second.rung() == heard
    first.ring()
    assert second.rung() != heard


@pytest.mark.oldest
def test_the_first_answer_stands() -> None:
    first, second = boards(2)
    assert first.decided("which") is None
    assert first.decide("which", "mine") == "mine"
    assert second.decide("which", "yours") == "mine"
    assert second.decided("which") == "mine" and second.decided("what") is None


@pytest.mark.oldest
def test_a_lost_store_is_a_connection_error() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    board = Board(0, 1, lambda: dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), server)
    assert board.rung() == b""
    del server
    board._server = None
    with pytest.raises(ConnectionError, match="rank 0"):
        board.rung()
    board.close()
    with pytest.raises(ConnectionError, match="closed"):
        board.rung()


def test_what_no_rank_has_written_is_counted_and_not_there() -> None:
    store = dist.HashStore()
    first, second = (Board(rank, 2, lambda: store, token=b"secret") for rank in range(2))
    second.post("status", "here")
    other = Board(1, 2, lambda: store, token=b"another")
    with pytest.warns(UserWarning, match="no rank of this job"):
        for forged in ("garbage", "", "\0", "x " * 999, store.get("arrived/0").decode(), "here"):
            store.set("status/1", forged)
            store.set("status/0", store.get("status/1"))
            assert first.read("status") == ["", ""]
        other.post("status", "there")
        assert first.read("status") == ["", ""]
    assert first.forged == 10
    second.post("status", "here again")
    store.set("status/0", store.get("status/1"))  # a line of one rank is none of another's
    assert first.read("status") == ["", "here again"]
    store.set("status/1", "garbage")
    assert first.read("status") == ["", "here again"]
    store.set("decided/which", "garbage")
    assert first.decided("which") is None and first.decide("which", "mine") == "mine"
    assert second.decided("which") == second.decide("which", "yours") == "mine"
    store.set("bell", "\0garbage")
    assert first.rung() != b""


def listening(port: int) -> set[str]:
    """The addresses, as the kernel writes them, at which something listens on a port."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{port:04X}")}


@pytest.mark.oldest
def test_where_it_listens() -> None:
    server = _serve("127.0.0.1", timedelta(seconds=5))
    assert listening(server.port) == {"0100007F"}
    board = Board(0, 1, lambda: _tcp_store("127.0.0.1", server.port, timedelta(seconds=5)), server, token=b"secret")
    board.post("status", "here")
    assert board.read("status") == ["here"]
    for name in ("localhost", "192.0.2.1"):  # this machine's name for itself; an address of none of its interfaces
        assert listening(_serve(name, timedelta(seconds=5)).port) == {"0" * 32}
