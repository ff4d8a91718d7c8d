"""Copies that wait in host memory while a window is tried: what is put back is what was there, in blocks or beside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zeroweave.engine.graphs.away import Away, pinned_block, put_back

CPU = torch.device("cpu")
_BYTES = 2048


def tensors() -> Iterator[torch.Tensor]:
    torch.manual_seed(0)
    yield torch.randn(7)
    yield torch.randn(40, 50)  # in several blocks
    yield torch.randn(3, 5, dtype=torch.float64).bfloat16()
    yield torch.randn(11, 130).t()  # not contiguous
    yield torch.tensor(3.0)
    yield torch.zeros(0, 4)
    yield torch.randn(2000) > 0
    yield torch.randn(300, dtype=torch.complex128)
    yield torch.arange(5)


class Blocks:
    """So many can be had. Each is full of what was never copied."""

    def __init__(self, most: int) -> None:
        self.made: list[torch.Tensor] = []
        self._most = most

    def __call__(self) -> torch.Tensor | None:
        if len(self.made) == self._most:
            return None
        self.made.append(torch.full((_BYTES,), 0xEE, dtype=torch.uint8))
        return self.made[-1]

    def have(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {block.data_ptr() for block in self.made}


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("most", [0, 1, 3, 100])
def test_what_is_put_back_is_what_was_there(most: int) -> None:
    blocks, now, before = Blocks(most), list(tensors()), list(tensors())
    away = Away(CPU, blocks)
    copies = [away.copy(tensor) for tensor in now]
    for tensor in now:
        tensor.zero_()
    for _ in range(2):
        for tensor, pieces in zip(now, copies, strict=True):
            put_back(tensor, pieces)
        assert all(map(is_equal, now, before))
    apart = [not (tensor.is_contiguous() and tensor.numel()) for tensor in now]
    for is_apart, pieces in zip(apart, copies, strict=True):
        inside = [blocks.have(piece) for piece in pieces]
        assert not any(inside) if is_apart or not most else most < 100 or all(inside)
    assert len(blocks.made) == most or most == 100


def test_blocks_are_filled_one_behind_the_other() -> None:
    """Little is lost where one tensor follows another; a block that nobody needs is not made."""
    blocks = Blocks(100)
    away = Away(CPU, blocks)
    pieces = [away.copy(torch.full((100,), float(n))) for n in range(8)]  # 400 bytes take 512
    assert len(blocks.made) == 2 and all(len(each) == 1 for each in pieces)
    assert [len(piece) for piece in away.copy(torch.zeros(2 * _BYTES // 4))] == [_BYTES // 4] * 2
    assert len(blocks.made) == 4


def test_a_tensor_whose_layout_has_changed() -> None:
    before, away = torch.randn(40, 50), Away(CPU, Blocks(100))
    pieces = away.copy(before)
    assert len(pieces) > 1
    other = torch.zeros(50, 40).t()
    put_back(other, pieces)
    assert torch.equal(other, before)


def test_what_lies_elsewhere_is_copied_as_ever() -> None:
    """State that is in host memory already, for one, which goes back over no link."""
    blocks = Blocks(100)
    (copy,) = Away(torch.device("cuda"), blocks).copy(torch.ones(3))
    assert torch.equal(copy, torch.ones(3)) and not blocks.made


def test_memory_that_cannot_be_pinned_or_is_needed_is_not_there() -> None:
    assert pinned_block(1024, left=1 << 62) is None
    if not torch.cuda.is_available():
        assert pinned_block(1024, left=0) is None
