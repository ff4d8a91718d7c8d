"""Models whose frames Dynamo cannot capture as a whole, in float64: what runs between their graphs is eager code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import utils
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zeroweave as zw

WIDTH, EXPERTS = 8, 3
PACKAGE = str(Path(zw.__file__).parent)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.silu(self.a(x)) * self.c(x))


class Mixture(nn.Module):
    """A mixture of experts that looks up by values which experts run. `kind`: what Dynamo has to stumble over more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gate = kind, nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Mlp() if "mlp" in kind else nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        h = x.view(-1, WIDTH)
        weights, chosen = self.gate(h).softmax(-1).topk(2)
        if "div" in self.kind:
            weights /= weights.sum(-1, keepdim=True)
        out = torch.zeros_like(h)
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for k in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            place, row = torch.where(mask[k].squeeze(0))
            rows = h[None, row].reshape(-1, WIDTH) if "none" in self.kind else h[row]
            out.index_add_(0, row, self.experts[k](rows) * weights[row, place, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Breaking(nn.Module):
    """A break between two layers, and one in a function that is called between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        for _ in range(int(x.detach().sum().abs() > -1)):
            x = self.second(x).tanh() * self.second.weight.mean()
        return x


class Checkpointed(nn.Module):
    """A checkpointed stretch that does another thing when it is computed again, with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trainable, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.again = 0

    def stretch(self, x: Tensor) -> Tensor:
        self.again += torch._C._current_graph_task_id() != -1
        x = self.trainable(torch.tanh(self.frozen(x)))
        torch.cos(x.detach())
        return x

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(True):
            x = checkpoint(self.stretch, x, use_reentrant=False)
        return self.head(torch.tanh(x))


class _Tiles(torch.autograd.Function):
    """A loss that differentiates its tiles in its own forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        total = hidden.new_zeros(())
        with torch.enable_grad():
            for h, t in zip(hidden.chunk(2), target.chunk(2), strict=True):
                loss = F.cross_entropy(h @ weight.T, t, reduction="sum") / len(target)
                loss.backward()
                total = total + loss.detach()
        ctx.save_for_backward(hidden.grad, weight.grad)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * gradient, by_weight * gradient, None


class Tiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(x[..., 0].numel()) % WIDTH
        return _Tiles.apply(self.body(x).view(-1, WIDTH), self.head.weight, target)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{kind: lambda kind=kind: Block(Mixture(kind)) for kind in ("mlp", "none", "mlp div")},
    "breaks": lambda: nn.Sequential(*(Block(Breaking()) for _ in range(2))),
    "checkpoint": Checkpointed,
    "tiles": Tiled,
}


def batches(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 4, WIDTH, dtype=torch.float64, generator=generator) for _ in range(count)]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def plainly_trained(model: nn.Module, inputs: list[Any], loss_of: Callable[[Any], Tensor]) -> dict[str, Tensor]:
    """The parameters of a copy of `model` that plain PyTorch has trained by SGD on `inputs`, a step each."""
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for batch in inputs:
        optimizer.zero_grad()
        loss_of(reference(**batch) if isinstance(batch, dict) else reference(batch)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in reference.named_parameters()}


@dataclass
class Frames:
    """(file, name) of each frame that Dynamo tried to compile."""

    all: list[tuple[str, str]] = field(default_factory=list)

    def of_package(self) -> set[tuple[str, str]]:
        """Without the functions that call regions: they are to be compiled."""
        return {f for f in self.all if f[0].startswith(PACKAGE) and not f[1].startswith("region_")}


@contextmanager
def counting_frames() -> Iterator[Frames]:
    """Dynamo keeps its last attempts; here, and from here on in this process, as many as any test makes."""
    torch._dynamo.reset()
    utils.set_compilation_metrics_limit(4096)
    utils.clear_compilation_metrics()
    frames = Frames()
    yield frames
    attempts = utils.get_compilation_metrics()
    assert len(attempts) < 4096
    frames.all += [(a.co_filename, a.co_name) for a in attempts if a.co_name is not None]
