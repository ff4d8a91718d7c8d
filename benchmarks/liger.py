"""transformers models with and without Liger's kernels, under zeroweave and in plain PyTorch, on one GPU.

    python -m benchmarks.liger --families qwen3 llama gemma --steps 60

Each model has the published shapes of its family's small member with a few layers, in bfloat16 with float32 masters.
`plain+liger` is an eager loop with masters of its own; `zw` and `zw+liger` train the same model on the same batches.
Printed are the median time of a step after the first ten, the peak of allocated memory, and how far losses are from
those of `plain+liger`, next to how far apart `plain` (without Liger's kernels) is.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import zeroweave as zw

ROWS, TOKENS, BATCHES, WARM = 2, 2048, 4, 10


def configs(layers: int) -> dict[str, Callable[[], Any]]:
    """Models by family, built on the current default device."""
    import transformers as T

    def of(config: Any, model: Any, **shape: Any) -> Callable[[], Any]:
        return lambda: model(config(num_hidden_layers=layers, use_cache=False, **shape))

    one = {"hidden_size": 2048, "num_key_value_heads": 8, "tie_word_embeddings": True}
    return {
        "qwen3": of(
            T.Qwen3Config,
            T.Qwen3ForCausalLM,
            **one,
            vocab_size=151936,
            intermediate_size=6144,
            num_attention_heads=16,
            head_dim=128,
        ),
        "llama": of(
            T.LlamaConfig,
            T.LlamaForCausalLM,
            **one,
            vocab_size=128256,
            intermediate_size=8192,
            num_attention_heads=32,
        ),
        "gemma": of(
            T.Gemma3TextConfig,
            T.Gemma3ForCausalLM,
            vocab_size=262144,
            hidden_size=1152,
            intermediate_size=6912,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
        ),
    }


def batch(step: int, vocabulary: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step % BATCHES)
    return torch.randint(3, vocabulary, (ROWS, TOKENS), generator=generator).to(device)


def plain_step(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """AdamW over float32 masters of a bfloat16 model."""
    weights = list(model.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=weights[0].is_cuda)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for master, p in zip(masters, weights, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
                p.grad = None
            optimizer.step()
            for master, p in zip(masters, weights, strict=True):
                p.copy_(master)
        return loss.detach()

    return step


def engine_step(engine: zw.Engine) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def run(arm: str, build: Callable[[], Any], steps: int, device: torch.device, lower: str) -> dict[str, Any]:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    with device:
        model = build().to(torch.bfloat16)
    if arm.endswith("liger"):
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    engine: zw.Engine | None = None
    if arm.startswith("zw"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
        engine = zw.initialize(model, optimizer, {"stage": 3, "compile": {"lower": lower}})
        step = engine_step(engine)
    else:
        step = plain_step(model)
    losses, times = [], []
    for index in range(steps):
        ids = batch(index, model.config.vocab_size, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        losses.append(float(step(ids)))
        times.append(time.perf_counter() - begin)
        if index == WARM and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    eager = {} if engine is None else dict(engine.stats.eager_regions)
    if engine is not None:
        engine.destroy(optimizer_state=False)
    return {"losses": losses, "ms": 1000 * median(times[WARM:]), "peak": peak, "eager": eager}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", default=["qwen3", "llama", "gemma"])
    parser.add_argument("--arms", nargs="+", default=["plain+liger", "plain", "zw", "zw+liger"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lower", default="inductor")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for family in asked.families:
        build, first = configs(asked.layers)[family], None
        for arm in asked.arms:
            found = run(arm, build, asked.steps, device, asked.lower)
            first = first or found["losses"]
            apart = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], first, strict=True))
            print(
                f"{family:6} {arm:12} {found['ms']:7.1f} ms  peak {found['peak']:5.2f} GiB  "
                f"loss {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}, "
                f"at most {apart:.1e} from {asked.arms[0]}  {found['eager'] or ''}",
                flush=True,
            )


if __name__ == "__main__":
    main()
