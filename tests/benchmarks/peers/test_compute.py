"""The floor's optimizer step is AdamW's, over one rank's share of the parameters."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.peers.common import LEARNING_RATE
from benchmarks.peers.compute import Group, adamw


def test_the_update_is_that_of_the_optimizer() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(8, 4))
    ours = nn.Parameter(parameter.detach().to(torch.bfloat16))
    parameter.data.copy_(ours)
    group = Group.of([ours], rank=1, world=2)
    optimizer = torch.optim.AdamW([parameter], lr=LEARNING_RATE)
    for count in range(1, 6):
        ours.grad = torch.randn(8, 4).to(torch.bfloat16)
        parameter.grad = ours.grad.float()
        optimizer.step()
        state = (group.weights, group.masters, group.means, group.squares)
        adamw(*state, group.gradients(), torch.tensor(float(count)))
        assert ours.grad is None
    (master,) = group.masters
    torch.testing.assert_close(master, parameter.detach().view(-1)[16:], rtol=0, atol=1e-7)
    assert torch.equal(ours.view(-1)[16:], master.to(torch.bfloat16)), "the model computes with what was trained"
