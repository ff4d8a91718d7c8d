"""`compile.activation_budget`: fewer bytes saved, the same gradients, random numbers never drawn twice."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compile.comparing import WIDTH, Block, Stack, agree, loss_of
from tests.compile.fakes import FakeHost
from tests.compile.template_models import Dropping, Inside
from tests.support.reference import Expected, Plain

pytestmark = pytest.mark.oldest
BUDGETS = (1.0, 0.5, 0.05, 0.0)


class WideDropout(nn.Module):
    """Dropout of what a matrix product can only compute again with the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.up(x)), 0.25, self.training)
        return x + F.dropout(torch.sin(self.down(h)), 0.5, self.training)


class OnlyElementwise(nn.Module):
    """Nothing but its dropout may not be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.Sequential(nn.LayerNorm(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.sin(self.norm(x).exp() * self.scale), 0.3, self.training).cos()


def step(make: type[nn.Module], lower: str, budget: float) -> tuple[int, dict[str, Tensor | None]]:
    """The bytes that forwards save beside parameters, and all results of one step."""
    torch.manual_seed(0)
    model = Stack(make, 2)
    host = FakeHost(model, lower, activation_budget=budget)
    x = torch.randn(64, WIDTH).requires_grad_()
    torch.manual_seed(1)
    with host.hooks():
        y = model(x)
    loss_of(y).backward()
    assert host.settled()
    results = {name: host.gradient(name) for name, _ in model.named_parameters()}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in host.activations}
    return sum(storages.values()), {**results, "input": x.grad, "output": y.detach()}


def plain_step(make: type[nn.Module]) -> tuple[dict[str, Tensor | None], ...]:
    torch.manual_seed(0)
    plain = Plain(Stack(make, 2))
    x = torch.randn(64, WIDTH)
    torch.manual_seed(1)
    return plain.each(results_of, x)


def results_of(net: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    x = x.detach().requires_grad_()
    y = net(x)
    loss_of(y).backward()
    return {**{name: p.grad for name, p in net.named_parameters()}, "input": x.grad, "output": y.detach()}


MAKES = (Block, Dropping, Inside, WideDropout, OnlyElementwise)
ROWS = [
    *(pytest.param("aot_eager", make) for make in MAKES),
    *(pytest.param("inductor", make, marks=pytest.mark.matrix) for make in MAKES),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("lower", "make"), ROWS)
def test_a_smaller_budget_saves_fewer_bytes_and_gives_equal_gradients(lower: str, make: type[nn.Module]) -> None:
    with torch._inductor.config.patch(fallback_random=True):  # the masks of eager
        saved, results = zip(*(step(make, lower, budget) for budget in BUDGETS), strict=True)
    expected = Expected(*plain_step(make))
    assert list(saved) == sorted(saved, reverse=True) and saved[0] > saved[-1], saved
    for own in results:
        agree(own, expected)
