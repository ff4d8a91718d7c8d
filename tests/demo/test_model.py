"""The demo's model and text."""

from __future__ import annotations

import math

import pytest
import torch

from zeroweave.demo import Llama, LlamaConfig, Text


def test_the_text_is_the_same_for_every_number_of_ranks() -> None:
    whole = Text(length=32, batch=6).step(4)["input_ids"]
    parts = [Text(length=32, batch=6, rank=rank, world=3).step(4)["input_ids"] for rank in range(3)]
    assert whole.shape == (6, 32) and whole.dtype == torch.int64 and int(whole.max()) < 256
    assert torch.equal(torch.cat(parts), whole)


def test_steps_and_seeds_give_different_text() -> None:
    steps = iter(Text(length=32, batch=2))
    first, second = next(steps)["input_ids"], next(steps)["input_ids"]
    assert not torch.equal(first, second)
    assert torch.equal(first, Text(length=32, batch=2).step(0)["labels"])
    assert not torch.equal(first, Text(length=32, batch=2, seed=1).step(0)["input_ids"])


def test_a_batch_that_ranks_cannot_share() -> None:
    with pytest.raises(ValueError, match="16 sequences cannot be split evenly over 3 ranks"):
        Text(world=3)


def test_the_model_starts_at_the_loss_of_guessing() -> None:
    torch.manual_seed(0)
    model = Llama()
    assert sum(p.numel() for p in model.parameters()) == 869_504
    output = model(**Text(batch=2).step(0))
    assert output.loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_the_model_sees_no_future() -> None:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(width=32, hidden=64, layers=2, max_length=16)).eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] += 1
    before, after = model(tokens).logits, model(changed % 256).logits
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])
