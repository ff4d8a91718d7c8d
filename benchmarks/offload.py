"""What offload saves of a GPU's memory, and what it costs in time.

    python -m benchmarks.offload --model llama-1b --seq 2048 --micro-batch 4 --out DIR

Trains under ZeRO-3 in bfloat16, in one process for each GPU, with nothing offloaded, with all optimizer states (masters
and moments), with those that a budget of half the saved bytes has no room for, and with parameters as well. For each:
the step's time, the peak of what tensors take of the GPU and what the allocator keeps of it, and where the model's
state lies.

Exit code 1 unless, on a GPU, the peak falls by 0.9 × the moments with `all` and by 0.9 × masters and moments with
parameters as well, and stays within the budget with `adaptive`; and unless all losses are equal to two decimals.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroweave as zw
from benchmarks import launch
from benchmarks.exposed import synchronize, train
from benchmarks.models import SHAPES, batches, build

SHARE = 0.9
"""Of the states' bytes, that the peak has to fall by."""
MIB = 2**20
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": {"optimizer": "all"},
    "adaptive": {"optimizer": "adaptive"},
    "all + params": {"optimizer": "all", "params": True},
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--model", choices=sorted(SHAPES), default="llama-1b")
    p.add_argument("--seq", type=int, default=2048)
    p.add_argument("--micro-batch", type=int, default=4)
    p.add_argument("--gpus", type=int, default=None, help="processes; default: all GPUs, or 2 on the CPU")
    p.add_argument("--steps", type=int, default=6, help="steps that are timed together")
    p.add_argument("--rounds", type=int, default=2, help="how often; the median counts")
    p.add_argument("--warm", type=int, default=8, help="steps before them that are not; 5 at least for the budget")
    p.add_argument("--lower", choices=["inductor", "aot_eager"], default="inductor")
    p.add_argument("--out", type=Path, default=None, help="folder for offload.md")
    return p


def rank_main(rank: int, world: int, port: int, a: argparse.Namespace, result: str) -> None:
    """One rank; rank 0 writes the rows, of which each has the largest figures of all ranks, to `result`."""
    device = launch.join(rank, world, port)
    rows: list[dict[str, Any]] = []
    for name, offload in SETTINGS.items():
        if name == "adaptive":
            offload = {**offload, "memory_budget": budget(*rows)}
        mine: list[Any] = [None] * world
        dist.all_gather_object(mine, measured(name, offload, device, rank, a))
        rows.append({key: value if key == "name" else max(one[key] for one in mine) for key, value in mine[0].items()})
    if rank == 0:
        Path(result).write_text(json.dumps(rows))
    dist.destroy_process_group()


def budget(none: Mapping[str, Any], everything: Mapping[str, Any]) -> int:
    """Half of what is saved, above the peak with everything offloaded. On the CPU only the states themselves count."""
    key = "peak" if none["peak"] else "device"
    least = int(everything[key]) if none["peak"] else 0
    return least + (int(none[key]) - int(everything[key])) // 2


def measured(name: str, offload: dict[str, Any], device: torch.device, rank: int, a: argparse.Namespace) -> Any:
    cuda = device.type == "cuda"
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
    model = build(SHAPES[a.model], device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)
    # one schedule from the second step on, so that the budget is used soon
    config = {"stage": 3, "offload": offload, "compile": {"lower": a.lower, "prefetch": 1, "record_steps": 0}}
    with zw.initialize(model, optimizer, config) as engine:
        data = batches(SHAPES[a.model], a.micro_batch, a.seq, rank, device)
        train(engine, data, a.warm)
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = statistics.median(train(engine, data, a.steps) for _ in range(a.rounds))
        peak = torch.cuda.max_memory_allocated(device) if cuda else 0
        reserved = torch.cuda.max_memory_reserved(device) if cuda else 0
        tokens = next(data)
        loss = float(engine(tokens[:, :-1], tokens[:, 1:]).detach())
        memory = engine.stats.memory
        engine.zero_grad()
        synchronize(device)
    if rank == 0:
        print(f"{name}: {1e3 * seconds:.0f} ms, peak {peak / MIB:.0f} MiB", flush=True)
    return {
        "name": name,
        "seconds": seconds,
        "peak": peak,
        "reserved": reserved,
        "masters": memory.masters - memory.host_masters,
        "moments": memory.optimizer - memory.host_optimizer,
        "shards": memory.shards - memory.host_shards,
        "host_masters": memory.host_masters,
        "host_moments": memory.host_optimizer,
        "host_shards": memory.host_shards,
        "device": memory.device,
        "host": memory.host,
        "budget": offload.get("memory_budget", 0),
        "loss": loss,
    }


def states(row: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the moments, and of masters and moments, wherever they lie."""
    moments = row["moments"] + row["host_moments"]
    return moments, moments + row["masters"] + row["host_masters"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| offload | step ms | peak MiB | saved MiB | ÷ moments | ÷ masters + moments | reserved MiB "
        "| GPU: masters, moments, shards MiB | host: masters, moments, shards MiB | loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        saved = rows[0]["peak"] - r["peak"]
        here, there = (
            ", ".join(f"{r[where + what] / MIB:.0f}" for what in ("masters", "moments", "shards"))
            for where in ("", "host_")
        )
        lines.append(
            f"| {r['name']} | {1e3 * r['seconds']:.1f} | {r['peak'] / MIB:.0f} | {saved / MIB:.0f} "
            f"| {saved / states(r)[0]:.2f} | {saved / states(r)[1]:.2f} | {r['reserved'] / MIB:.0f} "
            f"| {here} | {there} | {r['loss']:.4f} |"
        )
    limit = next(r for r in rows if r["name"] == "adaptive")["budget"]
    return "\n".join([*lines, "", f"budget of adaptive: {limit / MIB:.0f} MiB"])


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What should hold and does not."""
    none, everything, adaptive, params = rows
    found = []
    if none["peak"]:
        for row, part, of in ((everything, 0, "moments"), (params, 1, "masters and moments")):
            least = SHARE * states(row)[part]
            if none["peak"] - row["peak"] < least:
                found.append(f"{row['name']}: the peak falls by less than {SHARE} × {of} ({least / MIB:.0f} MiB)")
        if adaptive["peak"] > adaptive["budget"]:
            found.append("adaptive: the peak is above the budget")
    if not everything["device"] < adaptive["device"] < none["device"]:
        found.append("adaptive: the bytes on the device are not between those of all and none")
    if any(abs(row["loss"] - none["loss"]) > 5e-3 for row in rows):
        found.append("the losses differ")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    world = a.gpus or torch.cuda.device_count() or 2
    rows = launch.spawned(rank_main, world, a)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    text = f"{a.model}, ZeRO-3, {world} × {device}, sequence {a.seq}, micro-batch {a.micro_batch}\n\n{table(rows)}"
    missed = problems(rows)
    text += "".join(f"\n* does not hold: {each}" for each in missed)
    print(text)
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
        (a.out / "offload.md").write_text(text + "\n")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
