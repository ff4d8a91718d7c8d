"""Cross-entropy in chunks of tokens: its numbers, what exists meanwhile, and which models cannot have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroweave as zw
from tests.support.zoo import WIDTH, Block, tokens
from zeroweave.eager import chunked_loss
from zeroweave.eager.chunked_loss import chunked_cross_entropy
from zeroweave.errors import EngineError

CLASSES = 40
"""No other tensor of these models has as many columns."""
TOKENS = 5
"""of a chunk, in these tests"""
Loss = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "BYTES", 4 * CLASSES * TOKENS)


# ---------------------------------------------------------------------- its numbers
def at_once(weight: Tensor, bias: Tensor | None, hidden: Tensor, labels: Tensor, ignored: int, mean: bool) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, ignore_index=ignored, reduction="mean" if mean else "sum")


def differentiated(loss: Loss, dtype: torch.dtype, labels: Tensor, mean: bool, biased: bool, ignored: int) -> Any:
    """The loss and its gradients, all in float64. Values are those that `dtype` has."""
    random = torch.Generator().manual_seed(0)
    sizes = ((CLASSES, WIDTH), (CLASSES,), (len(labels), WIDTH))
    values = [torch.randn(size, generator=random).bfloat16().to(dtype).requires_grad_() for size in sizes]
    weight, bias, hidden = values
    found = loss(weight, bias if biased else None, hidden, labels, ignored, mean)
    (3 * found).backward()
    return [found.detach().double(), *(each.grad.double() for each in values if each.grad is not None)]


def labels_of(kept: str) -> Tensor:
    labels = torch.randint(CLASSES, (13,), generator=torch.Generator().manual_seed(1))
    return {"all": labels, "some": labels.where(torch.arange(13) % 3 != 0, -100), "none": labels * 0 - 100}[kept]


@pytest.mark.parametrize("kept", ["all", "some", "none"])
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_loss_of_whole_logits(dtype: torch.dtype, biased: bool, mean: bool, kept: str) -> None:
    labels = labels_of(kept)
    exact = differentiated(at_once, torch.float64, labels, mean, biased, -100)
    whole = differentiated(at_once, dtype, labels, mean, biased, -100)
    found = differentiated(chunked_cross_entropy, dtype, labels, mean, biased, -100)
    assert len(found) == len(exact) == 3 + biased
    for index, (mine, theirs, truth) in enumerate(zip(found, whole, exact, strict=True)):
        if truth.isnan().any():
            assert kept == "none" and mean and index == 0 and mine.isnan()
            continue
        allowed = 2 * (theirs - truth).norm() + torch.finfo(dtype).eps * truth.norm()
        assert (mine - truth).norm() <= allowed, index


def test_a_label_that_is_ignored_may_be_a_class() -> None:
    labels = labels_of("all").where(torch.arange(13) % 3 != 0, 2)
    found, truth = (differentiated(f, torch.float64, labels, True, True, 2) for f in (chunked_cross_entropy, at_once))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, truth, strict=True))


def test_autocast_rounds_as_it_does_for_whole_logits() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found, whole = (
            differentiated(f, torch.float32, labels_of("some"), True, True, -100)
            for f in (chunked_cross_entropy, at_once)
        )
    assert torch.equal(found[0].float(), whole[0].float())
    for mine, theirs in zip(found, whole, strict=True):
        assert 0 <= (mine - theirs).norm() <= 2**-7 * theirs.norm()


def test_frozen_weights_get_no_gradient() -> None:
    weight, hidden = torch.randn(CLASSES, WIDTH), torch.randn(13, WIDTH, requires_grad=True)
    chunked_cross_entropy(weight, None, hidden, labels_of("all"), -100, True).backward()
    assert hidden.grad is not None and weight.grad is None


def test_a_second_backward_is_refused() -> None:
    hidden = torch.randn(13, WIDTH, requires_grad=True)
    loss = chunked_cross_entropy(torch.randn(CLASSES, WIDTH), None, hidden, labels_of("all"), -100, True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---------------------------------------------------------------------- in an engine
class Language(nn.Module):
    """A language model; `between` is what it does with its logits before the loss."""

    def __init__(self, between: Callable[[Any], Any] = lambda logits: logits, head: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = head or nn.Linear(WIDTH, CLASSES)
        self.between = between

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def logits(self, ids: Tensor) -> Any:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.between(self.head(h))

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Scores(Language):
    """Returns its logits."""

    def forward(self, ids: Tensor) -> Any:
        return self.logits(ids)


def started(model: nn.Module, **config: Any) -> zw.Engine:
    settings = {"compile": {"enabled": False}, **config}
    return zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), settings)


def trained(model: nn.Module, step: Callable[[zw.Engine, Tensor], Tensor], **config: Any) -> list[Tensor]:
    """The losses of three steps, and the parameters after them."""
    with started(model, **config) as engine:
        losses = [step(engine, tokens(0, index)) for index in range(3)]
        with engine.full_parameters() as full:
            return [torch.stack(losses), *(p.detach().clone() for p in full.values())]


OFFLOADED = {"activations": True, "activations_threshold_bytes": 16}


def whole() -> list[Tensor]:
    return trained(Language(), lambda engine, ids: engine.train_step(ids))


def own_loop(engine: zw.Engine, ids: Tensor) -> Tensor:
    logits = engine(ids)
    loss = F.cross_entropy(logits[:, :-1, :].reshape(-1, logits.size(-1)).float(), ids[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    return loss.detach()


def by_function(logits: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, logits.shape[-1]), ids[:, 1:].flatten())


WAYS: dict[str, Callable[[], list[Tensor]]] = {
    "one step": lambda: trained(Language(), lambda engine, ids: engine.train_step(ids, loss="chunked")),
    "config": lambda: trained(Language(), lambda engine, ids: engine.train_step(ids), loss="chunked"),
    "offloaded": lambda: trained(
        Language(), lambda engine, ids: engine.train_step(ids), loss="chunked", offload=OFFLOADED
    ),
    "own loop": lambda: trained(Scores(), own_loop, loss="chunked"),
    "function": lambda: trained(Scores(), lambda engine, ids: engine.train_step(ids, by_function), loss="chunked"),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_with_whole_logits(way: str) -> None:
    found, expected = WAYS[way](), whole()
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))


class Largest(TorchDispatchMode):
    """The most rows of a tensor with a column for each class, beside the transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        made = isinstance(out, Tensor) and function is not torch.ops.aten.t.default
        if made and out.dim() and out.shape[-1] == CLASSES:
            self.found = max(self.found, out.numel() // CLASSES)
        return out


@pytest.mark.parametrize(("loss", "largest"), [(None, 18), ("chunked", TOKENS)])
def test_no_more_than_a_chunk_of_logits_exists(loss: Any, largest: int) -> None:
    with started(Language(head=nn.Linear(WIDTH, CLASSES, bias=False))) as engine, Largest() as seen:
        engine.train_step(tokens(0, 0), loss)
    assert seen.found == largest


def test_without_gradients_logits_are_whole() -> None:
    ids = tokens(0, 0)
    expected = Scores().logits(ids).detach()
    with started(Scores(), loss="chunked") as engine, torch.no_grad():
        assert torch.equal(engine(ids), expected)


# ---------------------------------------------------------------------- what is refused
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "a scale": lambda logits: logits * 0.1,
    "a scale in front": lambda logits: torch.tensor(0.1) * logits,
    "a division": lambda logits: logits / 2,
    "a cap": lambda logits: 30 * torch.tanh(logits / 30),
    "a function": torch.tanh,
    "a number in front": lambda logits: 2.0 * logits,
    "in place": lambda logits: logits.mul_(2),
    "a bias": lambda logits: logits + torch.ones(CLASSES),
    "classes cut": lambda logits: logits[..., :20],
    "classes cut by two": lambda logits: logits[:, :, 1:],
    "a mask": lambda logits: logits[logits.shape[0] * [True]],
    "a list": lambda logits: torch.cat([logits, logits]),
    "flat classes": lambda logits: logits.flatten(),
    "another shape": lambda logits: logits.view(-1, 2),
    "classes in the middle": lambda logits: logits.transpose(1, 2),
    "weighed classes": lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens(0, 0).flatten(), torch.ones(40)),
    "smooth labels": lambda logits: F.cross_entropy(logits.flatten(0, 1), tokens(0, 0).flatten(), label_smoothing=0.1),
    "a loss of each token": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), tokens(0, 0).flatten(), reduction="none"
    ),
    "another loss": lambda logits: F.nll_loss(logits.flatten(0, 1), tokens(0, 0).flatten()),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_what_else_is_computed_with_logits_is_refused(what: str) -> None:
    with started(Language(COMPUTED[what])) as engine:
        with pytest.raises(EngineError, match=r"^\[ZW401\] loss 'chunked': Language .* leave loss 'chunked' out$"):
            engine.train_step(tokens(0, 0), "chunked")
        engine.module.between = lambda logits: logits
        expected = Language()(tokens(0, 0)).detach()  # what was refused has left nothing behind
        assert torch.allclose(engine.train_step(tokens(0, 0), "chunked"), expected, rtol=1e-6)


