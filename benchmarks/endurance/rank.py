"""One rank of one run: `python -m benchmarks.endurance.rank SPEC.json`, started by `benchmarks.endurance.alike`."""

from __future__ import annotations

import json
import os
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroweave as zw
from benchmarks.models import SHAPES, build
from benchmarks.peers.common import Options
from benchmarks.peers.zeroweave import configuration

VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}
"""Of these processes: the same sums in the same order, in each run."""
RATE = 1e-4
TOLD = 200
"""Steps between two lines of rank 0."""
KEPT, EVALUATED, RAISED = 5, 50, 97
"""Of the busy loop: steps for which a hidden state is kept; steps between two evaluations, and between two errors."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What is trained. `lengths` of the sequences come in turn; `watch`: see `Record`; `more`: of the config.

    `loop`: the busy one is the plain one with evaluations, forwards that raise, and hidden states that are kept.
    """

    model: str
    stage: int
    graphs: bool
    lengths: tuple[int, ...]
    micro_batch: int
    steps: int
    watch: int
    loop: Literal["train_step", "plain", "busy"]
    lower: Literal["inductor", "aot_eager", "none"]
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """What came of it on one rank.

    `graphed`: calls that were launched as graphs. `late`: compiled calls after step `watch` that were not. `ungraphed`:
    the reasons. `reserved`: bytes after step `watch`. `growth`: how many more there were after a later step. Both are
    None without a GPU. `changed`: hidden states that changed while the busy loop kept them.
    """

    losses: list[float]
    graphed: int
    late: int
    ungraphed: dict[str, int]
    reserved: int | None
    growth: int | None
    changed: int = 0


class Stop(Exception):
    """What a forward of the busy loop raises."""


class Busy:
    """What a program does beside its training."""

    def __init__(self, model: nn.Module) -> None:
        self.changed = 0
        """kept tensors whose values are others than when they were made"""
        self._kept: deque[tuple[Tensor, Tensor]] = deque()
        self._raises = False
        *_, last = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        last[-1].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._raises:
            raise Stop
        self._kept.append((output, output.detach().clone()))

    def beside(self, engine: zw.Engine, index: int, tokens: Tensor) -> None:
        """Before step `index`."""
        while len(self._kept) > KEPT:
            output, copy = self._kept.popleft()
            self.changed += not torch.equal(output, copy)
        if index % EVALUATED == EVALUATED - 1:
            with torch.no_grad():
                engine(tokens, tokens)
        if index % RAISED == RAISED - 1:
            self._raises = True
            try:
                engine(tokens, tokens)
            except Stop:
                self._raises = False
                engine.zero_grad()


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
    busy = Busy(model) if spec.loop == "busy" else None
    with zw.initialize(model, optimizer, config) as engine:
        for index, tokens in enumerate(tokens_of(spec, rank, device)):
            if busy is not None:
                busy.beside(engine, index, tokens)
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
            changed=0 if busy is None else busy.changed,
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
