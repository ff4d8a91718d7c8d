"""Exported models are those of transformers, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zeroweave as zw
from tests.distributed.checkpoint.runs import differing
from tests.support.harness import Pools
from tests.support.marks import MODES

pytestmark = pytest.mark.matrix

IDS = torch.arange(2 * 7).view(2, 7) % 32


def llama(tied: bool, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=tied
    )
    return LlamaForCausalLM(config).to(dtype)


def logits(folder: Path, dtype: str) -> Tensor:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        found: Tensor = model.eval()(IDS).logits
    return found


def exported(folder: Path, stage: int, tied: bool, shard_bytes: int, dtype: str | None) -> tuple[Tensor, list[str]]:
    """What the engine's own model says after a step, and what it says that is exported."""
    model = llama(tied)
    config = {"stage": stage, "compile": MODES["eager"], "deadline_seconds": 200.0}
    with zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), config) as engine:
        engine.train_step({"input_ids": IDS, "labels": IDS})
        state = {name: value.clone() for name, value in engine.state_dict().items()}
        if dtype is None:
            engine.export(folder / "model", shard_bytes=shard_bytes)
        else:
            engine.export(folder / "model", dtype=getattr(torch, dtype), shard_bytes=shard_bytes)
        with pytest.raises(zw.CheckpointError, match=r"model was not exported: .*is there already"):
            engine.export(folder / "model")
        engine.train_step({"input_ids": IDS, "labels": IDS})
    if engine.rank:
        return torch.zeros(0), []
    plain = llama(tied)
    plain.load_state_dict(state)
    if dtype is not None:
        plain.to(getattr(torch, dtype))
    with torch.no_grad():
        return plain.eval()(IDS).logits, sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("stage", "tied", "shard_bytes", "dtype"),
    [
        (3, True, 4000, None),
        *((stage, tied, size, None) for stage in (1, 2, 3) for tied in (False, True) for size in (1, 1 << 30)),
        (3, False, 4000, "bfloat16"),
    ],
)
def test_from_pretrained_gives_the_same_logits(
    pools: Pools, tmp_path: Path, stage: int, tied: bool, shard_bytes: int, dtype: str | None
) -> None:
    (expected, names), _ = pools(2).run(exported, tmp_path, stage, tied, shard_bytes, dtype)
    found = logits(tmp_path / "model", dtype or "auto")
    assert differing(expected, found) == []
    assert {"config.json", "generation_config.json"} <= set(names)
    files = [name for name in names if name.endswith(".safetensors")]
    assert (len(files) == 1) == (shard_bytes == 1 << 30)
    if len(files) > 1:
        index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(files)


class Broken:
    """A config that cannot be saved."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise ValueError("it cannot be saved")


class Odd(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.config: Any = Broken()


def failing(folder: Path) -> None:
    model = Odd()
    with zw.initialize(model, torch.optim.SGD(model.parameters()), {"compile": MODES["eager"]}) as engine:
        for where, said in (
            ("model", "Broken.save_pretrained: ValueError: it cannot be saved"),
            ("file/deep", "File exists"),
        ):
            with pytest.raises(zw.CheckpointError, match=said) as caught:
                engine.export(folder / where)
            assert not hasattr(caught.value, "__notes__")
        for given, said in (
            ({"path": None}, "the folder of a checkpoint is None"),
            ({"dtype": "bfloat16"}, "the dtype of an export is 'bfloat16': pass a floating one, as torch.bfloat16 is"),
            ({"dtype": torch.int8}, "the dtype of an export is torch.int8"),
            ({"shard_bytes": "5GB"}, "shard_bytes of an export is '5GB': pass a number of bytes"),
            ({"shard_bytes": 0}, "shard_bytes of an export is 0"),
        ):
            with pytest.raises(zw.EngineError, match=said):
                engine.export(**{"path": folder / "model", **given})
        model.config = None
        engine.export(folder / "model")
        engine.train_step(torch.ones(1, 3), lambda y, _: y.sum())


def test_a_failure_leaves_nothing(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    pools(2).run(failing, tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "model", "model.safetensors"]
