"""Fine-tuning of transformers' models on one GPU: zeroweave beside plain PyTorch, with and without Liger's kernels.

    python -m benchmarks.one_gpu --size qwen3-1.7b --rows 2 --length 2048 --arms plain zw zw+graphs

Models have the published shapes and random weights. The loop is the ordinary one: forward, backward, step. Arms:

    plain       bfloat16 weights and states, each layer compiled, fused AdamW
    plain+fp32  float32 weights and states, autocast to bfloat16, each layer compiled, fused AdamW
    masters     bfloat16 weights, float32 masters, nothing compiled
    deepspeed   ZeRO-2, each layer compiled, states in host memory and updated there
    zw          zeroweave: bfloat16 weights, float32 masters

`+liger` patches the model with Liger's kernels; name arms with it last, since it patches classes as well. `+norope`
leaves Liger's rotary embedding out, around which Liger 0.8.5 disables compilation. `+ligerloss` takes nothing but the
fused loss of it. `+chunked` is zeroweave's own loss without logits. `+graphs` turns on `compile.cuda_graphs`. `+whole`
compiles all layers as one. `+compact` keeps masters and moments in few bits. `+offload` keeps optimizer states in host
memory. `+budget` recomputes activations as `--activation-budget` says. `+lora` freezes the model and trains low-rank
layers of 16 beside all linear layers of its blocks.

A step ends when the stream of the computation is idle, and the next one begins. Offloaded states may still be on their
way to host memory then.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import zeroweave as zw
from benchmarks.models import SHAPES, Shape
from benchmarks.peers.subject import FEED_FORWARD, PROJECTIONS, add_low_rank, transformers_model

BATCHES = 4
GIB = 2**30
EXTRAS = ("liger", "ligerloss", "norope", "chunked", "graphs", "compact", "offload", "budget", "lora", "fp32", "whole")


SIZES = {
    "tiny": SHAPES["tiny"],
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-1.7b": Shape(2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, 151936),
    "qwen3-8b": SHAPES["qwen3-8b"],
    "qwen3-14b": SHAPES["qwen3-14b"],
    "qwen3-32b": Shape(5120, 25600, 64, 64, 8, 128, 151936),
    "llama-1b": SHAPES["llama-1b"],
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256, "llama"),
    "gemma3-1b": Shape(1152, 6912, 26, 4, 1, 256, 262144, "gemma3_text"),
}
TIED = ("tiny", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "llama-1b", "gemma3-1b")
"""Those whose embedding and head are one parameter."""


Step = Callable[[Sequence[Tensor]], Tensor]


def mlp_of(size: str) -> str:
    """What Liger calls its kernel for the feed-forward layers of a model."""
    return "geglu" if size.startswith("gemma") else "swiglu"


def trained(model: Any) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def plain_step(model: Any, rate: float, autocast: bool, whole: bool) -> Step:
    for module in [model.model] if whole else model.model.layers:
        module.compile()
    optimizer = torch.optim.AdamW(trained(model), lr=rate, fused=True)

    def step(batches: Sequence[Tensor]) -> Tensor:
        for ids in batches:
            with torch.autocast(ids.device.type, torch.bfloat16) if autocast else nullcontext():
                loss: Tensor = model(input_ids=ids, labels=ids).loss / len(batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() * len(batches)

    return step


def masters_step(model: Any, rate: float) -> Step:
    weights = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in weights]
    optimizer = torch.optim.AdamW(masters, lr=rate, fused=True)

    def step(batches: Sequence[Tensor]) -> Tensor:
        for ids in batches:
            loss: Tensor = model(input_ids=ids, labels=ids).loss / len(batches)
            loss.backward()
        with torch.no_grad():
            for master, p in zip(masters, weights, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
                p.grad = None
            optimizer.step()
            for master, p in zip(masters, weights, strict=True):
                p.copy_(master)
        return loss.detach() * len(batches)

    return step


def deepspeed_step(model: Any, rate: float, rows: int, gas: int) -> Step:
    import deepspeed

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29512", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    for layer in model.model.layers:
        layer.compile()
    offload = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": gas,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": rate}},
    }
    return engine_step(deepspeed.initialize(model=model, model_parameters=trained(model), config=config)[0])


def engine_of(model: Any, extras: Sequence[str], asked: argparse.Namespace) -> zw.Engine:
    config: dict[str, Any] = {
        "stage": 3,
        "gradient_accumulation_steps": asked.gas,
        "precision": {"params": "bfloat16"},
        "compile": {"lower": asked.lower, "cuda_graphs": "graphs" in extras},
    }
    if "whole" in extras:
        config["compile"]["regions"] = ["model"]
    if "budget" in extras:
        config["compile"]["activation_budget"] = asked.activation_budget
    if "chunked" in extras:
        config["loss"] = "chunked"
    if "compact" in extras:
        config["precision"]["optimizer"] = "compact"
    if "offload" in extras:
        config["offload"] = {"optimizer": "all"}
    return zw.initialize(model, torch.optim.AdamW(trained(model), lr=asked.rate, fused=True), config)


def engine_step(engine: Any) -> Step:
    """Of zeroweave's engine, or of DeepSpeed's."""

    def step(batches: Sequence[Tensor]) -> Tensor:
        for ids in batches:
            loss: Tensor = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return step


def profiled(step: Step, batches: Sequence[Tensor], most: int, steps: int = 3) -> str:
    """Kernels that take the most of a step: milliseconds and number in a step, and the name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step(batches)
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    lines = [
        f"  {e.self_device_time_total / 1000 / steps:8.2f} ms {e.count / steps:7.1f} x {e.key[:150]}" for e in found
    ]
    total = sum(event.self_device_time_total for event in found) / 1000 / steps
    return "\n".join(["", f"  {total:8.2f} ms in all kernels", *lines[:most]])


