"""Templates on a runtime whose flats are freed between calls: gradients equal to plain eager's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compile.fakes import FakeHost
from zeroweave.errors import EngineError, ParameterError

WIDTH = 16
pytestmark = pytest.mark.oldest
both = pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.matrix)])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks between an embedding stack and a head; `way` is a form of checkpointing."""

    def __init__(self, make: Callable[[], nn.Module] = Block, count: int = 3, way: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(count)])
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.way == "reentrant") if self.way else layer(x)
        return x


def loss_of(y: Any) -> Tensor:
    outputs = y if isinstance(y, tuple) else (y,)
    return sum(out.float().square().mean() * (i + 1) for i, out in enumerate(outputs))  # type: ignore[return-value]


def compare(
    model: nn.Module,
    *inputs: Tensor,
    lower: str = "aot_eager",
) -> FakeHost:
    """One step, eager and compiled: output, input gradients and parameter gradients must be equal."""
    tolerance = 1e-6 if lower == "aot_eager" else 1e-5
    reference = copy.deepcopy(model)
    host = FakeHost(model, lower)
    if isinstance(model, EarlyTranspose):
        model.resident = host.everything
    results = []
    for m in (reference, model):
        torch.manual_seed(1)
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        with host.hooks() if m is model else nullcontext():
            y = m(*leaves)
        loss_of(y).backward()
        results.append((y, [x.grad for x in leaves]))
    (y, grads), (own_y, own_grads) = results
    close(own_y, y, tolerance)
    for own, expected in zip(own_grads, grads, strict=True):
        close(own, expected, tolerance)
    for name, p in reference.named_parameters():
        close(host.gradient(name), p.grad, tolerance, name)
    assert host.settled() and host.ran == host.templates.calls > 0
    return host


def close(own: Any, expected: Any, tolerance: float, name: str = "") -> None:
    if isinstance(expected, tuple):
        for a, b in zip(own, expected, strict=True):
            close(a, b, tolerance, name)
    elif expected is None:
        assert own is None, name
    else:
        assert own is not None, f"no gradient for {name}"
        assert own.shape == expected.shape and own.dtype == expected.dtype
        error = (own - expected).float().norm() / expected.float().norm().clamp_min(1e-6)
        assert error <= tolerance, f"{name}: {error}"


def rows(count: int = 5) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_equal_blocks_share_one_template(lower: str) -> None:
    host = compare(Stack(), rows(), lower=lower)
    assert (host.templates.graphs, host.templates.templates, host.ran) == (1, 2, 6)
    assert host.entered == [(f"layers.{i}", "backward", (i,)) for i in (2, 1, 0)]
    assert all(p.grad is None for p in host.model.parameters())


def test_tied_parameters_in_two_blocks() -> None:
    model = Stack()
    model.layers[2].up.weight = model.layers[0].up.weight
    host = compare(model, rows())
    assert [uses for _, _, uses in host.entered] == [(0, 2), (1,), (0,)]
    assert [name for name, _, _ in host.entered] == ["layers.2", "layers.1", "layers.0"]


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.dropout(self.up(self.norm(x)), 0.25, self.training)), 0.5, self.training)


def test_dropout_takes_eagers_random_numbers() -> None:
    compare(Stack(Dropping), rows())


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x * self.inner.weight.sum(), 0.5, self.training)


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_a_recomputed_mask_is_the_same_mask(lower: str) -> None:
    model = nn.Sequential(Masked(), Masked())
    host = FakeHost(model, lower)
    x = torch.ones(40, WIDTH, requires_grad=True)
    y = model[0](x)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0) and 0 < (y == 0).float().mean() < 1
    assert host.settled()


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, WIDTH), nn.Embedding(7, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x


@both
def test_an_embeddings_backward_uses_no_bucket(lower: str) -> None:
    host = compare(LanguageModel(), torch.tensor([[1, 4, 1], [2, 0, 10]]), lower=lower)
    assert host.entered[-1] == ("embedding", "backward", ())


class Adding(nn.Module):
    """The gradient of both parameters and of the input is one tensor: the output's own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.one, self.two = (nn.Parameter(torch.randn(5, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one + self.two


def test_h_plus_w_of_equal_shape() -> None:
    host = compare(Stack(Adding, 2), rows())
    assert host.gradient("layers.0.inner.weight") is None


class TwoHeads(nn.Module):
    """Two parameters whose gradient is one node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 6, bias=False), nn.Linear(WIDTH, 6, bias=False)
        self.out = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.first.weight + self.second.weight))


