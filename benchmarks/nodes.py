"""Steps over a slow link between two nodes: one sharding group of all ranks beside one group a node.

    python -m benchmarks.nodes --ranks 4 --mbit 1000 --out DIR

Two nodes are two network namespaces of this machine, with a link of MBIT megabits a second each way, and RANKS ranks
under gloo on each. An MLP of WIDTH trains under ZeRO-3 in float32, with accumulation. For each group size: the median
time of a step, and the bytes that one rank sends inside and across groups in it. Needs Linux, `ip`, `tc`, and the right
to make namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import zeroweave as zw

PORT = 29_611
"""Of the rendezvous; the namespaces are new, and all others' ports are not in them."""


@dataclass
class Node:
    """A machine: how a command is run on it, and the options of its launcher.

    `addresses`: of its interfaces; `interface` has the last one, and leads to the other machines if there are any.
    """

    prefix: Sequence[str]
    addresses: Sequence[str]
    interface: str
    launcher: Sequence[object]


def _ran(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


@contextmanager
def _namespace(*prefix: str) -> Iterator[int]:
    """A new network namespace, as long as the process lasts whose number is given."""
    holder = subprocess.Popen([*prefix, "sleep", "infinity"], stderr=subprocess.PIPE)
    try:
        until, own = time.monotonic() + 10, Path("/proc/self/ns/net").readlink()
        while holder.poll() is None and time.monotonic() < until:
            if Path(f"/proc/{holder.pid}/comm").read_text() == "sleep\n":
                assert Path(f"/proc/{holder.pid}/ns/net").readlink() != own
                yield holder.pid
                return
            time.sleep(0.01)
        raise OSError(f"{' '.join(prefix)}: no namespace")
    finally:
        holder.kill()
        holder.wait()


@contextmanager
def two_nodes(way: str, ranks: int = 1, mbit: int | None = None) -> Iterator[list[Node]]:
    """Two namespaces, node-0 and node-1, with an interface to each other.

    It has `mbit` megabits a second each way (None: as fast as it is).

    `way`: of the rendezvous, "c10d" or "static". OSError where this machine does not let us.
    """
    with ExitStack() as ends:
        first = ends.enter_context(_namespace("unshare", "--map-root-user", "--net", "--uts"))
        enter = ["nsenter", "--preserve-credentials", "--user", "--net", "--uts", "-t"]
        second = ends.enter_context(_namespace(*enter, str(first), "unshare", "--net", "--uts"))
        nodes = []
        _ran(*enter, first, *"ip link add z0 type veth peer name z1 netns".split(), second)
        for number, process in enumerate((first, second)):
            address, interface = f"10.77.0.{number + 1}", f"z{number}"
            _ran(*enter, process, "sh", "-c", f"echo node-{number} > /proc/sys/kernel/hostname")
            _ran(*enter, process, "ip", "addr", "add", f"{address}/24", "dev", interface)
            for each in ("lo", interface):
                _ran(*enter, process, "ip", "link", "set", each, "up")
            if mbit is not None:
                shape = f"root tbf rate {mbit}mbit burst 512kb latency 200ms".split()
                _ran(*enter, process, "tc", "qdisc", "add", "dev", interface, *shape)
            launcher: list[object] = ["-n", ranks, "--nnodes", "2"]
            if way == "c10d":
                # by itself the launcher looks its address up by the machine's name, which leads into no namespace
                launcher += ["--rdzv-conf", f"is_host={int(number == 0)}", "--local-addr", address]
                launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.77.0.1:{PORT}"]
            else:
                launcher += ["--node-rank", number, "--master-addr", "10.77.0.1", "--master-port", PORT]
            nodes.append(Node([*enter, str(process)], ["127.0.0.1", address], interface, launcher))
        yield nodes


def run(nodes: Sequence[Node], log: Path, *script: object, **environment: str) -> None:
    """Runs a script under a launcher on each node; RuntimeError with what they said unless all end well."""
    command = [sys.executable, "-m", "zeroweave.cli", "run"]
    files = [log.with_suffix(f".{number}.log") for number, _ in enumerate(nodes)]
    launchers = []
    for node, file in zip(nodes, files, strict=True):
        variables = os.environ | {"GLOO_SOCKET_IFNAME": node.interface, "OMP_NUM_THREADS": "1", **environment}
        words = [*node.prefix, *command, *node.launcher, *script]
        with file.open("w") as output:
            launchers.append(subprocess.Popen(list(map(str, words)), env=variables, stdout=output, stderr=output))
    codes = [launcher.wait() for launcher in launchers]
    if any(codes):
        raise RuntimeError("\n".join(file.read_text()[-2000:] for file in files))


def worker(arguments: argparse.Namespace) -> None:
    """One rank: trains, and rank 0 writes what it took."""
    torch.manual_seed(0)
    width, micro = arguments.width, arguments.micro_steps
    model = nn.Sequential(*(layer for _ in range(arguments.layers) for layer in (nn.Linear(width, width), nn.Tanh())))
    config = {
        "stage": 3,
        "gradient_accumulation_steps": micro,
        "compile": {"enabled": False, "regions": ["*"]},
        "bucket": {"bytes": 4 * width * (width + 1)},
        "sharding": {"group_size": arguments.group_size},
    }
    seconds = []
    with zw.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-3), config) as engine:
        x = torch.randn(2, width, generator=torch.Generator().manual_seed(engine.rank))
        for _ in range(arguments.steps):
            start = time.perf_counter()
            for _ in range(micro):
                loss = engine.train_step(x, lambda output, _: output.square().mean())
            seconds.append(time.perf_counter() - start)
        sent = {kind: traffic.wire for kind, traffic in engine.stats.last_step.items()}
        if engine.rank == 0:
            found = {"seconds": statistics.median(seconds[2:]), "sent": sent, "loss": float(loss)}
            Path(arguments.result).write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="on each node")
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--micro-steps", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--group-size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.result is not None:
        worker(arguments)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    parameters = 4 * arguments.layers * arguments.width * (arguments.width + 1)
    print(f"{2 * arguments.ranks} ranks on 2 nodes, {arguments.mbit} Mbit/s between, {parameters / 1e6:.0f} MB")
    found = {}
    for size in (2 * arguments.ranks, arguments.ranks):
        result = arguments.out / f"groups-of-{size}.json"
        passed = ("width", "layers", "micro_steps", "steps")
        options = [word for key in passed for word in (f"--{key.replace('_', '-')}", getattr(arguments, key))]
        with two_nodes("c10d", arguments.ranks, arguments.mbit) as nodes:
            run(nodes, result, "-m", "benchmarks.nodes", *options, "--group-size", size, "--result", result)
        found[size] = json.loads(result.read_text())
        sent = ", ".join(f"{kind} {nbytes / parameters:.2f}" for kind, nbytes in found[size]["sent"].items())
        print(f"groups of {size}: {found[size]['seconds']:.3f} s, loss {found[size]['loss']:.9f}")
        print(f"  each rank sends, in sizes of the model: {sent}", flush=True)
    one, two = found[2 * arguments.ranks]["seconds"], found[arguments.ranks]["seconds"]
    print(f"one group / a group a node: {one / two:.2f}")


if __name__ == "__main__":
    main()
