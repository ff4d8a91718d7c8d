"""Small models of many families in transformers, as they are built there: sharded, beside plain training."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

pytest.importorskip("accelerate", minversion="1.15", reason="transformers' Trainer needs accelerate")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

import zeroweave as zw
from tests.distributed.integrations.trainers import apart
from tests.support.harness import Pools
from tests.support.reference import average

pytestmark = pytest.mark.matrix

STEPS = 5
"""Behind the second one a schedule is followed."""
IDS = 96
"""Token ids, of which the first few mean something to transformers."""
SIZES = {
    1: "n_group topk_group n_shared_experts first_k_dense_replace num_hidden_groups bos_token_id n_groups",
    2: "encoder_layers decoder_layers num_key_value_heads num_experts_per_tok eos_token_id expansion_ratio mlp_ratio",
    3: "num_hidden_layers n_layer n_layers num_layers",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_local_experts "
    "num_experts n_routed_experts",
    8: "rotary_dim qk_rope_head_dim qk_nope_head_dim v_head_dim head_dim d_kv state_size q_lora_rank kv_lora_rank",
    16: "sliding_window attention_window moe_intermediate_size shared_expert_intermediate_size",
    32: "hidden_size n_embd d_model embedding_size word_embed_proj_dim lru_width dim",
    48: "intermediate_size intermediate_size_mlp n_inner d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim hidden_dim",
    64: "max_position_embeddings n_positions max_seq_len",
    IDS: "vocab_size",
}
"""What is that large, by the names that configs have for it."""
NOISE = ("drop", "jitter")
"""Parts of the names of what is random, and is turned off: plain training would draw other numbers."""


@dataclass(frozen=True)
class Family:
    """`kind`: the class that builds it, without "AutoModelFor". `more`: of its config, beside `SIZES`."""

    name: str
    kind: str = "CausalLM"
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        made = transformers.CONFIG_MAPPING[self.name]
        usual = made()
        sizes = {name: size for size, names in SIZES.items() for name in names.split() if hasattr(usual, name)}
        config = made(**({} if self.kind == "ImageClassification" else sizes) | dict(self.more))
        for name, value in vars(config).items():
            if isinstance(value, float) and any(part in name for part in NOISE):
                setattr(config, name, 0.0)
        torch.manual_seed(0)
        return getattr(transformers, f"AutoModelFor{self.kind}").from_config(config).train()

    def batch(self, rank: int, step: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(1_000 * rank + step)
        if self.kind == "ImageClassification":
            images = torch.randn(2, 3, 32, 32, generator=random)
            return {"pixel_values": images, "labels": torch.randint(0, 2, (2,), generator=random)}
        ids = torch.randint(3, IDS, (2, 16), generator=random)
        return {"input_ids": ids, "labels": ids}


def family(name: str, kind: str = "CausalLM", **more: Any) -> Family:
    return Family(name, kind, tuple(more.items()))


_translator = partial(family, kind="Seq2SeqLM", decoder_start_token_id=0, pad_token_id=0)
_filler = partial(family, kind="MaskedLM")
_viewer = partial(family, kind="ImageClassification", image_size=32)
_SMALL_VIEWER = {"patch_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
FAMILIES = [
    *map(family, "gpt2 gptj opt bloom mpt phi gemma2 gemma3_text mistral qwen2_moe olmo2 olmoe granitemoe".split()),
    *map(family, "cohere2 stablelm nemotron glm4_moe gpt_oss llama4_text mamba minimax lfm2 phimoe".split()),
    family("deepseek_v3", num_key_value_heads=4),
    family("gpt_neo", attention_types=[[["global", "local", "global"], 1]]),
    *map(_translator, "t5 bart longt5 switch_transformers".split()),
    *map(_filler, "bert albert distilbert deberta-v2 electra roformer".split()),
    _filler("modernbert", pad_token_id=0),
    _viewer("vit", num_attention_heads=4, **_SMALL_VIEWER),
    _viewer("dinov2", num_attention_heads=4, **_SMALL_VIEWER),
    _viewer("swin", embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2, patch_size=4),
    _viewer("convnext", hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 2, 1]),
    _viewer("resnet", hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 2, 1], embedding_size=16),
]


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of parameters, and of buffers such as the statistics of a batch norm."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return {name: value.detach().clone() for name, value in (dict(model.named_parameters()) | buffers).items()}


def train_plain(chosen: Family, model: nn.Module) -> None:
    """Its gradients averaged over the ranks, before each update."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        model(**chosen.batch(dist.get_rank(), step)).loss.backward()
        average(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()


def trained(chosen: Family, config: dict[str, Any]) -> dict[str, Any]:
    model = chosen.build()
    start, plain = values(model), copy.deepcopy(model)
    train_plain(chosen, plain)
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.05), config) as engine:
        for step in range(STEPS):
            engine.backward(engine(**chosen.batch(dist.get_rank(), step)).loss)
            engine.step()
        stats = engine.stats
        with engine.full_parameters():
            found = values(engine.module)
    return {
        "apart": apart(found, values(plain)),
        "moved": apart(found, start),
        "eager": dict(stats.eager_regions),
        "compiled": stats.compiled_calls,
        "scheduled": engine.schedule is not None and not stats.departures,
    }


@pytest.mark.parametrize(
    "config",
    [{"stage": 3, "compile": {"lower": "aot_eager"}}, {"stage": 2, "compile": {"enabled": False}}],
    ids=["z3", "z2-eager"],
)
@pytest.mark.parametrize("chosen", FAMILIES, ids=str)
def test_a_family_trains_as_it_does_unsharded(pools: Pools, chosen: Family, config: dict[str, Any]) -> None:
    if chosen.name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {chosen}")
    for found in pools(2).run(trained, chosen, config):
        assert found["apart"] <= 1e-6 < 1e-4 < found["moved"]
        assert not found["eager"] and found["scheduled"]
        assert (found["compiled"] > 0) == (config["stage"] == 3)
