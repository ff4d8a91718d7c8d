"""What the implementations train: the decoder of `benchmarks.models`, or transformers' own model of that shape.

Either may be frozen, with low-rank layers that are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Decoder, Shape, initialize_weights
from benchmarks.peers.common import Attention


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's modules in the groups that are sharded apart; `compiled` are the ones that are compiled."""

    embedding: nn.Module
    layers: Sequence[nn.Module]
    tail: list[nn.Module]
    compiled: Sequence[nn.Module]

    def groups(self) -> Iterator[list[nn.Parameter]]:
        """The parameters of each group, which have every parameter once."""
        for modules in ([self.embedding], *([layer] for layer in self.layers), self.tail):
            yield [parameter for module in modules for parameter in module.parameters()]


@dataclass(frozen=True, slots=True)
class Subject:
    """How to make the model of a shape, and how to call it; `hf` for transformers' own, and says how it attends.

    `lora` is the rank of the low-rank layers; 0: there are none, and everything is trained.
    """

    shape: Shape
    hf: Attention = ""
    lora: int = 0

    def on_meta(self, dtype: torch.dtype) -> nn.Module:
        """The model without values, in training mode. What is trained has `dtype`; what is frozen is bfloat16."""
        with torch.device("meta"):
            model = transformers_model(self.shape, self.hf, dtype) if self.hf else Decoder(self.shape).to(dtype)
            if self.lora:
                model.to(torch.bfloat16).requires_grad_(False)
                add_low_rank(self.parts(model).layers, self.lora, dtype)
        return model.train()

    def build(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """The model with its initial weights."""
        model = self.on_meta(dtype)
        self.materialize(model, device)
        return model

    def materialize(self, model: nn.Module, device: torch.device) -> None:
        """Gives a model from the meta device, sharded or not, its memory and its initial values."""
        model.to_empty(device=device)
        initialize_weights(model)
        if self.hf:
            initialize_rotary(model)

    def parts(self, model: Any) -> Parts:
        """transformers' final norm and head lie on different levels, and its loss is no module: neither is compiled."""
        if self.hf:
            inner = model.model
            return Parts(inner.embed_tokens, inner.layers, [inner.norm, model.lm_head], inner.layers)
        return Parts(model.embed, model.layers, [model.tail], [*model.layers, model.tail])

    def batch(self, tokens: Tensor) -> dict[str, Tensor]:
        """The arguments of a call that predicts `tokens`."""
        return {"input_ids" if self.hf else "tokens": tokens, "labels": tokens}

    def loss(self, output: Any) -> Tensor:
        loss: Tensor = output.loss if self.hf else output
        return loss


PROJECTIONS = ("query", "key", "value", "out", "q_proj", "k_proj", "v_proj", "o_proj")
"""The names of attention's projections, in our decoder and in transformers' models."""
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
"""The names of the other linear layers of a block, in transformers' models."""


class LowRank(nn.Module):
    """A frozen projection and the product of two trained matrices (LoRA with alpha of twice the rank, no dropout)."""

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + 2.0 * self.up(self.down(x))
        return result


def add_low_rank(
    layers: Sequence[nn.Module], rank: int, dtype: torch.dtype, names: Sequence[str] = PROJECTIONS
) -> None:
    """Gives each linear layer of these names a low-rank one, on the default device."""
    for layer in layers:
        for parent in [*layer.modules()]:
            for name, child in [*parent.named_children()]:
                if name in names and isinstance(child, nn.Linear):
                    setattr(parent, name, LowRank(child, rank, dtype))


def transformers_model(shape: Shape, attention: Attention, dtype: torch.dtype, tied: bool = False) -> nn.Module:
    """transformers' model of a shape, on the default device; `tied`: embedding and head are one parameter.

    Where no cache is used, transformers 4.57 makes an explicit causal mask, and SDPA loses its fast kernels by it.

    It makes none for an attention that it has no mask for, so that "causal" is SDPA by another name.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa_causal", sdpa_attention_forward)
    config = AutoConfig.for_model(
        shape.transformers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocabulary,
        max_position_embeddings=32768,
        rope_theta=1e6,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="sdpa_causal" if attention == "causal" else "sdpa"
    )
    return model


def initialize_rotary(model: Any) -> None:
    """Rotary frequencies are buffers that only the module's constructor fills."""
    for parent in [*model.modules()]:
        for name, module in [*parent.named_children()]:
            if hasattr(module, "inv_freq"):
                with module.inv_freq.device:
                    setattr(parent, name, type(module)(module.config))
