"""Templates on a runtime whose flats are freed between calls: gradients equal to plain eager's."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.compile.comparing import WIDTH, Block, EarlyTranspose, Stack, agree, compare, gradients_of, loss_of, rows
from tests.compile.fakes import FakeHost
from tests.support.marks import slow
from tests.support.reference import ULP, Expected, Plain
from zeroweave.errors import EngineError, ParameterError

pytestmark = pytest.mark.oldest
both = pytest.mark.parametrize("lower", ["aot_eager", pytest.param("inductor", marks=pytest.mark.matrix)])


@slow("inductor")
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


@slow("inductor")
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
    reference, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    host = FakeHost(model, lower)
    for m in (reference, model):
        with host.hooks() if m is model else nullcontext(), torch.autocast("cpu", torch.bfloat16):
            y = m(rows())
        loss_of(y).backward()
    loss_of(exact(rows().double())).backward()
    sizes = {p.numel() for p in model.layers[0].parameters() if p.dim() == 2}
    saved = {t.numel() for t in host.activations}
    assert saved and not saved & sizes
    agree(gradients_of(host), Expected(*({n: p.grad for n, p in m.named_parameters()} for m in (reference, exact))))
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


@pytest.mark.matrix
@both
def test_lengths_become_dynamic(lower: str) -> None:
    model = Stack(Dropping if lower == "aot_eager" else Block, 2)
    plain = Plain(copy.deepcopy(model))
    host = FakeHost(model, lower)
    for length in (5, 7, 9, 5, 3):
        x = torch.randn(2, length, WIDTH)
        torch.manual_seed(length)
        plain.each(lambda net, x: loss_of(net(x)).backward(), x)
        torch.manual_seed(length)
        with host.hooks():
            y = model(x.requires_grad_())
        loss_of(y).backward()
    assert host.templates.graphs == 2
    agree(gradients_of(host), plain.gradients())
    assert host.settled()


@slow("inductor")
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
        assert ((g - 3 * once[place]).abs() <= ULP * g.abs()).all()  # one addition is rounded
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


@pytest.mark.matrix
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
    plain, exact = (x.sum(0).expand(WIDTH, WIDTH) + 2 for x in (rows(), rows().double()))
    agree({"weight": host.gradient("0.inner.weight")}, Expected({"weight": plain}, {"weight": exact}))


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


def statistics_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: b for name, b in model.named_buffers() if b.is_floating_point()}


def test_batch_norm_updates_its_buffers() -> None:
    model = Stack(Buffered, 2)
    plain = Plain(copy.deepcopy(model))
    compare(model, rows())
    plain.each(lambda net, x: net(x), rows())
    agree(statistics_of(model), Expected(*map(statistics_of, plain.nets)))
    assert [int(b) for n, b in model.named_buffers() if "tracked" in n] == [1, 1]
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


@pytest.mark.matrix
def test_a_second_engine_finds_inductors_cache_and_never_autograds() -> None:
    counters = torch._dynamo.utils.counters
    compare(Stack(), rows(), lower="inductor")
    before = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    compare(Stack(), rows(), lower="inductor")
    assert counters["inductor"]["fxgraph_cache_hit"] == before[0] + 2
    assert counters["inductor"]["fxgraph_cache_miss"] == before[1]
    assert not [key for key in counters["aot_autograd"] if key.startswith("autograd_cache")]


@pytest.mark.matrix
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
