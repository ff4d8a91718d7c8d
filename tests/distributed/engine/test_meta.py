"""Models that were made on the meta device train as others do, from files, a function, or themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroweave as zw
from tests.support.harness import Pool
from tests.support.marks import MODES, daily


def llama(device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=31,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(engine: zw.Engine) -> tuple[list[float], dict[str, Tensor]]:
    tokens = (torch.arange(24).view(2, 12) * (engine.rank + 1)) % 31
    losses = [engine.train_step({"input_ids": tokens, "labels": tokens}).item() for _ in range(3)]
    values = engine.state_dict()
    engine.destroy()
    return losses, values


def same(one: tuple[list[float], dict[str, Tensor]], two: tuple[list[float], dict[str, Tensor]]) -> bool:
    return (
        one[0] == two[0] and one[1].keys() == two[1].keys() and all(map(torch.equal, one[1].values(), two[1].values()))
    )


def starts(folder: str, stage: int, mode: str) -> list[bool]:
    config = {"stage": stage, "compile": MODES[mode]}
    usual = llama("cpu")
    values = dict(usual.state_dict())
    if torch.distributed.get_rank() == 0:
        usual.save_pretrained(folder, max_shard_size="8KB")
    torch.distributed.barrier()
    expected = train(zw.initialize(usual, adamw, config))

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(values[name])

    return [
        same(expected, train(zw.initialize(llama("meta"), adamw, config, weights=folder))),
        same(expected, train(zw.initialize(llama("meta"), adamw, config, weights=fill))),
        same(expected, train(zw.load_pretrained(folder, config, adamw))),
    ]


@daily(("stage", "mode"), [(3, "eager")], [(1, "eager"), (2, "aot_eager"), (3, "aot_eager")])
def test_meta_models_train_as_others(pools: Callable[[int], Pool], tmp_path: Path, stage: int, mode: str) -> None:
    for found in pools(2).run(starts, str(tmp_path / "model"), stage, mode):
        assert found == [True] * 3


def initialised_alike() -> list[float]:
    engine = zw.initialize(llama("meta"), adamw, {"compile": MODES["eager"]})
    values = engine.full_parameters()
    with values as parameters:
        return [float(p.double().sum()) for p in parameters.values()]


def test_modules_initialise_themselves_on_rank_0(pools: Callable[[int], Pool]) -> None:
    first, second = pools(2).run(initialised_alike)
    assert first == second and len({*first}) > 5
