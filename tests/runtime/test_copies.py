"""Pinned memory in blocks: what it takes beside the tensors, and that they are tensors of their own."""

from __future__ import annotations

import torch

from zeroweave.runtime.copies import PinnedBlocks

GIB = 2**30


class Blocks(PinnedBlocks):
    """Their sizes are noted. `memory`: the device that has it; "meta": it has none."""

    def __init__(self, memory: str = "cpu") -> None:
        self.sizes: list[int] = []
        self._memory = memory
        super().__init__(self._made)

    def _made(self, nbytes: int) -> torch.Tensor:
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._memory)


def test_each_tensor_has_its_own_memory_and_version() -> None:
    blocks = Blocks()
    kinds = [(10, torch.float32), (1000, torch.bfloat16), (7, torch.uint8), (0, torch.float32), (300, torch.int64)]
    made = [blocks.zeros(numel, dtype) for numel, dtype in kinds]
    assert [(tensor.numel(), tensor.dtype) for tensor in made] == kinds
    assert all(tensor.is_contiguous() and not tensor.any() for tensor in made)
    before = [tensor._version for tensor in made]
    for number, tensor in enumerate(made, 1):
        tensor.fill_(number)
    assert [tensor._version - version for tensor, version in zip(made, before, strict=True)] == [1] * len(made)
    assert all((tensor == number).all() for number, tensor in enumerate(made, 1))


def test_blocks_have_powers_of_two_and_little_is_left() -> None:
    """Layers of 12 bytes an element, of which PyTorch would round each piece up to a power of two."""
    blocks, sizes = Blocks(memory="meta"), [33_000_000, 130_000_000, 130_000_000] * 40
    for size in sizes:
        blocks._cut(size)
    assert all(nbytes & (nbytes - 1) == 0 for nbytes in blocks.sizes)
    assert blocks.sizes[:2] == [2**25, 2**27] and max(blocks.sizes) == GIB
    assert sum(sizes) < blocks.nbytes == sum(blocks.sizes) < 1.2 * sum(sizes)


def test_what_is_larger_than_a_block_has_one_of_its_own() -> None:
    blocks = Blocks(memory="meta")
    blocks._cut(100)
    assert blocks.sizes == [256]
    assert blocks._cut(3 * GIB)[0].nbytes == 4 * GIB
