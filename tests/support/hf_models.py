"""The zoo: transformers models built from a config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import Tensor, nn

from tests.support.zoo import VOCABULARY, Backward, Entry, huggingface, tokens
from zeroweave.eager import chunked_loss

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


def qwen3(**more: Any) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, **more))


def tied_qwen3() -> nn.Module:
    return qwen3(tie_word_embeddings=True)


def gpt2() -> nn.Module:
    """Its head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **tokens, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))


def in_chunks(call: Callable[..., Any], module: nn.Module, batch: Tensor, backward: Backward) -> Tensor:
    """Logits of five tokens at a time where the engine's `loss` is "chunked"; some tokens have no label."""
    labels = batch.clone()
    labels[0, :4] = -100
    with mock.patch.object(chunked_loss, "BYTES", 5 * 4 * VOCABULARY):
        loss: Tensor = call(input_ids=batch, labels=labels).loss
    backward(loss)
    return loss.detach()


CHUNKED = {"loss": "chunked"}

HF_MODELS = (
    Entry("hf_llama", llama, tokens, huggingface),
    Entry("hf_qwen3", qwen3, tokens, huggingface),
    Entry("hf_llama_chunked", llama, tokens, in_chunks, config=CHUNKED),
    Entry("hf_qwen3_tied_chunked", tied_qwen3, tokens, in_chunks, config=CHUNKED),
    Entry("hf_gpt2_chunked", gpt2, tokens, in_chunks, config=CHUNKED),
)