def run(arm: str, asked: argparse.Namespace, device: torch.device, tell: Callable[[dict[str, Any]], None]) -> None:
    """`tell` gets losses, milliseconds of a step (median), peak bytes of tensors and bytes of the device."""
    kind, *extras = arm.split("+")
    if kind not in ("plain", "masters", "deepspeed", "zw") or not set(extras) <= set(EXTRAS):
        raise SystemExit(f"--arms: there is no arm {arm!r}")
    cuda = device.type == "cuda"
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    torch.manual_seed(0)
    shape = SIZES[asked.size]
    shape = replace(shape, layers=asked.layers or shape.layers)
    dtype = torch.float32 if "fp32" in extras else torch.bfloat16
    with device:
        model: Any = transformers_model(shape, "masked", dtype, tied=asked.size in TIED)
        if "lora" in extras:
            model.requires_grad_(False)
            add_low_rank(model.model.layers, 16, dtype, (*PROJECTIONS, *FEED_FORWARD))
    model.train()
    if asked.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "liger" in extras or "ligerloss" in extras:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        without = ["rope"] if "norope" in extras else []
        if "ligerloss" in extras:
            without = ["rope", "rms_norm", mlp_of(asked.size)]
        _apply_liger_kernel_to_instance(model=model, **dict.fromkeys(without, False))
    engine = engine_of(model, extras, asked) if kind == "zw" else None
    if engine is not None:
        step = engine_step(engine)
    elif kind == "deepspeed":
        step = deepspeed_step(model, asked.rate, asked.rows, asked.gas)
    elif kind == "masters":
        step = masters_step(model, asked.rate)
    else:
        step = plain_step(model, asked.rate, "fp32" in extras, "whole" in extras)
    sizes = asked.gas, asked.rows, asked.length
    generators = [torch.Generator().manual_seed(index) for index in range(BATCHES)]
    data = [torch.randint(3, shape.vocabulary, sizes, generator=each).to(device).unbind() for each in generators]
    losses, times, begin = [], [], time.perf_counter()
    for index in range(asked.steps):
        loss = step(data[index % BATCHES])
        losses.append(float(loss))
        if cuda:
            torch.cuda.current_stream().synchronize()
        begin, before = time.perf_counter(), begin
        times.append(begin - before)
        if index == asked.warm and cuda:
            torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"losses": losses, "ms": 1000 * median(times[asked.warm :]), "told": ""}
    found["peak"], found["device"] = 0.0, 0.0
    if cuda:
        free, total = torch.cuda.mem_get_info()
        found["peak"], found["device"] = torch.cuda.max_memory_allocated() / GIB, (total - free) / GIB
    if engine is not None:
        stats = engine.stats
        found["told"] = f"{stats.graphed_calls} graphed {stats.ungraphed_calls or ''} {dict(stats.eager_regions) or ''}"
    if asked.profile and cuda:
        found["told"] += profiled(step, data[0], asked.profile)
    tell(found)
    if engine is not None:
        engine.destroy(optimizer_state=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="qwen3-1.7b")
    parser.add_argument("--layers", type=int, help="instead of the published number")
    parser.add_argument("--arms", nargs="+", default=["plain", "zw", "zw+graphs"])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--gas", type=int, default=1)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--activation-budget", type=float, default=0.6, help="of the arms with +budget")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warm", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--lower", default="inductor")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="behind each arm, the N longest kernels")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first: dict[str, Any] | None = None

    def tell(arm: str, found: dict[str, Any]) -> None:
        nonlocal first
        first = first or found
        tokens = asked.gas * asked.rows * asked.length / found["ms"] * 1000
        print(
            f"{asked.size} {arm:14} {found['ms']:8.1f} ms = {found['ms'] / first['ms']:.3f} x {asked.arms[0]}, "
            f"{tokens:.0f} tokens/s, peak {found['peak']:.2f} GiB, device {found['device']:.2f} GiB, "
            f"loss {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}  {found['told']}",
            flush=True,
        )

    for arm in asked.arms:
        run(arm, asked, device, partial(tell, arm))


if __name__ == "__main__":
    main()
