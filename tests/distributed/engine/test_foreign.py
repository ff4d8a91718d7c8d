"""Adapters above quantized weights train as without an engine, are saved and resumed, on two ranks."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroweave as zw
from tests.support.foreign import Coarse, adapted, trained
from tests.support.harness import Pools
from tests.support.marks import MODES, daily
from zeroweave.errors import EngineError

STEPS = 3


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def engine_of(model: nn.Module, stage: int, mode: str) -> zw.Engine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.AdamW(trained(model), lr=0.05)
        return zw.initialize(model, optimizer, {"stage": stage, "compile": MODES[mode]})


def plain(model: nn.Module, steps: int) -> dict[str, torch.Tensor]:
    """The trained parameters of training with the batches of both ranks."""
    optimizer = torch.optim.AdamW(trained(model), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        both = [model(batch(step, rank)).square().mean() for rank in range(2)]
        torch.stack(both).mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def steps(engine: zw.Engine, first: int) -> None:
    for step in range(first, first + STEPS):
        engine.backward(engine(batch(step, engine.rank)).square().mean())
        engine.step()


def train(folder: Path, stage: int, mode: str) -> dict[str, Any]:
    model = adapted()
    expected = plain(copy.deepcopy(model), 2 * STEPS)
    with engine_of(model, stage, mode) as engine:
        steps(engine, 0)
        engine.save(folder)
        steps(engine, STEPS)
        templates, state = engine.stats.templates, {name: engine.full(name) for name in expected}
    with engine_of(adapted(), stage, mode) as engine:
        engine.load(folder)
        steps(engine, STEPS)
        resumed = {name: engine.full(name) for name in expected}
    return {
        "apart": max(float((state[name] - value).abs().max()) for name, value in expected.items()),
        "resumed": all(torch.equal(resumed[name], value) for name, value in state.items()),
        "compiled": templates > 0,
    }


@daily(("stage", "mode"), [(3, "eager")], [(2, "eager"), (2, "aot_eager"), (3, "aot_eager"), (1, "eager")])
def test_adapters_above_quantized_weights(pools: Pools, tmp_path: Path, stage: int, mode: str) -> None:
    for found in pools(2).run(train, tmp_path, stage, mode):
        assert found["apart"] < 1e-5 and found["resumed"] and found["compiled"] == (mode != "eager")


def differ() -> str:
    model = adapted()
    if dist.get_rank() == 1:
        old = model[1].base.weight
        model[1].base.weight = Coarse(old.data[:, :4].contiguous(), old.scale)
    with pytest.raises(EngineError) as told:
        engine_of(model, 3, "eager")
    return str(told.value)


def test_ranks_with_different_ones_are_told(pools: Pools) -> None:
    for message in pools(2).run(differ):
        assert "'1.base.weight'" in message and "[8, 4]" in message and "Coarse" in message


def quantized_llama(device: str) -> Any:
    """A small Llama in 4 bits, with PEFT's adapters: QLoRA."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    model = LlamaForCausalLM(config)
    for name, layer in [*model.model.named_modules()]:
        if isinstance(layer, nn.Linear):
            new = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            values = bnb.nn.Params4bit(layer.weight.detach().clone(), requires_grad=False, quant_type="nf4")
            new.weight = values.to(device)
            parent, _, leaf = name.rpartition(".")
            setattr(model.model.get_submodule(parent), leaf, new)
    model.is_loaded_in_4bit = True
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(1)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, adapters).to(device)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def qlora(folder: Path, stage: int, mode: str, device: str = "cpu") -> dict[str, Any]:
    model = quantized_llama(device)
    reference = quantized_llama(device)
    optimizer = torch.optim.AdamW(trained(reference), lr=0.01)
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        both = [tokens(step, rank).to(device) for rank in range(2)]
        torch.stack([reference(t, labels=t).loss for t in both]).mean().backward()
        optimizer.step()
    expected = {name: p.detach() for name, p in reference.named_parameters() if p.requires_grad}

    def steps(engine: zw.Engine, first: int) -> None:
        for step in range(first, first + STEPS):
            ids = tokens(step, engine.rank).to(device)
            engine.backward(engine(ids, labels=ids).loss)
            engine.step()

    def made(model: nn.Module) -> zw.Engine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = torch.optim.AdamW(trained(model), lr=0.01)
            return zw.initialize(model, optimizer, {"stage": stage, "compile": MODES[mode]})

    with made(model) as engine:
        steps(engine, 0)
        engine.save(folder)
        steps(engine, STEPS)
        state, served = {name: engine.full(name) for name in expected}, engine.state_dict()
        own = {name for name, p in model.named_parameters(remove_duplicate=False) if type(p).__name__ != "Params4bit"}
        engine.load_state_dict(served)
    with made(quantized_llama(device)) as engine:
        engine.load(folder)
        steps(engine, STEPS)
        resumed = {name: engine.full(name) for name in expected}
    return {
        "apart": max(float((state[name] - value).abs().max()) for name, value in expected.items()),
        "served": engine.rank > 0 or served.keys() == own,
        "moved": max(float(value.abs().max()) for name, value in expected.items() if "lora_B" in name),
        "resumed": all(torch.equal(resumed[name], value) for name, value in state.items()),
    }


@pytest.mark.matrix
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [2, 3])
def test_qlora_of_peft_and_bitsandbytes(pools: Pools, tmp_path: Path, stage: int, mode: str) -> None:
    pytest.importorskip("bitsandbytes")
    for found in pools(2).run(qlora, tmp_path, stage, mode):
        assert found["apart"] < 1e-5 < found["moved"] and found["resumed"] and found["served"]
