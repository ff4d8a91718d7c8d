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
from zeroweave.report.apart import answer_of, run
from zeroweave.report.check import Check

_MARK: Final = "links: "
_SECONDS: Final = 120.0
"""How long the ranks may take."""
_ROUNDS: Final = 4
_BYTES: Final = {"cuda": 64 << 20, "cpu": 4 << 20}
FLOORS: Final = {("cuda", True): 10.0, ("cuda", False): 2.0, ("cpu", True): 0.2, ("cpu", False): 0.1}
"""GB/s of a link that is not slow, by device and by whether both ranks are in one machine."""
_BEHIND: Final = 3
"""A link that is so many times slower than the median of its kind is slow, whatever its rate."""


@dataclass(frozen=True)
class Links:
    """What was measured: `rates` in GB/s by pairs of ranks ("0-1"), on hosts by rank."""

    device: str
    hosts: tuple[str, ...]
    rates: Mapping[str, float]

    def told(self) -> str:
        """As `found` reads it."""
        return _MARK + json.dumps(asdict(self))


def links(measured: Links) -> Iterator[Check]:
    """One line for each slow link, or one for all."""
    kinds: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for pair, rate in measured.rates.items():
        a, b = map(int, pair.split("-"))
        kinds[measured.hosts[a] == measured.hosts[b]][pair] = rate
    slow = False
    for inside, rates in kinds.items():
        usual = median(rates.values()) if rates else 0.0
        for pair, rate in rates.items():
            if rate < max(FLOORS[measured.device, inside], usual / _BEHIND):
                slow = True
                yield Check(
                    f"link {pair}", "slow", _detail(measured, pair, rate, usual), _cure(measured.device, inside)
                )
    if not slow:
        low, high = min(measured.rates.values()), max(measured.rates.values())
        span = f"{low:.1f}" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f}"
        yield Check("links", "ok", f"{len(measured.hosts)} ranks exchange {span} GB/s each with each other")


def _detail(measured: Links, pair: str, rate: float, usual: float) -> str:
    hosts = list(dict.fromkeys(measured.hosts[int(rank)] for rank in pair.split("-")))
    where = f" ({' and '.join(hosts)})" if len(set(measured.hosts)) > 1 else ""
    return f"ranks {pair.replace('-', ' and ')}{where} exchange {rate:.2f} GB/s, others of their kind {usual:.2f}"


def _cure(device: str, inside: bool) -> str:
    if device == "cuda" and inside:
        return "set CUDA_VISIBLE_DEVICES to GPUs that NVLink joins: NV# in the table of nvidia-smi topo -m"
    name = "NCCL_SOCKET_IFNAME" if device == "cuda" else "GLOO_SOCKET_IFNAME"
    return f"export {name}={'lo' if inside else '<the fastest interface that ip -br link shows>'}"


def measured(ranks: int) -> Links:
    """Between so many ranks of this machine. RuntimeError where they fail."""
    return found(*run(__name__, ranks, _SECONDS))


def found(output: str, errors: str) -> Links:
    """What the ranks have printed."""
    answer = answer_of(_MARK, output, errors)
    return Links(answer["device"], tuple(answer["hosts"]), answer["rates"])


def measure(device: torch.device) -> Links:
    """Between the ranks of the process group: all pairs, one after the other. Collective; all ranks get it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.zeros(_BYTES[device.type], dtype=torch.uint8, device=device)
    mine: dict[str, float] = {}
    for a, b in combinations(range(world), 2):
        dist.barrier()
        if rank in (a, b):
            seconds = _exchange(data, b if rank == a else a, first=rank == a)
            if rank == a:
                mine[f"{a}-{b}"] = 2 * _ROUNDS * data.numel() / seconds / 1e9
    told: list[tuple[str, dict[str, float]]] = [("", {})] * world
    dist.all_gather_object(told, (socket.gethostname(), mine))
    rates = {pair: rate for _, each in told for pair, rate in each.items()}
    return Links(device.type, tuple(host for host, _ in told), rates)


def _exchange(data: torch.Tensor, peer: int, first: bool) -> float:
    """Seconds of some rounds to and fro, after one that makes the connection."""
    start = 0.0
    for index in range(_ROUNDS + 1):
        if index == 1:
            _settle(data)
            start = perf_counter()
        for send in (first, not first):
            (dist.send if send else dist.recv)(data, peer)
    _settle(data)
    return perf_counter() - start


def _settle(data: torch.Tensor) -> None:
    if data.is_cuda:
        torch.cuda.synchronize(data.device)


def main() -> None:
    """On each rank."""
    start_process_group(_SECONDS)
    of_all = measure(device_of(dist.group.WORLD))
    if dist.get_rank() == 0:
        print(of_all.told())
        for check in links(of_all) if of_all.rates else ():
            print(*check.lines(), sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
