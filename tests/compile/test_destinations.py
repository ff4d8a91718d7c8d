"""Gradients that matmuls compute are written where the host wants them; others, and all values, are as ever."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from tests.compile.fakes import FakeHost
from tests.support.marks import daily
from zeroweave.compile.bind import Part
from zeroweave.layout import SlotKey


class Block(nn.Module):
    """Linear layers, one of which is used twice, a transposed and a plain weight, and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)
        self.twice = nn.Linear(width, width, bias=False)
        self.plain = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.twice(torch.relu(self.twice(x))) @ self.plain


class Model(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Lending(FakeHost):
    """Lends a place for every gradient that may be written, unless `lends` is off, and notes what came in its place."""

    lends = True

    def __init__(self, model: nn.Module, lower: str, **options: Any) -> None:
        self.places: dict[SlotKey, Tensor] = {}
        self.in_place: list[SlotKey] = []
        self.made: set[SlotKey] = set()
        super().__init__(model, lower, **options)

    def destinations(self, parts: list[SlotKey]) -> list[Tensor | None]:
        if not self.lends:
            return [None] * len(parts)
        for b, slot in parts:
            real = self.flats[b].real[slot]
            self.places[b, slot] = torch.full(real.shape, torch.nan, dtype=real.dtype, device=real.device)
        return [self.places[place] for place in parts]

    def deliver(self, announced: list[SlotKey], parts: list[Part], made: Set[SlotKey] = frozenset()) -> Set[SlotKey]:
        self.in_place += [(b, slot) for b, slot, gradient in parts if gradient is self.places.get((b, slot))]
        self.made |= made
        return super().deliver(announced, parts)


def gradients(host: Lending, x: Tensor, factor: float = 1.0) -> None:
    with host.everything(), host.hooks():
        loss = host.model(x).square().mean() * factor
    loss.backward()


def judge(lower: str, device: str, dtype: torch.dtype) -> None:
    """Trains a model with places for its gradients, without, and in plain PyTorch."""
    torch.manual_seed(0)
    model, x = Model().to(device, dtype), torch.randn(8, 5, 32, device=device, dtype=dtype)
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    host = Lending(model, lower)
    gradients(host, x)
    written = {name for name, place in host.place_of_name.items() if place in host.in_place}
    assert written == {f"layers.{i}.{name}" for i in range(2) for name in ("up.weight", "down.weight", "plain")}
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(host.gradient(name), p.grad)

    other = Lending(copy.deepcopy(plain), lower)
    other.lends = False
    gradients(other, x)
    for name, _ in plain.named_parameters():
        assert torch.equal(other.gradient(name), host.gradient(name)), name  # type: ignore[arg-type]
    assert not other.in_place


@daily("lower", ["aot_eager"], ["inductor"])
def test_matmuls_write_where_they_are_told_to(lower: str) -> None:
    judge(lower, "cpu", torch.float32)


class Adding(Lending):
    """Has a sum for every gradient but that of `up` in the second layer, and notes what was added to it."""

    def __init__(self, model: nn.Module, lower: str, dtype: torch.dtype | None = None, **options: Any) -> None:
        self.before: dict[SlotKey, Tensor] = {}
        self.dtype = dtype
        super().__init__(model, lower, **options)

    def sums(self, parts: list[SlotKey]) -> list[Tensor | None] | None:
        for b, slot in parts:
            real = self.flats[b].real[slot]
            if (b, slot) != self.place_of_name["layers.1.up.weight"]:
                self.places[b, slot] = 1e-2 * torch.randn_like(real.detach(), dtype=self.dtype)
                self.before[b, slot] = self.places[b, slot].clone()
        return [self.places.get(place) for place in parts]

    def deliver(self, announced: list[SlotKey], parts: list[Part], made: Set[SlotKey] = frozenset()) -> Set[SlotKey]:
        sums = {(b, slot): each for b, slot, each in parts if each is not None and each is self.places.get((b, slot))}
        self.in_place += sums
        self.gradients |= {place: each.clone() for place, each in sums.items()}
        return FakeHost.deliver(self, announced, [part for part in parts if part[:2] not in sums])


def judge_sums(lower: str, device: str, dtype: torch.dtype, sums: torch.dtype) -> None:
    """Trains a model whose matmuls add its gradients to sums, and in plain PyTorch; twice, as windows go on.

    Gradients that are not added to a sum have the bits of those of a compiled model without sums.
    """
    torch.manual_seed(0)
    model, x = Model().to(device, dtype), torch.randn(8, 5, 32, device=device, dtype=dtype)
    plain = copy.deepcopy(model)
    (plain(x).square().mean() * 1e5).backward()
    host, other = Adding(model, lower, sums), Lending(copy.deepcopy(plain), lower)
    other.lends = False
    gradients(other, x, 1e5)
    for _ in range(2):
        host.gradients.clear()
        host.in_place.clear()
        gradients(host, x, 1e5)
        added = {name for name, place in host.place_of_name.items() if place in host.in_place}
        names = ("up.weight", "down.weight", "plain")
        assert added == {f"layers.{i}.{name}" for i in range(2) for name in names} - {"layers.1.up.weight"}
        for name, p in plain.named_parameters():
            assert p.grad is not None
            before = host.before.get(host.place_of_name[name], torch.zeros_like(p))  # type: ignore[arg-type]
            gradient = host.gradient(name)
            assert gradient is not None and gradient.dtype == before.dtype
            if host.place_of_name[name] not in host.before:
                assert torch.equal(gradient, other.gradient(name)), name  # type: ignore[arg-type]
                continue
            most = float(p.grad.abs().max())
            rounding = 8 * torch.finfo(dtype).eps * most + 4 * torch.finfo(sums).eps * float(before.abs().max())
            assert float((gradient.double() - before.double() - p.grad).abs().max()) < rounding < most / 4, name


SUMS = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


@daily("lower", ["aot_eager"], ["inductor"])
@pytest.mark.parametrize(("dtype", "sums"), SUMS, ids=str)
def test_matmuls_add_to_what_they_are_told_to(lower: str, dtype: torch.dtype, sums: torch.dtype) -> None:
    judge_sums(lower, "cpu", dtype, sums)


class Losing(Block):
    """Computes a loss, where `alone`, or beside what it returns."""

    def __init__(self, width: int, alone: bool) -> None:
        super().__init__(width)
        self.alone = alone

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y.square().mean() if self.alone else (y, y.square().mean())


@pytest.mark.parametrize("alone", [True, False])
def test_a_backward_that_begins_with_the_loss_is_given_no_memory(alone: bool) -> None:
    """All activations are alive then: the step would need more at most."""
    torch.manual_seed(0)
    model = Model()
    model.layers = nn.ModuleList([Block(32), Block(32), Losing(32, alone)])
    host = Lending(model, "aot_eager")
    with host.everything(), host.hooks():
        result = host.model(torch.randn(8, 5, 32))
    (result if alone else result[0].sum() + result[1]).backward()
    written = {name.split(".")[1] for name, place in host.place_of_name.items() if place in host.in_place}
    assert written == ({"0", "1"} if alone else {"0", "1", "2"})


def test_a_backward_that_begins_with_the_loss_adds_to_what_is_there() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 5, 32)
    model.layers = nn.ModuleList([Losing(32, alone=True)])
    plain = copy.deepcopy(model)
    plain(x).backward()
    host = Adding(model, "aot_eager")
    host.place_of_name["layers.1.up.weight"] = None
    with host.everything(), host.hooks():
        result = host.model(x)
    result.backward()
    added = {name for name, place in host.place_of_name.items() if place in host.in_place}
    assert added == {"layers.0.up.weight", "layers.0.down.weight", "layers.0.plain"}
    for name in added:
        before = host.before[host.place_of_name[name]]  # type: ignore[index]
        torch.testing.assert_close(host.gradient(name), before + plain.get_parameter(name).grad)


