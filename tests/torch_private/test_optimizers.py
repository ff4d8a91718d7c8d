"""Who listens to an optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeroweave._torch.optimizers import has_step_hooks, is_step_replaced

pytestmark = pytest.mark.oldest


def test_who_listens_to_an_optimizer_is_seen() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not is_step_replaced(optimizer) and not has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    handle.remove()
    everywhere = register_optimizer_step_post_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    everywhere.remove()
    assert not has_step_hooks(optimizer)
    optimizer.step = lambda: None
    assert is_step_replaced(optimizer)
