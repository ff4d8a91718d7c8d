"""Checks of attention: does it take a fused kernel on this device, and do models of transformers let it?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Final

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from zeroweave.report.check import Check

FUSED: Final = {
    "FlashAttention": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
}


def attention(device: str, why_not: Callable[[SDPBackend], str | None]) -> Check:
    """Whether a fused kernel computes causal attention. `why_not`: what speaks against a backend; None: it works."""
    name, reasons = f"attention ({device})", []
    for kernel, backend in FUSED.items():
        if (reason := why_not(backend)) is None:
            return Check(name, "ok", f"{kernel} computes causal attention")
        reasons.append(reason)
    if "cuda" in device:
        cure = "pip install a PyTorch with FlashAttention, on a GPU of compute capability 8.0 or newer"
    else:
        cure = "pip install a PyTorch that is built with FlashAttention for this CPU"
    return Check(name, "slow", f"no fused kernel: all scores are held in memory ({reasons[0]})", cure)


def attempt(device: str, backend: SDPBackend) -> str | None:
    """What speaks against a backend for causal attention, forward and backward; None where it works."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(1, 2, 64, 64, device=device, dtype=dtype, requires_grad=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(backend):
                functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
        except RuntimeError as error:
            said = [str(each.message).split(" (Triggered")[0] for each in told]
            return next((each for each in said if not each.rstrip().endswith("because:")), str(error)).splitlines()[0]
    return None


class _Seen(TorchFunctionMode):
    """Notes for each attention whether it was given a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.masked: list[bool] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is functional.scaled_dot_product_attention:
            self.masked.append((args[3] if len(args) > 3 else given.get("attn_mask")) is not None)
        return func(*args, **given)


def masked(model: torch.nn.Module, **batch: Any) -> bool:
    """Does a forward give any `scaled_dot_product_attention` a mask, or not ask for it? FlashAttention takes none."""
    with torch.no_grad(), _Seen() as seen:
        model(**batch)
    return not seen.masked or any(seen.masked)


def masks(version: str, without: bool, ones: bool) -> Check:
    """Whether causal models of transformers keep the fast path where nothing is padded.

    `without`, `ones`: attention gets a mask where the batch has no `attention_mask`, and where it is all ones.
    """
    name, slow = f"attention of transformers {version}", "gets a mask that it does not need, and no FlashAttention"
    if without and ones:
        return Check(name, "slow", f"always {slow}", 'make the model with attn_implementation="flash_attention_2"')
    if without:
        cure = "put attention_mask=torch.ones_like(input_ids) into batches without padding"
        return Check(name, "slow", f"without an attention_mask in the batch it {slow}", cure)
    if ones:
        cure = "leave attention_mask out of batches without padding"
        return Check(name, "slow", f"with an attention_mask of ones it {slow}", cure)
    return Check(name, "ok", "gets no mask where nothing is padded")


def of_transformers() -> Check | None:
    """What a small Llama does; None without transformers."""
    if find_spec("transformers") is None:
        return None
    from transformers import LlamaConfig, LlamaForCausalLM, __version__

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=2, attn_implementation="sdpa", **sizes))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    batch = {"input_ids": tokens, "use_cache": False}
    ones = masked(model, **batch, attention_mask=torch.ones_like(tokens))
    return masks(__version__, masked(model, **batch), ones)
