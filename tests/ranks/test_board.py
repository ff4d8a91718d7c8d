"""The board in one process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from zeroweave.ranks.board import Board


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
    assert second.rung() == heard + 1


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
    assert board.rung() == 0
    del server
    board._server = None
    with pytest.raises(ConnectionError, match="rank 0"):
        board.rung()
    board.close()
    with pytest.raises(ConnectionError, match="closed"):
        board.rung()
