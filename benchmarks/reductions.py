"""What reductions cost on the GPUs of this machine, by kernel and by pulling, alone and beside matmuls.

    python -m benchmarks.reductions

All is captured: so many reductions, each beside about the matmuls of a block's backward, with two in flight. "matmuls
lose" is what such a row takes more than without reductions, for each of them. The row is measured with all
multiprocessors, and with those that matmuls leave to pulling, which may cost matmuls something with no reduction beside
them, too. Times are of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks import launch
from zeroweave.comm.ledger import Ledger
from zeroweave.comm.process_group import make_transport
from zeroweave.comm.pulling.room import Room
from zeroweave.comm.pulling.setup import pulling
from zeroweave.comm.transport import Pending, Transport
from zeroweave.layout import WORLD, BucketLayout, Slot
from zeroweave.ranks.control import Control

HEAD = ("by", "matmuls", "alone ms", "row ms", "matmuls lose ms")
_REDUCTIONS = 16
_ROUNDS = 6
_SECONDS = 300.0


class Row:
    """Matmuls of a transformer's block with 4,096 tokens, and reductions of its gradients beside the next one's."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        world = dist.get_world_size()
        numel = nbytes // 2 // (world * 1024) * world * 1024
        slot = Slot("block", 0, numel, (numel,))
        self.layout = BucketLayout(0, "block", "bfloat16", 2, True, WORLD, world, (slot,), numel)
        self.device = device
        torch.manual_seed(dist.get_rank())  # real numbers: zeros draw less power
        self._x, self._wide = self._matrix(4096, 4096), self._matrix(4096, 12288)
        self._weight, self._square = self._matrix(12288, 4096), self._matrix(4096, 4096)
        self._out, self._gradient = torch.empty_like(self._weight), torch.empty_like(self._x)
        self._values = torch.randn(numel, device=device).bfloat16()
        self._stream = torch.cuda.Stream(device)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, dtype=torch.bfloat16, device=self.device) / 64

    def _matmuls(self) -> None:
        for _ in range(3):
            torch.mm(self._wide.t(), self._x, out=self._out)
            torch.mm(self._wide, self._weight, out=self._gradient)
        for _ in range(4):
            torch.mm(self._x, self._square, out=self._gradient)

    def _run(self, transport: Transport | None, computes: bool) -> None:
        flying: deque[tuple[Pending, torch.Tensor]] = deque()
        for _ in range(_REDUCTIONS):
            flat = None if transport is None else transport.flat(self.layout, torch.bfloat16)
            if computes:
                self._matmuls()
            if transport is None or flat is None:
                continue
            if not computes:
                flat.copy_(self._values)
            out = torch.empty(self.layout.shard_numel, dtype=torch.bfloat16, device=self.device)
            flying.append((transport.reduce_scatter(out, flat, self.layout, "average"), out))
            del flat
            if len(flying) > 2:
                flying.popleft()[0].wait()
        if computes:
            self._matmuls()
        while flying:
            flying.popleft()[0].wait()

    def milliseconds(
        self, transport: Transport | None, computes: bool, scope: Callable[[], AbstractContextManager[None]]
    ) -> float:
        """Of a replay, on the slowest rank. Collective."""
        with torch.cuda.stream(self._stream), scope():
            self._run(transport, computes)
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream), scope():
            self._run(transport, computes)
        times = []
        for _ in range(2 + _ROUNDS):
            dist.barrier()
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 2)
        del graph  # NCCL's end waits for it
        slowest = torch.tensor(median(times[2:]), device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)


def rank(path: Path) -> None:
    """On each rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    control, nbytes = Control.over(None, _SECONDS), json.loads(path.read_text())["mib"] << 20
    ledger, row = Ledger(control.world, control.rank), Row(device, nbytes)
    kernel = make_transport(dist.group.WORLD, device, ledger)
    made = pulling("pull", kernel, control, device, ledger, [(row.layout.numel, torch.bfloat16)])
    assert made.transport is not None and made.room is not None
    ways: dict[str, Transport] = {"kernel": kernel, "pulling": made.transport}
    scopes: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "all": nullcontext,
        "leave room": lambda: leaving(made.room),
    }
    table: list[tuple[str, str, float | None, float, float]] = []
    without = row.milliseconds(None, True, nullcontext)
    room = row.milliseconds(None, True, scopes["leave room"])
    table.append(("nothing", "leave room", None, room, (room - without) / _REDUCTIONS))
    for way, transport in ways.items():
        alone = row.milliseconds(transport, False, nullcontext) / _REDUCTIONS
        for name, scope in scopes.items():
            without = row.milliseconds(None, True, nullcontext)  # each time: GPUs warm up
            beside = row.milliseconds(transport, True, scope)
            table.append((way, name, alone, beside, (beside - without) / _REDUCTIONS))
    path.with_name(f"rank{control.rank}.json").write_text(json.dumps({"table": table}))
    torch.cuda.synchronize()
    made.transport.flats.close()
    control.barrier("the end")
    control.close()
    dist.destroy_process_group()


@contextmanager
def leaving(room: Room | None) -> Iterator[None]:
    assert room is not None
    room.begin()
    try:
        yield
    finally:
        room.end()


def main() -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--mib", type=int, default=368, help="of a bucket")
    p.add_argument("spec", type=Path, nargs="?", help="as a rank of that")
    a = p.parse_args()
    if a.spec is not None:
        rank(a.spec)
        return 0
    count = torch.cuda.device_count()
    if count < 2:
        print(f"there are {count} GPUs: nothing is reduced between them")
        return 1
    with launch.temporary_folder() as folder:
        request = {"mib": a.mib}
        found = launch.ranks("benchmarks.reductions", "reductions", request, folder, count, _SECONDS, sys.stdout)
    for cells in (HEAD, ("---",) * len(HEAD)):
        print(f"| {' | '.join(cells)} |")
    for way, matmuls, *times in found[0]["table"]:
        print(f"| {way} | {matmuls} | {' | '.join('–' if time is None else f'{time:.3f}' for time in times)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
