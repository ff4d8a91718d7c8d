"""One rank of one run: `python -m benchmarks.endurance.rank SPEC.json`, started by `benchmarks.endurance.alike`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

import zeroweave as zw
from benchmarks.models import SHAPES, build
from benchmarks.peers.common import Options
from benchmarks.peers.zeroweave import configuration

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
"""Of these processes: the same sums in the same order, in each run."""
RATE = 1e-4
TOLD = 200
"""Steps between two lines of rank 0."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What is trained. `lengths` of the sequences come in turn; `watch`: see `Record`; `more`: of the config."""

    model: str
    stage: int
    graphs: bool
    lengths: tuple[int, ...]
    micro_batch: int
    steps: int
    watch: int
    loop: Literal["train_step", "plain"]
    lower: Literal["inductor", "aot_eager", "none"]
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """What came of it on one rank.

    `graphed`: calls that were launched as graphs. `late`: compiled calls after step `watch` that were not. `ungraphed`:
    the reasons. `reserved`: bytes after step `watch`. `growth`: how many more there were after a later step. Both are
    None without a GPU.
    """

    losses: list[float]
    graphed: int
    late: int
    ungraphed: dict[str, int]
    reserved: int | None
    growth: int | None


def tokens_of(spec: Spec, rank: int, device: torch.device) -> Iterator[Tensor]:
    generator = torch.Generator(device=device).manual_seed(1234 + rank)
    vocabulary = SHAPES[spec.model].vocabulary
    for step in range(spec.steps):
        shape = spec.micro_batch, spec.lengths[step % len(spec.lengths)]
        yield torch.randint(0, vocabulary, shape, device=device, generator=generator)


def plain_calls(engine: zw.Engine) -> int:
    """Compiled forwards and backwards that were not launched as graphs."""
    stats = engine.stats
    return 2 * stats.compiled_calls - stats.graphed_calls


def train(spec: Spec, device: torch.device) -> Record:
    """The host may run ahead of the device: losses are read at the end."""
    cuda, rank = device.type == "cuda", dist.get_rank()
    model = build(SHAPES[spec.model], device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    options = Options(lower=spec.lower, zeroweave=spec.more)
    config = configuration(spec.stage, ("graphs",) if spec.graphs else (), options)
    losses = torch.zeros(spec.steps, device=device)
    reserved: list[int] = []
    """from step `watch` on"""
    late = 0
    with zw.initialize(model, optimizer, config) as engine:
        for index, tokens in enumerate(tokens_of(spec, rank, device)):
            if spec.loop == "train_step":
                loss = engine.train_step((tokens, tokens))
            else:
                loss = engine(tokens, tokens)
                engine.backward(loss)
                engine.step()
            losses[index].copy_(loss.detach())
            if index + 1 == spec.watch:
                late = plain_calls(engine)
            if cuda and index + 1 >= spec.watch:
                reserved.append(torch.cuda.memory_reserved(device))
            if rank == 0 and (index + 1) % TOLD == 0:
                print(f"step {index + 1}: loss {float(losses[index]):.4f}", flush=True)
        stats = engine.stats
        return Record(
            losses=losses.tolist(),
            graphed=stats.graphed_calls,
            late=plain_calls(engine) - late,
            ungraphed=stats.ungraphed_calls,
            reserved=reserved[0] if cuda else None,
            growth=max(reserved) - reserved[0] if cuda else None,
        )


def main() -> None:
    path = Path(sys.argv[1])
    spec = Spec(**json.loads(path.read_text()))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    # Memory that nobody has written is read by nobody: to fill it would only take time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        record = train(spec, device)
        written = path.parent / f"rank{dist.get_rank()}.partial"
        written.write_text(json.dumps(asdict(record)))
        written.rename(written.with_suffix(".json"))  # the parent never reads half a record
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
