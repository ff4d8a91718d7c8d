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

from tests.compile.comparing import WIDTH, Block, EarlyTranspose, Stack, agree, compare, gradients_of, loss_of, rows
from tests.compile.fakes import FakeHost
from tests.compile.template_models import (
    Adding,
    Broken,
    Buffered,
    Conditional,
    Convolution,
    Dropping,
    Fused,
    Inside,
    LanguageModel,
    Masked,
    Mixed,
    Shares,
    Transposed,
    TwoHeads,
    Writes,
)
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


def test_dropout_takes_eagers_random_numbers() -> None:
    compare(Stack(Dropping), rows())


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


@both
def test_an_embeddings_backward_uses_no_bucket(lower: str) -> None:
    host = compare(LanguageModel(), torch.tensor([[1, 4, 1], [2, 0, 10]]), lower=lower)
    assert host.entered[-1] == ("embedding", "backward", ())


def test_h_plus_w_of_equal_shape() -> None:
    host = compare(Stack(Adding, 2), rows())
    assert host.gradient("layers.0.inner.weight") is None


@both
def test_two_heads_with_one_gradient_node(lower: str) -> None:
    compare(Stack(TwoHeads, 2), rows(), lower=lower)


def test_an_early_transpose_holds_its_bucket_forward_and_backward() -> None:
    host = compare(EarlyTranspose(), rows())
    forward = [e for e in host.entered if e[1] == "forward"]
    assert forward == [("layers.1", "forward", (0,)), ("layers.2", "forward", (0,))]
    assert [uses for _, phase, uses in host.entered if phase == "backward"] == [(0, 2), (0, 1), (0,)]


@both
def test_a_chunked_fused_weight(lower: str) -> None:
    compare(Stack(Fused, 2), rows(), lower=lower)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@both
def test_convolutions_deliver_contiguous_gradients(lower: str, memory: torch.memory_format) -> None:
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(3)).to(memory_format=memory)
    compare(Stack(Convolution, 2), x, lower=lower)


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


@pytest.mark.matrix
def test_cond_inside_a_block() -> None:
    compare(Stack(Conditional, 2), rows())
    model = Stack(lambda: Conditional(2), 2)
    FakeHost(model)
    with pytest.raises(ParameterError, match=r"share storage.*before or after"):
        model(rows())


def test_a_returned_parameter_gets_both_gradients() -> None:
    host = FakeHost(nn.ModuleList([Shares(), Shares()]))
    layer = host.model[0]
    with host.everything():
        y, w = layer(rows())
        (y.sum() + (w * 2).sum()).backward()
    plain, exact = (x.sum(0).expand(WIDTH, WIDTH) + 2 for x in (rows(), rows().double()))
    agree({"weight": host.gradient("0.inner.weight")}, Expected({"weight": plain}, {"weight": exact}))


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


# ---------------------------------------------------------------------- compile.activation_budget
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


@pytest.mark.matrix
@pytest.mark.parametrize("lower", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make", [Block, Dropping, Inside, WideDropout, OnlyElementwise])
def test_a_smaller_budget_saves_fewer_bytes_and_gives_equal_gradients(lower: str, make: type[nn.Module]) -> None:
    with torch._inductor.config.patch(fallback_random=True):  # the masks of eager
        saved, results = zip(*(step(make, lower, budget) for budget in BUDGETS), strict=True)
    expected = Expected(*plain_step(make))
    assert list(saved) == sorted(saved, reverse=True) and saved[0] > saved[-1], saved
    for own in results:
        agree(own, expected)
