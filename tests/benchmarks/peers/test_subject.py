"""Both models of a shape: of equal size, in parts that have every parameter once, and ready to be called."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.models import SHAPES
from benchmarks.peers.common import Attention
from benchmarks.peers.subject import Subject

CPU = torch.device("cpu")
HOW: tuple[Attention, ...] = ("", "causal")


@pytest.mark.parametrize("hf", HOW)
def test_parts_have_every_parameter_once(hf: Attention) -> None:
    subject = Subject(SHAPES["tiny"], hf)
    model = subject.build(CPU, torch.bfloat16)
    groups = [[id(p) for p in group] for group in subject.parts(model).groups()]
    assert len(groups) == 4, "embedding, two layers, tail"
    assert sorted(p for group in groups for p in group) == sorted(map(id, model.parameters()))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    tokens = torch.randint(0, 512, (2, 32))
    loss = subject.loss(model(**subject.batch(tokens)))
    assert abs(loss.item() - math.log(512)) < 0.2, "that of guessing"


def test_models_of_transformers_have_the_same_size() -> None:
    from transformers import LlamaForCausalLM, Qwen3ForCausalLM

    for name, kind in (("qwen3-8b", Qwen3ForCausalLM), ("llama-1b", LlamaForCausalLM)):
        ours, theirs = (Subject(SHAPES[name], hf).on_meta(torch.bfloat16) for hf in HOW)
        assert isinstance(theirs, kind) and not theirs.config.use_cache
        norms = sum(p.numel() for n, p in ours.named_parameters() if "query_norm" in n or "key_norm" in n)
        missing = norms if name == "llama-1b" else 0
        assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in ours.parameters()) - missing


def test_rotary_frequencies_are_those_of_the_config() -> None:
    subject = Subject(SHAPES["tiny"], hf="causal")
    model = subject.build(CPU, torch.bfloat16)
    for rotary in (m for m in model.modules() if hasattr(m, "inv_freq")):
        expected = 1e6 ** -(torch.arange(0, 16, 2) / 16)
        torch.testing.assert_close(rotary.inv_freq, expected)


def test_the_mask_is_left_out_or_made_with_the_same_loss() -> None:
    from transformers import __version__

    masks: list[bool] = []
    losses = []
    tokens = torch.randint(0, 512, (2, 32))
    for hf in ("causal", "masked"):
        subject = Subject(SHAPES["tiny"], hf)
        model = subject.build(CPU, torch.float32)
        first = subject.parts(model).layers[0]
        first.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"] is not None), with_kwargs=True
        )
        losses.append(subject.loss(model(**subject.batch(tokens))))
    assert masks == [False, __version__.startswith("4.")]  # 5 makes none where nothing is padded
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("hf", HOW)
def test_low_rank_layers_alone_are_trained(hf: Attention) -> None:
    subject = Subject(SHAPES["tiny"], hf, lora=4)
    model = subject.on_meta(torch.float32)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2, "two matrices for each projection of attention in two layers"
    assert all(".up." in name or ".down." in name for name in trained)
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    model = subject.build(CPU, torch.bfloat16)
    tokens = torch.randint(0, 512, (2, 32))
    subject.loss(model(**subject.batch(tokens))).backward()  # type: ignore[no-untyped-call]
    assert all((p.grad is not None and bool(p.grad.any())) is p.requires_grad for p in model.parameters())
