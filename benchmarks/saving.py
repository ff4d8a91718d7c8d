"""What a checkpoint costs: beside `safetensors.save_file` of the same bytes, and beside the steps that run under it.

    python -m benchmarks.saving --model llama-1b --seq 1024 --folder /dev/shm

Trains under ZeRO, and saves to a folder that should be in memory, so that no disk is measured: each rank's own bytes by
`safetensors.save_file`, all ranks at once; `engine.save`; and `engine.save(asynchronous=True)`, with the steps that run
until that checkpoint is there, between as many before and behind that run beside nothing. Of the ranks the slowest
counts, of the rounds the median.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import zeroweave as zw
from benchmarks import launch
from benchmarks.models import SHAPES, Decoder, batches, initial_value, parameter_count

GIB = 2**30
STATES = ("param", "exp_avg", "exp_avg_sq")
LIMITS = {"speed": 0.6, "blocks": 0.1, "slower": 1.05}
"""What `--check` asks for: at least of save_file's speed, at most of the save's time, at most of a step's."""


@dataclass(frozen=True)
class Found:
    """Seconds, by round, of the slowest rank; bytes of one rank.

    plain: `save_file`. here: `save`. blocks: `save(asynchronous=True)` until it returns. under: each step from there on
    until the checkpoint is there. alone: steps beside nothing, before and behind those.
    """

    device: str
    nbytes: int
    plain: list[float]
    here: list[float]
    blocks: list[float]
    alone: list[list[float]]
    under: list[list[float]]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--model", choices=sorted(SHAPES), default="small")
    p.add_argument("--seq", type=int, default=128)
    p.add_argument("--micro-batch", type=int, default=1)
    p.add_argument("--stage", type=int, choices=[1, 2, 3], default=3)
    p.add_argument("--gpus", type=int, default=None, help="processes; default: all GPUs, or 2 on the CPU")
    p.add_argument("--warm", type=int, default=10, help="first steps that are not counted")
    p.add_argument("--steps", type=int, default=10, help="that are timed beside nothing, twice a round")
    p.add_argument("--rounds", type=int, default=3, help="of each kind; the first warms up")
    p.add_argument("--lower", choices=["inductor", "aot_eager", "none"], default="inductor", help="none: eager")
    p.add_argument("--offload", choices=["none", "all"], default="none", help="the optimizer's states in host memory")
    p.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where checkpoints are written, and removed")
    p.add_argument("--out", type=Path, default=None, help="folder for saving.md")
    p.add_argument("--check", action="store_true", help="exit code 1 unless the limits hold")
    return p


class Rank:
    """One rank of the measurement."""

    def __init__(self, a: argparse.Namespace, device: torch.device) -> None:
        self.a, self.device, shape = a, device, SHAPES[a.model]
        with torch.device("meta"):
            model = Decoder(shape).to(torch.bfloat16)
        config = {
            "stage": a.stage,
            "compile": {"enabled": False} if a.lower == "none" else {"lower": a.lower},
            "offload": {"optimizer": a.offload},
        }

        def optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=1e-4)

        def fill(name: str, tensor: torch.Tensor) -> None:
            tensor.copy_(initial_value(name, tensor.shape, tensor.device))

        self.engine = zw.initialize(model, optimizer, config, weights=fill)
        self.batches = batches(shape, a.micro_batch, a.seq, self.engine.rank, device)
        self.folder = self._folder()

    def _folder(self) -> Path:
        made = [tempfile.mkdtemp(prefix="zeroweave-", dir=self.a.folder) if self.engine.rank == 0 else ""]
        dist.broadcast_object_list(made)
        return Path(made[0])

    def timed(self, job: Callable[[], object]) -> float:
        """Seconds of the slowest rank, with the device idle before and after."""
        self.wait()
        dist.barrier()
        begin = time.perf_counter()
        job()
        self.wait()
        return self.slowest(time.perf_counter() - begin)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, seconds: float) -> float:
        most = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(most)

    def step(self) -> float:
        tokens = next(self.batches)
        return self.timed(lambda: self.engine.train_step((tokens, tokens)))

    def several(self) -> list[float]:
        return [self.step() for _ in range(self.a.steps)]

    def plain(self) -> float:
        """`save_file` of what this rank has, one kind of state after the other: they need not lie there at once."""
        seconds = 0.0
        names = [name for name, _ in self.engine.module.named_parameters()]
        for what in STATES:
            held = {name: self.engine.local(name, what) for name in names}
            tensors = {name: tensor for name, tensor in held.items() if tensor is not None and tensor.numel()}
            path = self.folder / f"plain-{self.engine.rank}-{what}.safetensors"
            seconds += self.timed(partial(save_file, tensors, path))
            del held, tensors
            path.unlink()
        return seconds

    def here(self) -> float:
        seconds = self.timed(lambda: self.engine.save(self.folder, "here"))
        self.remove("here")
        return seconds

    def beside(self) -> tuple[float, list[float]]:
        blocks = self.timed(lambda: self.engine.save(self.folder, "beside", asynchronous=True))
        under = []
        while not self.there("beside"):
            under.append(self.step())
        self.remove("beside")
        return blocks, under

    def there(self, tag: str) -> bool:
        """Is the checkpoint there? By what rank 0 sees."""
        seen = [(self.folder / "latest").exists() and (self.folder / tag).exists()]
        dist.broadcast_object_list(seen)
        return bool(seen[0])

    def remove(self, tag: str) -> None:
        dist.barrier()
        if self.engine.rank == 0:
            shutil.rmtree(self.folder / tag)
            (self.folder / "latest").unlink()
        dist.barrier()

    def measure(self) -> Found:
        a = self.a
        for _ in range(a.warm):
            self.step()
        self.beside()  # the schedule has its `Stage`s from here on
        for _ in range(a.warm):
            self.step()
        nbytes = sum(self.engine.fragment(name).numel * 12 for name, _ in self.engine.module.named_parameters())
        plain = [self.plain() for _ in range(a.rounds)]
        here = [self.here() for _ in range(a.rounds)]
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        found = Found(name, nbytes, plain, here, [], [], [])
        for _ in range(a.rounds):
            before = self.several()
            blocks, under = self.beside()
            found.blocks.append(blocks)
            found.under.append(under)
            found.alone.append(before + self.several())
        return found


