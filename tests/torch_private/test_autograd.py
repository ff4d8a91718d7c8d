"""Backwards and checkpoints."""

from __future__ import annotations

import pytest
import torch

from zeroweave._torch.autograd import checkpoint_segment, recomputing

pytestmark = pytest.mark.oldest


def test_recomputation_is_noticed() -> None:
    seen = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(recomputing())
        return torch.sin(x) * x

    x = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True, False, False]


def test_each_checkpoint_is_a_segment_of_its_own() -> None:
    seen: list[object] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(checkpoint_segment())
        x = x.sin()
        seen.append(checkpoint_segment())
        return x

    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        x = torch.utils.checkpoint.checkpoint(look, x, use_reentrant=False)
    assert seen[0] is seen[1] is not seen[2] and seen[2] is seen[3] and None not in seen
    look(torch.ones(2))
    assert seen[4] is None
    x.sum().backward()
    assert seen[5:] and all(each is None for each in seen[5:]), "what runs again is no first time"