@both
def test_two_heads_with_one_gradient_node(lower: str) -> None:
    compare(Stack(TwoHeads, 2), rows(), lower=lower)


class TakesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return torch.tanh(self.inner(x)) @ other


class EarlyTranspose(nn.Module):
    """The first layer's weight, transposed early, is an argument of every later layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([TakesWeight() for _ in range(3)])
        self.resident: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        with self.resident():
            early = self.layers[0].inner.weight.t()
        for layer in self.layers:
            x = layer(x, early)
        return x


def test_an_early_transpose_holds_its_bucket_forward_and_backward() -> None:
    host = compare(EarlyTranspose(), rows())
    forward = [e for e in host.entered if e[1] == "forward"]
    assert forward == [("layers.1", "forward", (0,)), ("layers.2", "forward", (0,))]
    assert [uses for _, phase, uses in host.entered if phase == "backward"] == [(0, 2), (0, 1), (0,)]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv.weight.chunk(3)
        return x + self.out(F.linear(x, q) * torch.sigmoid(F.linear(x, k)) + F.linear(x, v) + self.qkv.bias[:1])


@both
def test_a_chunked_fused_weight(lower: str) -> None:
    compare(Stack(Fused, 2), rows(), lower=lower)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@both
def test_convolutions_deliver_contiguous_gradients(lower: str, memory: torch.memory_format) -> None:
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(3)).to(memory_format=memory)
    compare(Stack(Convolution, 2), x, lower=lower)


class Transposed(nn.Module):
    """`x @ w` has its gradient transposed in some formulations, `w.t()` certainly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.one, self.two = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.one) @ self.two.t() * self.inner.weight + self.one.t()[:5]


@both
def test_transposed_gradients_are_made_contiguous(lower: str) -> None:
    compare(Stack(Transposed, 2), rows(), lower=lower)


@both
def test_autocast_saves_nothing_computed_from_parameters_alone(lower: str) -> None:
    model = Stack()
    reference = copy.deepcopy(model)
    host = FakeHost(model, lower)
    for m in (reference, model):
        with host.hooks() if m is model else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            y = m(rows())
        loss_of(y).backward()
    sizes = {p.numel() for p in model.layers[0].parameters() if p.dim() == 2}
    saved = {t.numel() for t in host.activations}
    assert saved and not saved & sizes
    for name, p in reference.named_parameters():
        assert p.grad is not None
        close(host.gradient(name), p.grad, 2e-2, name)
    assert host.settled()


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.up(self.norm(x))[:, :WIDTH]
        torch._dynamo.graph_break()
        return x + self.down(torch.cat([x, x], -1))


def test_a_graph_break_inside_every_block() -> None:
    host = compare(Stack(Broken, 4), rows())
    assert (host.templates.graphs, host.ran) == (2, 16)
    assert [name for name, _, _ in host.entered] == [f"layers.{i}" for i in (3, 3, 2, 2, 1, 1, 0, 0)]


@both
def test_lengths_become_dynamic(lower: str) -> None:
    model = Stack(Dropping if lower == "aot_eager" else Block, 2)
    reference = copy.deepcopy(model)
    host = FakeHost(model, lower)
    for length in (5, 7, 9, 5, 3):
        for m in (reference, model):
            torch.manual_seed(length)
            with host.hooks() if m is model else nullcontext():
                y = m(torch.randn(2, length, WIDTH, requires_grad=True))
            loss_of(y).backward()
    assert host.templates.graphs == 2
    for name, p in reference.named_parameters():
        assert p.grad is not None
        close(host.gradient(name), p.grad, 1e-6 if lower == "aot_eager" else 1e-5, name)
    assert host.settled()


@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
def test_no_grad_in_train_mode_with_dropout(lower: str) -> None:
    model = Stack(Dropping, 2)
    host = FakeHost(model, lower)
    with torch.no_grad():
        y = model(rows())
    assert not y.requires_grad and host.ran == 2 and host.templates.templates == 1
    assert not host.expected and host.settled()


class Mixed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.norm.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x.double()).float())))