class Mixed(nn.Module):
    """Gradients of every kind: of a table, a head, what is added (the output's own), twice used and rounded ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide = nn.Embedding(16, 32), nn.Embedding(16, 32)
        self.added, self.scale = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(32))
        self.one, self.other = nn.Parameter(torch.randn(4, 32)), nn.Parameter(torch.randn(4, 32))
        self.twice, self.head = nn.Parameter(torch.randn(32, 32)), nn.Linear(32, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.wide(tokens).to(torch.float32) + self.added + self.one + self.other
        x = torch.tanh(x * self.scale @ self.twice) @ self.twice
        out: Tensor = self.head(x)
        return out


class Added(nn.Module):
    """What it adds has the gradient of its output, which is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w


@daily("lower", ["aot_eager"], ["inductor"])
def test_which_gradients_are_memory_that_nobody_else_has(lower: str) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([Mixed(), Added()])  # type: ignore[assignment]
    model.layers[0].wide.to(torch.bfloat16)  # type: ignore[operator]
    model.forward = lambda tokens: model.layers[1](model.layers[0](tokens) @ torch.ones(8, 32))  # type: ignore[index,assignment]
    host = Lending(model, lower)
    host.lends = False
    with host.everything(), host.hooks():
        result = host.model(torch.randint(0, 16, (4,)))
    result.backward(torch.ones_like(result))
    made = {name for name, place in host.place_of_name.items() if place in host.made}
    assert made == {f"layers.0.{name}" for name in ("table.weight", "wide.weight")}  # the head's is written


class Matmuls(TorchDispatchMode):
    """Counts the matmuls that run while it is entered."""

    count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.zeroweave.matmul_into)  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


class Sum(nn.Module):
    """A product with two weights added, whose gradients are one matmul, and with another's transpose."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.randn(width, width) / width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ (self.first + self.second)) @ self.third.t()


@daily("lower", ["aot_eager"], ["inductor"])
def test_one_gradient_of_two_parameters_is_computed_once(lower: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(40, 32)
    model.layers = nn.ModuleList([Sum(32), Sum(32)])
    plain = copy.deepcopy(model)
    plain(x).square().mean().backward()
    host = Lending(model, lower)
    with host.everything(), host.hooks():
        loss = host.model(x).square().mean()
    with Matmuls() as matmuls:
        loss.backward()
    for name, p in plain.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(host.gradient(name), p.grad)
    assert matmuls.count == 7  # two for the weights and two for the inputs of each layer, none for the batch
    written = {name for name, place in host.place_of_name.items() if place in host.in_place}
    assert written == {f"layers.{i}.third" for i in range(2)}


@pytest.mark.matrix
def test_inductor_hands_a_matmul_what_is_transposed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")  # with it, Inductor refuses operators that could be decomposed
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, 5, 32)
    host = Lending(model, "inductor")
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(gradients, host, x)
    first = set(re.findall(r"matmul_into\.default\(\w+, (\w+\([^()]*(?:\([^()]*\)[^()]*)*\)|\w+),", "".join(codes)))
    transposed = {operand for operand in first if re.search(r"\(1, \d+\), 0\)$", operand)}
    assert len(first) == 3 and len(transposed) == 2, first  # `plain` is no transpose, and what it reads has been saved
