"""A language model's loss in chunks of tokens, beside the same engine's with whole logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.distributed.engine.test_reads_by_losses import Counts, counted
from tests.eager.test_chunked_loss import Language
from tests.support.harness import Pools
from tests.support.hf_models import gpt2, in_chunks, llama, tied_qwen3
from tests.support.marks import MODES, daily
from tests.support.zoo import tokens

pytest.importorskip("transformers")


def adapted() -> nn.Module:
    """Adapters on attention; the head is frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))  # type: ignore[arg-type]


def frozen_head() -> nn.Module:
    model: Any = llama()
    model.lm_head.requires_grad_(False)
    return model


BUILD: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "tied": tied_qwen3,
    "gpt2": gpt2,
    "adapted": adapted,
    "frozen": frozen_head,
}
DTYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": {"params": "bfloat16"}},
    "autocast": {"precision": {"autocast": "bfloat16"}},
}


class Trained(NamedTuple):
    """Losses of all micro-steps, and the first step's gradients."""

    losses: Tensor
    gradients: dict[str, Tensor]


def trained(name: str, stage: int, mode: str, gas: int, dtype: str, loss: str | None) -> Trained:
    torch.manual_seed(0)
    model = BUILD[name]()
    config = {
        **DTYPES[dtype],
        "stage": stage,
        "gradient_accumulation_steps": gas,
        "compile": {**MODES[mode], "keep": "none"},
        "loss": loss,
    }
    trains = [p for p in model.parameters() if p.requires_grad]
    losses, first = [], {}
    with zw.initialize(model, torch.optim.AdamW(trains, lr=1e-3), config) as engine:
        for index in range(3 * gas):
            losses.append(in_chunks(engine, model, tokens(engine.rank, index), engine.backward))
            if index == gas - 1:
                first = {key: each for key, each in engine.gradients().items() if each is not None}
            engine.step()
    return Trained(torch.stack(losses).float(), first)


def both(*how: Any) -> tuple[Trained, Trained]:
    return trained(*how, "chunked"), trained(*how, None)


@daily(
    ("name", "stage", "mode", "gas", "dtype"),
    [("llama", 3, "eager", 2, "float32")],
    [
        ("llama", 3, "aot_eager", 2, "float32"),
        *((name, stage, "eager", 1, "float32") for name in ("adapted", "frozen") for stage in (1, 2, 3)),
        ("adapted", 3, "aot_eager", 2, "float32"),
        *(("tied", stage, "aot_eager", 2, dtype) for stage in (1, 2, 3) for dtype in ("bfloat16", "autocast")),
        *((name, 3, "eager", 1, dtype) for name in ("llama", "gpt2") for dtype in ("bfloat16", "autocast")),
    ],
)
def test_it_trains_as_with_whole_logits(pools: Pools, name: str, stage: int, mode: str, gas: int, dtype: str) -> None:
    if name == "adapted":
        pytest.importorskip("peft")
    # In 16 bits, several roundings of a gradient; the losses are float32 of equal logits until those drift apart.
    allowed = 1e-5 if dtype == "float32" else 2**-5
    for chunked, whole in pools(2).run(both, name, stage, mode, gas, dtype):
        assert torch.allclose(chunked.losses[0], whole.losses[0], rtol=1e-6)
        assert torch.allclose(chunked.losses, whole.losses, rtol=1e-5 if dtype == "float32" else 1e-3)
        assert chunked.gradients.keys() == whole.gradients.keys()
        for key, expected in whole.gradients.items():
            assert (chunked.gradients[key] - expected).norm() <= allowed * expected.norm(), key


def counts(mode: str, gas: int, loss: str | None) -> Counts:
    model = Language()
    config = {
        "stage": 3,
        "gradient_accumulation_steps": gas,
        "compile": {**MODES[mode], "prefetch": 1, "keep": "none"},
        "loss": loss,
    }
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine:
        for index in range(4 * gas):
            engine.train_step(tokens(engine.rank, index))
        return counted(engine.executed, engine)


@pytest.mark.parametrize("gas", [1, pytest.param(3, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("mode", ["aot_eager", pytest.param("eager", marks=pytest.mark.matrix)])
def test_the_head_is_gathered_and_reduced_once(pools: Pools, mode: str, gas: int) -> None:
    for found in pools(2).run(counts, mode, gas, "chunked"):
        assert found["head"] == (gas, gas)
        assert {reductions for _, reductions in found.values()} == {gas}