def test_frozen_and_trainable_parameters_and_two_types_in_one_block() -> None:
    host = compare(Stack(Mixed), rows())
    assert len(host.flats) == 9 and len(host.entered[0][2]) == 3
    assert host.gradient("layers.0.up.weight") is None


def test_frozen_blocks_pass_gradients_on() -> None:
    model = Stack()
    model.layers[1].requires_grad_(False)
    model.layers[2].requires_grad_(False)
    host = compare(model, rows())
    assert [e[0] for e in host.entered] == ["layers.2", "layers.1", "layers.0"]


@pytest.mark.parametrize("way", ["reentrant", "other"])
def test_checkpointed_blocks(way: str) -> None:
    compare(Stack(Dropping, way=way), rows())


class Inside(Block):
    def forward(self, x: Tensor) -> Tensor:
        def mlp(x: Tensor) -> Tensor:
            return self.down(F.dropout(F.gelu(self.up(x)), 0.5, self.training))

        return x + checkpoint(mlp, self.norm(x), use_reentrant=False)


def test_checkpointing_inside_a_block() -> None:
    compare(Stack(Inside), rows())


@both
def test_a_backward_may_run_twice(lower: str) -> None:
    model = Stack(count=2)
    host = FakeHost(model, lower)
    model(rows()).sum().backward()
    once = {place: g.clone() for place, g in host.gradients.items()}
    y = model(rows())
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    for place, g in host.gradients.items():
        assert torch.allclose(g, 3 * once[place], rtol=1e-5)
    assert set(host.expected.values()) == {-1}


class Conditional(Block):
    """One parameter is read in the branches; two parameters of a bucket share storage, which cond refuses."""

    def __init__(self, read: int = 1) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.up.weight, self.up.bias
        branch = (lambda t: t @ one.t()) if self.read == 1 else (lambda t: F.linear(t, one, two))
        return x + self.down(torch.cond(x.sum() > 0, branch, lambda t: torch.sin(branch(t)), (self.norm(x),)))


def test_cond_inside_a_block() -> None:
    compare(Stack(Conditional, 2), rows())
    model = Stack(lambda: Conditional(2), 2)
    FakeHost(model)
    with pytest.raises(ParameterError, match=r"share storage.*before or after"):
        model(rows())


class Shares(nn.Module):
    """A view of a parameter and a fresh output, both returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), self.inner.weight


def test_a_returned_parameter_gets_both_gradients() -> None:
    host = FakeHost(nn.ModuleList([Shares(), Shares()]))
    layer = host.model[0]
    with host.everything():
        y, w = layer(rows())
        (y.sum() + (w * 2).sum()).backward()
    expected = rows().sum(0).expand(WIDTH, WIDTH) + 2
    close(host.gradient("0.inner.weight"), expected.contiguous(), 1e-6)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


def test_batch_norm_updates_its_buffers() -> None:
    model = Stack(Buffered, 2)
    reference = copy.deepcopy(model)
    compare(model, rows())
    reference(rows())
    for (_, own), (_, expected) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.allclose(own, expected)
    with torch.no_grad():
        model(rows())


class Writes(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("grad", [True, False])
def test_a_graph_that_writes_to_a_parameter_is_refused_by_name(grad: bool) -> None:
    model = Stack(Writes)
    FakeHost(model)
    with torch.set_grad_enabled(grad), pytest.raises(ParameterError, match=r"layers\.0\.up\.weight"):
        model(rows())


def test_a_second_engine_finds_inductors_cache_and_never_autograds() -> None:
    counters = torch._dynamo.utils.counters
    compare(Stack(), rows(), lower="inductor")
    before = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    compare(Stack(), rows(), lower="inductor")
    assert counters["inductor"]["fxgraph_cache_hit"] == before[0] + 2
    assert counters["inductor"]["fxgraph_cache_miss"] == before[1]
    assert not [key for key in counters["aot_autograd"] if key.startswith("autograd_cache")]


def test_a_closed_engine_is_forgotten() -> None:
    host = compare(Stack(Broken, 2), rows())  # its code belongs to the class, and with it what Dynamo compiled
    y = host.model(rows())
    host.templates.close()
    with pytest.raises(EngineError, match="destroyed"):
        y.sum().backward()
    gone = weakref.ref(host)
    del host, y
    gc.collect()
    assert gone() is None


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.manual_seed(0)
    yield
