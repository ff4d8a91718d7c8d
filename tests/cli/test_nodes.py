"""Two nodes with a sharding group each: the numbers of one node; and a node that is killed.

Nodes are network namespaces of this machine, each with a launcher. The tests skip where it may not make them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.nodes import Node, two_nodes
from tests.support.jobs import Job

pytestmark = pytest.mark.matrix

ONE_NODE = Node([], ["127.0.0.1"], "lo", ["-n", "4"])
DEADLINE, STEPS = 30, 6

PROGRAM = f"""
import hashlib, pathlib, sys
import torch
import zeroweave as zw

folder, group_size, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2]) or None, int(sys.argv[3])

class Model(torch.nn.Module):
    # gradients are whole numbers: their sums are exact, in whatever order
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 12) for _ in range(3))

    def forward(self, x):
        return sum(layer(x).sum() for layer in self.layers)

torch.manual_seed(0)
model = Model()
config = {{"compile": {{"enabled": False}}, "deadline_seconds": {DEADLINE}, "sharding": {{"group_size": group_size}}}}
engine = zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)
engine.load(folder / "saved", missing_ok=True)

def note():
    named = sorted(engine.state_dict().items())
    if engine.rank == 0:
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for _, value in named)).hexdigest()
        with (folder / "digests").open("a") as file:
            file.write(f"{{engine.global_steps}} {{digest}}\\n")

note()
while engine.global_steps < steps:
    generator = torch.Generator().manual_seed(10 * engine.global_steps + engine.rank)
    engine.train_step(torch.randint(-4, 5, (2, 16), generator=generator).float(), lambda output, _: output)
    note()  # first: what is saved has been noted, whenever the node is killed
    engine.save(folder / "saved")
engine.destroy()
"""


def launch(job: Job, nodes: Sequence[Node], folder: Path, group_size: int, steps: int) -> list[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    script = [sys.executable, "-m", "zeroweave.cli", "run"], [folder / "train.py", folder, group_size, steps]
    return [
        job.start(
            [*node.prefix, *script[0], *node.launcher, *script[1]],
            folder / f"log-{number}",
            GLOO_SOCKET_IFNAME=node.interface,
        )
        for number, node in enumerate(nodes)
    ]


def digests(folder: Path) -> list[list[str]]:
    """Step and digest of each state, in order."""
    return [line.split() for line in (folder / "digests").read_text().splitlines()]


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    with ExitStack() as ends:
        try:
            yield ends.enter_context(two_nodes("c10d", ranks=2))
        except OSError as error:
            pytest.skip(f"this machine has no network namespaces for us: {error}")


def test_two_nodes_train_as_one(nodes: list[Node], tmp_path: Path) -> None:
    with Job() as job:
        for folder, where, size in ((tmp_path / "one", [ONE_NODE], 0), (tmp_path / "two", nodes, 2)):
            for number, launcher in enumerate(launch(job, where, folder, size, STEPS)):
                assert launcher.wait(200) == 0, (folder / f"log-{number}").read_text()
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert len({digest for _, digest in digests(tmp_path / "one")}) == STEPS + 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_is_killed(victim: int, nodes: list[Node], tmp_path: Path) -> None:
    """The other node's processes end within the deadline, and one node goes on from the latest checkpoint."""
    with Job() as job:
        launchers = launch(job, nodes, tmp_path, 2, 10**6)
        while not (tmp_path / "digests").exists() or len(digests(tmp_path)) < 4:
            assert all(launcher.poll() is None for launcher in launchers), (tmp_path / "log-0").read_text()
            time.sleep(0.05)
        for process, environment in job.running().items():
            if environment["GLOO_SOCKET_IFNAME"] == nodes[victim].interface:
                os.kill(process, signal.SIGKILL)
        killed, log = time.monotonic(), tmp_path / f"log-{1 - victim}"
        assert launchers[1 - victim].wait(4 * DEADLINE) not in (0, 143), log.read_text()
        print(f"ended {time.monotonic() - killed:.1f} s after the node:", log.read_text()[-2000:])
        assert job.running() == {}
        # with rank 0's node the rendezvous is gone, of which the launcher tells
        named = ("on node-0", "10.77.0.1:") if victim == 0 else ("on node-1",)
        assert any(name in log.read_text() for name in named), log.read_text()
        before = digests(tmp_path)
        (launcher,) = launch(job, [Node([], ["127.0.0.1"], "lo", ["-n", "2"])], tmp_path, 0, int(before[-1][0]) + 2)
        assert launcher.wait(200) == 0, (tmp_path / "log-0").read_text()
    resumed = digests(tmp_path)[len(before) :]
    assert resumed[0] in before[-2:], "what is loaded is what was saved"
    assert len(resumed) >= 3
