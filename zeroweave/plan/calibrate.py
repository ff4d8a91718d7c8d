"""How fast this machine's ranks compute, copy and send: measured on them, for plans that are made elsewhere.

On several machines: zeroweave run [torchrun's options for them] -m zeroweave.plan.calibrate FILE
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import torch
import torch.distributed as dist
import torch.nn.functional as F

from zeroweave._torch.distributed import all_gather
from zeroweave.comm.clock import clock_of
from zeroweave.comm.process_group import device_of
from zeroweave.plan.hardware import Calibration, Efficiency
from zeroweave.ranks.start import start_process_group
from zeroweave.report.launch import answer_of, on_ranks
from zeroweave.schedule import Line

_MARK: Final = "calibration: "
_SECONDS: Final = 300.0  # that the ranks may take


@dataclass(frozen=True)
class _Sizes:
    """matmul: rows, inputs and outputs of a linear layer. copy: bytes. attention: heads, tokens, width.

    gathers: bytes of flats.

    rounds: how many in a row are timed. hold: seconds for which the device waits, so that the host gets ahead of it.
    """

    matmul: tuple[int, int, int]
    copy: int
    attention: tuple[int, int, int]
    gathers: tuple[int, ...]
    rounds: int
    hold: float


_LARGE: Final = tuple(mib << 20 for mib in (1, 4, 16, 64, 256))
_SIZES: Final = {
    "cuda": _Sizes((4096, 4096, 12288), 1 << 30, (32, 4096, 128), _LARGE, rounds=20, hold=0.02),
    "cpu": _Sizes((128, 128, 128), 1 << 20, (2, 64, 16), (1 << 18, 1 << 20, 1 << 22), rounds=2, hold=0.0),
}


class Ranks:
    """The ranks of the default group, each on `device`. What they measure is collective; the slowest of them counts."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.sizes = device, _SIZES[device.type]
        self._clock = clock_of(device)
        self.world, self._rank = dist.get_world_size(), dist.get_rank()
        told = [""] * self.world
        dist.all_gather_object(told, socket.gethostname())
        self.hosts = [[rank for rank in range(self.world) if told[rank] == host] for host in dict.fromkeys(told)]
        """the ranks of each"""

    def timed(self, work: Callable[[], object], rounds: int = 0) -> float:
        """Seconds of `work`: the median of some runs, each of `rounds` calls in a row."""
        clock, rounds = self._clock, rounds or self.sizes.rounds
        found, told = list[float](), [0.0] * self.world
        for _ in range(6):  # the first one warms up
            dist.barrier()
            clock.hold(self.sizes.hold)
            work()
            begin = clock.mark()
            for _ in range(rounds):
                work()
            end = clock.mark()
            clock.finish()
            found.append(clock.seconds(begin, end) / rounds)
        dist.all_gather_object(told, median(found[1:]))
        return max(told)

    def _random(self, *shape: int) -> torch.Tensor:
        """Zeros would take less power, and so less time."""
        return torch.randn(*shape, device=self.device, dtype=torch.bfloat16)

    def alone(self) -> tuple[dict[str, float], dict[str, float]]:
        """Rates and seconds of `Calibration`."""
        (rows, inner, columns), (heads, tokens, width) = self.sizes.matmul, self.sizes.attention
        x, weight, y = self._random(rows, inner), self._random(columns, inner), self._random(rows, columns)
        to_x, to_weight, to_y = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(y)

        def matmul() -> None:
            """The products of a linear layer and its backward: their operands differ in layout, and so do rates."""
            torch.mm(x, weight.t(), out=to_y)
            torch.mm(y, weight, out=to_x)
            torch.mm(y.t(), x, out=to_weight)

        q, k, v, back = (self._random(1, heads, tokens, width).requires_grad_() for _ in range(4))

        def attention() -> None:
            torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), back)

        source = torch.ones(self.sizes.copy, dtype=torch.uint8, device=self.device)
        target = source.clone()
        self.timed(matmul, rounds=20 * self.sizes.rounds)  # until clocks and power are those of a step
        rates = {
            "matmul": 3 * 2 * rows * inner * columns / self.timed(matmul),
            # seven products, of which causal attention needs one half, as `work` counts them
            "attention": 7 * heads * tokens * tokens * width / self.timed(attention),
            "memory": 2 * source.nbytes / self.timed(lambda: target.copy_(source)),
        }
        if self.device.type == "cpu":
            return rates, {}
        host, small = torch.ones(self.sizes.copy, dtype=torch.uint8, pin_memory=True), torch.zeros(16).to(self.device)
        up = self.timed(lambda: source.copy_(host, non_blocking=True), rounds=3)
        down = self.timed(lambda: host.copy_(source, non_blocking=True), rounds=3)
        rates["host"] = host.nbytes / max(up, down)
        return rates, {"kernel": self.timed(lambda: small.add_(1.0), rounds=1000)}

    def gather(self, nbytes: int, group: dist.ProcessGroup) -> Callable[[], object]:
        shard = torch.ones(nbytes // group.size(), dtype=torch.uint8, device=self.device)
        flat = torch.empty(group.size() * shard.numel(), dtype=torch.uint8, device=self.device)
        return lambda: all_gather(flat, shard, group).wait()

    def line(self, groups: Sequence[Sequence[int]]) -> Line:
        """Of all-gathers in each of these groups of ranks at the same time; ranks in none send nothing."""
        made = [(ranks, dist.new_group(list(ranks))) for ranks in groups]
        mine = next((group for ranks, group in made if self._rank in ranks), None)
        sizes = self.sizes.gathers
        seconds = [self.timed((lambda: None) if mine is None else self.gather(nbytes, mine)) for nbytes in sizes]
        beta = max(1e-15, (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return Line(max(0.0, median(t - beta * n for t, n in zip(seconds, sizes, strict=True))), beta)


def measure(device: torch.device) -> Calibration:
    """On the ranks of the default group. Collective; all of them get it."""
    ranks, known = Ranks(device), Efficiency()
    world, nodes, local = ranks.world, len(ranks.hosts), min(map(len, ranks.hosts))
    rates, seconds = ranks.alone()
    if local > 1:
        line, pair = ranks.line(ranks.hosts), None if local == 2 else ranks.line([each[:2] for each in ranks.hosts])
        rates["inside"] = (local - 1) / local / line.beta
        if pair is not None:
            seconds["hop_inside"] = max(0.0, (line.alpha - pair.alpha) / (local - 2))
        seconds["launch"] = max(0.0, (pair or line).alpha - seconds.get("hop_inside", known.hop_inside))
    if nodes > 1:
        line = ranks.line([range(world)])
        rates["between"] = (world - 1) / world / line.beta / local
        inside = seconds.get("launch", known.launch) + (world - nodes) * seconds.get("hop_inside", known.hop_inside)
        seconds["hop_between"] = max(0.0, (line.alpha - inside) / (nodes - 1))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Calibration(name, world, nodes, rates, seconds)


def measured(ranks: int) -> Calibration:
    """On `ranks` ranks of this machine. RuntimeError where they fail."""
    return Calibration(**answer_of(_MARK, *on_ranks(__name__, ranks, _SECONDS)))


def main() -> None:
    """On each rank. Rank 0 writes the file that is named, or prints what `measured` finds."""
    start_process_group(_SECONDS)
    calibration = measure(device_of(dist.group.WORLD))
    if dist.get_rank() == 0 and sys.argv[1:]:
        calibration.save(Path(sys.argv[1]))
        print(*calibration.lines(), sep="\n", flush=True)
    elif dist.get_rank() == 0:
        print(_MARK + json.dumps(asdict(calibration)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