def rank_main(rank: int, world: int, port: int, a: argparse.Namespace, result: str) -> None:
    found = None
    one = Rank(a, launch.join(rank, world, port))
    try:
        found = one.measure()
    finally:
        if rank == 0:
            shutil.rmtree(one.folder, ignore_errors=True)
    one.engine.destroy(optimizer_state=False)
    if rank == 0:
        Path(result).write_text(json.dumps(asdict(found)))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Figures:
    """Medians of the rounds, without the first of a kind where there are several.

    Seconds; of steps the mean in a round: `alone`, and how many times that one beside a save takes in the same round.
    """

    plain: float
    here: float
    blocks: float
    alone: float
    slower: float
    rounds: tuple[float, ...]
    """`slower` of each round"""

    @classmethod
    def of(cls, found: Found) -> Figures:
        plain, here, blocks = (statistics.median(each[1:] or each) for each in (found.plain, found.here, found.blocks))
        alone = [statistics.fmean(steps) for steps in found.alone]
        rounds = [statistics.fmean(under) / each for under, each in zip(found.under, alone, strict=True)]
        return cls(
            plain,
            here,
            blocks,
            statistics.median(alone[1:] or alone),
            statistics.median(rounds[1:] or rounds),
            tuple(rounds),
        )

    @property
    def held(self) -> bool:
        """Do the limits hold?"""
        return (
            self.plain / self.here >= LIMITS["speed"]
            and self.blocks / self.here <= LIMITS["blocks"]
            and self.slower <= LIMITS["slower"]
        )

    def table(self, gib: float) -> str:
        """`gib`: of one rank."""
        lines = [
            "| what | s | GiB/s a rank | ratio |",
            "|---|---|---|---|",
            f"| `safetensors.save_file` | {self.plain:.3f} | {gib / self.plain:.2f} | |",
            f"| `save` | {self.here:.3f} | {gib / self.here:.2f} | {self.plain / self.here:.2f} of save_file's speed |",
            f"| `save(asynchronous=True)`, until it returns | {self.blocks:.3f} | | "
            f"{self.blocks / self.here:.3f} of `save` |",
            f"| a step beside nothing | {self.alone:.4f} | | |",
            f"| a step beside an asynchronous save | {self.alone * self.slower:.4f} | | {self.slower:.3f} of that "
            f"({', '.join(f'{each:.3f}' for each in self.rounds)}) |",
        ]
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    world = a.gpus or torch.cuda.device_count() or 2
    found = Found(**launch.spawned(rank_main, world, a))
    figures = Figures.of(found)
    size = parameter_count(SHAPES[a.model]) / 1e9
    text = f"{a.model} ({size:.2f} B parameters), ZeRO-{a.stage}, {world} × {found.device}, sequence {a.seq}, "
    text += f"{found.nbytes / GIB:.2f} GiB a rank, torch {torch.__version__}\n\n{figures.table(found.nbytes / GIB)}"
    print(text)
    if a.out is not None:
        a.out.mkdir(parents=True, exist_ok=True)
        (a.out / "saving.md").write_text(text + "\n")
    return int(a.check and not figures.held)


if __name__ == "__main__":
    raise SystemExit(main())
