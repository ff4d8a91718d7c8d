"""What the doctor says of attention: kernels that are there or not, and models that are in their way."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend

from zeroweave.report.attention import attempt, attention, masked, masks, of_transformers


class Attention(nn.Module):
    """As models call it: with a mask, positional or by name, or without."""

    def forward(self, query: torch.Tensor, mask: torch.Tensor | None = None, by_name: bool = True) -> torch.Tensor:
        attend = functional.scaled_dot_product_attention
        if by_name:
            return attend(query, query, query, attn_mask=mask, is_causal=mask is None)
        return attend(query, query, query, mask)


def test_the_first_kernel_that_works_is_named() -> None:
    asked = []

    def why_not(backend: SDPBackend) -> str | None:
        asked.append(backend)
        return None if backend == SDPBackend.CUDNN_ATTENTION else "not built"

    check = attention("cuda", why_not)
    assert (check.state, check.detail) == ("ok", "cuDNN computes causal attention")
    assert asked == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize(("device", "cure"), [("cuda", "compute capability 8.0"), ("cpu", "for this CPU")])
def test_a_device_without_a_fused_kernel(device: str, cure: str) -> None:
    check = attention(device, lambda backend: f"{backend.name} is not built")
    assert check.state == "slow" and "(FLASH_ATTENTION is not built)" in check.detail
    assert cure in check.cure


def test_kernels_are_tried_out() -> None:
    assert attempt("cpu", SDPBackend.MATH) is None
    assert "No viable backend" in (attempt("cpu", SDPBackend.CUDNN_ATTENTION) or "")


def test_a_mask_is_seen() -> None:
    model, query, mask = Attention(), torch.ones(1, 1, 4, 4), torch.ones(4, 4, dtype=torch.bool)
    assert not masked(model, query=query)
    assert masked(model, query=query, mask=mask)
    assert masked(model, query=query, mask=mask, by_name=False)
    assert not masked(model, query=query, by_name=False)
    assert masked(nn.Identity(), input=query), "attention of some other way"


@pytest.mark.parametrize(
    ("without", "ones", "state", "cure"),
    [
        (False, False, "ok", ""),
        (True, False, "slow", "put attention_mask=torch.ones_like(input_ids) into batches without padding"),
        (False, True, "slow", "leave attention_mask out of batches without padding"),
        (True, True, "slow", 'make the model with attn_implementation="flash_attention_2"'),
    ],
)
def test_models_that_give_attention_a_mask(without: bool, ones: bool, state: str, cure: str) -> None:
    check = masks("4.57.1", without, ones)
    assert (check.name, check.state, check.cure) == ("attention of transformers 4.57.1", state, cure)


@pytest.mark.matrix
def test_transformers_as_it_is_installed() -> None:
    check = of_transformers()
    assert check is not None and check.name.startswith("attention of transformers ")
