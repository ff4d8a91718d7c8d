"""Optimizers as users write them, to be told apart: element-wise ones and others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Update = Callable[["Plain", dict[str, Any], torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]


class Plain(torch.optim.Optimizer):
    """`p -= lr * update(...)`, with decay; what an update keeps is in the state."""

    def __init__(self, params: Any, lr: float = 0.02, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "beta": 0.9, "beta2": 0.99, **options})

    def update(self, group: dict[str, Any], p: torch.Tensor, g: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
        return g

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    s = self.state[p]
                    s["step"] = s.get("step", 0) + 1
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(self.update(group, p, p.grad, s), alpha=-group["lr"])


def moment(s: dict[str, Any], key: str, like: torch.Tensor) -> torch.Tensor:
    if key not in s:
        s[key] = torch.zeros_like(like)
    return s[key]


# ---------------------------------------------------------------------- element-wise
class OwnAdamW(Plain):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        m = moment(s, "m", g).lerp_(g, 1 - group["beta"])
        v = moment(s, "v", g).lerp_(g.square(), 1 - group["beta2"])
        return m / (1 - group["beta"] ** s["step"]) / ((v / (1 - group["beta2"] ** s["step"])).sqrt() + 1e-8)


class OwnMomentum(Plain):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        m = moment(s, "m", g).mul_(group["beta"]).add_(g)
        return g + group["beta"] * m if group.get("nesterov") else m


class OwnAdagrad(Plain):
    """Keeps state from the beginning."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.full_like(p, 0.1, requires_grad=False)

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        return g / s["sum"].add_(g.square()).sqrt()


class OwnRMSprop(Plain):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        mean, square = moment(s, "mean", g).lerp_(g, 0.1), moment(s, "square", g).lerp_(g.square(), 0.1)
        return g / ((square - mean.square()).clamp_min(0).sqrt() + 1e-3)


class OwnLion(Plain):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        m = moment(s, "m", g)
        sign = m.lerp(g, 1 - group["beta"]).sign()
        m.lerp_(g, 1 - group["beta2"])
        return sign


class OwnAdan(Plain):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        difference = g - s.get("previous", g)
        s["previous"] = g.clone()
        m, d = moment(s, "m", g).lerp_(g, 0.02), moment(s, "d", g).lerp_(difference, 0.08)
        n = moment(s, "n", g).lerp_((g + 0.92 * difference).square(), 0.01)
        return (m + 0.92 * d) / (n.sqrt() + 1e-8)


class ScheduleFree(Plain):
    """Averages beside what it trains, with weights that a group counts."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    z.add_(p.grad, alpha=-group["lr"])
                    p.lerp_(z, 1 / group["k"])


class SubAdam(torch.optim.Adam):
    """The user's own class, with a hook for the notes that it takes."""

    notes = 0

    def step(self, closure: Any = None) -> Any:
        self.notes += 1
        return super().step(closure)


class LookAhead(torch.optim.Optimizer):
    """Wraps another, whose groups and state it shares."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups, self.state = inner.param_groups, inner.state
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.count += 1
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            slow = self.state[p].setdefault("slow", p.detach().clone())
            if self.count % 5 == 0:
                p.copy_(slow.lerp_(p, 0.5))


class InFloat32(Plain):
    """Computes in float32 whatever the dtype."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        m = moment(s, "m", g.float()).lerp_(g.float(), 0.1)
        return (m.exp2().log1p().tanh() * m).to(p.dtype)


# ---------------------------------------------------------------------- others
class NormSGD(Plain):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        return g / (g.norm() + 1e-8)


class Orthogonal(Plain):
    """Muon as most people copy it: matrices by Newton-Schulz, everything else by SGD."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        if g.ndim == 2:
            g = g / (g.norm() + 1e-7)
            for _ in range(5):
                a = g @ g.T
                g = 3.4445 * g + (-4.775 * a + 2.0315 * a @ a) @ g
        return g


class TrustSGD(Plain):
    """LARS, with the usual exception for vectors."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        return g if p.ndim < 2 else g * (p.norm() / (g.norm() + 1e-8)).clamp(max=10)


class TrustAdam(OwnAdamW):
    """LAMB under another name."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        u = super().update(group, p, g, s)
        return u * (p.norm() / u.norm()) if group["beta"] else u


class Factored(Plain):
    """Rows and columns of large matrices only."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        if g.ndim == 2 and min(g.shape) >= 64:
            rows, columns = g.square().mean(1, keepdim=True), g.square().mean(0, keepdim=True)
            return g / (rows * columns / rows.mean()).sqrt().clamp_min(1e-8)
        return g / (moment(s, "v", g).lerp_(g.square(), 0.01).sqrt() + 1e-8)


class Clipping(OwnMomentum):
    """By the norm over each of its groups, inside the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 100.0)
        super().step()


class Centralized(OwnMomentum):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        return super().update(group, p, g - g.mean(tuple(range(1, g.ndim)), keepdim=True) if g.ndim > 1 else g, s)


class Cautious(OwnMomentum):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        u = super().update(group, p, g, s)
        mask = (u * g > 0).to(g.dtype)
        return u * mask / mask.mean().clamp_min(1e-3)


class FreeOfRates(OwnMomentum):
    """Grows its own step size, from what it sees of all parameters after the first step."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.d = 1e-3

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        m = super().update(group, p, g, s)
        u = m * self.d
        self.d = max(self.d, 1e-4 * m.norm().item())
        return u


class Seldom(OwnMomentum):
    """Does it every seventh step only."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        u = super().update(group, p, g, s)
        return u / u.norm() if s["step"] % 7 == 0 else u


class Blocks(Plain):
    """Keeps its moment in 8 bits, with one scale for 64 elements."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        if "codes" in s:
            m = (s["codes"].to(p.dtype) * s["scale"]).view(-1)[: g.numel()].view_as(g) * group["beta"] + g
        else:
            m = g
        blocks = nn.functional.pad(m.reshape(-1), (0, -m.numel() % 64)).view(-1, 64)
        s["scale"] = blocks.abs().amax(1, keepdim=True) / 127
        s["codes"] = (blocks / s["scale"]).nan_to_num().round().to(torch.int8)
        return m


class Flagged(Plain):
    """Treats parameters with an attribute in another way; fragments have none."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        return g.sign() if getattr(p, "by_sign", False) else g


class Noisy(Plain):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        return g + 0.01 * torch.randn_like(g)


class KeepsParameters(Plain):
    """Steps what it was given when it was made."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.own = list(params)
        super().__init__(self.own, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.own:
            if p.grad is not None:
                p.add_(p.grad, alpha=-self.param_groups[0]["lr"])


class MatricesOnly(Plain):
    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        if g.ndim < 2:
            raise ValueError("a vector")
        return g


class Locked(Plain):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.lock = threading.Lock()


class Waiting(Plain):
    """Begins after a thousand steps."""

    def update(self, group, p, g, s):  # type: ignore[no-untyped-def]
        return g if s["step"] > 1000 else torch.zeros_like(g)


class NeedsClosure(Plain):
    """Has a default, and does not do without."""

    def step(self, closure: Any = None) -> None:
        closure()