class Twice(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Module:
    head = nn.Linear(WIDTH, CLASSES)
    head.register_forward_hook(lambda *_: None)
    return head


def other_forward() -> nn.Module:
    head = nn.Linear(WIDTH, CLASSES)
    head.forward = lambda input: F.linear(input, 2 * head.weight)  # type: ignore[method-assign]
    return head


class Nameless(Language):
    def get_output_embeddings(self) -> Any:
        return None


def refusals() -> Iterator[Any]:
    yield pytest.param(lambda: Language(head=Twice(WIDTH, CLASSES)), {}, "Language has a Twice as", id="class")
    yield pytest.param(lambda: Language(head=hooked()), {}, "Language has hooks or another forward", id="hooks")
    yield pytest.param(lambda: Language(head=other_forward()), {}, "has hooks or another forward", id="forward")
    yield pytest.param(lambda: Block(), {}, r"Block.get_output_embeddings\(\) names no layer", id="no head")
    yield pytest.param(lambda: Nameless(), {}, r"Nameless.get_output_embeddings\(\) names no layer", id="no method")
    yield pytest.param(
        lambda: Language(), {"regions": ["head"]}, "let compile.regions name blocks that do not have it", id="compiled"
    )


@pytest.mark.parametrize(("build", "compiled", "says"), list(refusals()))
def test_a_head_that_is_not_known_is_refused_at_once(build: Any, compiled: Any, says: str) -> None:
    with pytest.raises(EngineError, match=says):
        started(build(), loss="chunked", compile={"enabled": False, **compiled})


def test_another_loss_than_there_is_is_told() -> None:
    with started(Language()) as engine:
        with pytest.raises(TypeError, match="loss='chunkd' in train_step"):
            engine.train_step(tokens(0, 0), "chunkd")  # type: ignore[arg-type]
        engine.zero_grad()
