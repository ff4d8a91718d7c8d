"""What ranks do in the tests with Liger's kernels."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist

import zeroweave as zw
from tests.gpu.jobs import deterministic, join

STEPS, VOCABULARY = 8, 512


def small_qwen() -> Any:
    """A small Qwen3 with Liger's RMSNorm, rotary embedding, SwiGLU and fused linear cross-entropy."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    _apply_liger_kernel_to_instance(model=model)
    return model


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    start = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
    return ((start + 3 * torch.arange(64)) % VOCABULARY).to(device)


def by_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(stage: int, mode: str, checkpointing: bool) -> dict[str, Any]:
    """This rank's losses in float32, and those of plain PyTorch with Liger on the batches of all ranks."""
    device = join()
    torch.backends.cuda.matmul.allow_tf32 = False
    model = small_qwen()
    plain = copy.deepcopy(model).to(device)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer, expected = by_sgd(plain), []
    with deterministic():
        for step in range(STEPS):
            optimizer.zero_grad()
            for rank in range(dist.get_world_size()):
                ids = batch(step, rank, device)
                loss = plain(input_ids=ids, labels=ids).loss
                (loss / dist.get_world_size()).backward()
                if rank == dist.get_rank():
                    expected.append(float(loss.detach()))
            optimizer.step()
        compiled = {"enabled": False} if mode == "eager" else {"lower": mode}
        with zw.initialize(model, by_sgd(model), {"stage": stage, "compile": compiled}) as engine:
            losses = []
            for step in range(STEPS):
                ids = batch(step, dist.get_rank(), device)
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            stats, state = engine.stats, engine.state_dict()
    weights = dict(plain.named_parameters())
    apart = [float((state[name].to(device) - p.detach()).abs().max()) for name, p in weights.items() if name in state]
    return {
        "losses": losses,
        "expected": expected,
        "apart": max(apart, default=0.0),
        "compiled": stats.compiled_calls,
        "eager": dict(stats.eager_regions),
    }
