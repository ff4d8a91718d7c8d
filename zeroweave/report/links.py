"""How fast ranks exchange data, each with each other: the doctor's check between the ranks of one machine.

Between machines: zeroweave run [torchrun's options for them] -m zeroweave.report.links
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import Final

import torch
import torch.distributed as dist

from zeroweave.comm.process_group import device_of
from zeroweave.ranks.start import start_process_group
from zeroweave.report.launch import answer_of, on_ranks

_MARK: Final = "links: "
_SECONDS: Final = 120.0
"""The most that the ranks may take."""
_ROUNDS: Final = 4
_BYTES: Final = {"cuda": 64 << 20, "cpu": 4 << 20}
FLOORS: Final = {("cuda", True): 10.0, ("cuda", False): 2.0, ("cpu", True): 0.2, ("cpu", False): 0.1}
"""GB/s of a link that is not slow, by device and by whether both ranks are in one machine."""
_BEHIND: Final = 3
"""A link that is this many times slower than the median of its kind is slow at any rate."""


@dataclass(frozen=True)
class Links:
    """What was measured: `rates` in GB/s by pairs of ranks ("0-1"), and the ranks' hosts."""

    device: str
    hosts: tuple[str, ...]
    rates: Mapping[str, float]

    def slow(self) -> Iterator[tuple[str, str, str]]:
        """The pair of ranks of each slow link, its rate in words, and what makes it faster."""
        for inside in (True, False):
            rates = {pair: rate for pair, rate in self.rates.items() if inside is (len(set(self._hosts(pair))) == 1)}
            usual = median(rates.values()) if rates else 0.0
            for pair, rate in rates.items():
                if rate < max(FLOORS[self.device, inside], usual / _BEHIND):
                    ranks = " and ".join(map("{} on {}".format, pair.split("-"), self._hosts(pair)))
                    detail = f"ranks {ranks} exchange {rate:.2f} GB/s, others of their kind {usual:.2f}"
                    yield pair, detail, _cure(self.device, inside)

    def _hosts(self, pair: str) -> list[str]:
        return [self.hosts[int(rank)] for rank in pair.split("-")]


def _cure(device: str, inside: bool) -> str:
    if device == "cuda" and inside:
        return "set CUDA_VISIBLE_DEVICES to GPUs that NVLink joins: NV# in the table of nvidia-smi topo -m"
    name = "NCCL_SOCKET_IFNAME" if device == "cuda" else "GLOO_SOCKET_IFNAME"
    return f"export {name}={'lo' if inside else '<the fastest interface that ip -br link shows>'}"


def measured(ranks: int) -> Links:
    """Between `ranks` ranks of this machine. RuntimeError where they fail."""
    return Links(**answer_of(_MARK, *on_ranks(__name__, ranks, _SECONDS)))


def measure(device: torch.device) -> Links:
    """Between the ranks of the process group: all pairs, one after the other. Collective; all ranks get it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.zeros(_BYTES[device.type], dtype=torch.uint8, device=device)
    mine: dict[str, float] = {}
    for pair in combinations(range(world), 2):
        dist.barrier()
        if rank not in pair:
            continue
        first = rank == pair[0]
        start = 0.0
        for index in range(_ROUNDS + 1):
            if index == 1:  # the first round makes the connection
                _wait(data)
                start = perf_counter()
            for send in (first, not first):
                (dist.send if send else dist.recv)(data, pair[first])
        _wait(data)
        if first:
            mine["{}-{}".format(*pair)] = 2 * _ROUNDS * data.numel() / (perf_counter() - start) / 1e9
    told: list[tuple[str, dict[str, float]]] = [("", {})] * world
    dist.all_gather_object(told, (socket.gethostname(), mine))
    rates = {pair: rate for _, each in told for pair, rate in each.items()}
    return Links(device.type, tuple(host for host, _ in told), rates)


def _wait(data: torch.Tensor) -> None:
    if data.is_cuda:
        torch.cuda.synchronize(data.device)


def main() -> None:
    """On each rank."""
    start_process_group(_SECONDS)
    of_all = measure(device_of(dist.group.WORLD))
    if dist.get_rank() == 0:
        print(_MARK + json.dumps(asdict(of_all)))
        for pair, detail, cure in of_all.slow():
            print(f"slow     link {pair}: {detail}\n         -> {cure}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
