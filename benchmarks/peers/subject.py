"""What the implementations train: the decoder of `benchmarks.models`, or transformers' own model of that shape."""

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
    """How to make the model of a shape, and how to call it; `hf` for transformers' own, and says how it attends."""

    shape: Shape
    hf: Attention = ""

    def on_meta(self, dtype: torch.dtype) -> nn.Module:
        """The model without values, in training mode."""
        with torch.device("meta"):
            model = transformers_model(self.shape, self.hf, dtype) if self.hf else Decoder(self.shape).to(dtype)
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
