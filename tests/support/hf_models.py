"""The zoo: transformers models built from a config."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.support.zoo import VOCABULARY, Entry, huggingface, tokens

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))


HF_MODELS = (
    Entry("hf_llama", llama, tokens, huggingface),
    Entry("hf_qwen3", qwen3, tokens, huggingface),
)
