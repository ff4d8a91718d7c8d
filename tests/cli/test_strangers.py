"""Strangers connect to all that a job listens to and send garbage: the job ends as without them.

Two nodes are two network namespaces of this machine, each with a launcher. The test skips where it may not make them.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.nodes import Node, two_nodes
from tests.support import strangers
from tests.support.jobs import Job, Listener, listeners

pytestmark = pytest.mark.matrix

CONNECTIONS = 10_000
BATCH = 40
"""Connections to one port, before it is the next one's turn."""
STEPS = 50

PROGRAM = f"""
import pathlib, sys, time
import torch
import zeroweave as zw

folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
config = {{"compile": {{"enabled": False}}, "deadline_seconds": 120}}
engine = zw.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)
generator = torch.Generator().manual_seed(engine.rank)
losses = []
for step in range({STEPS}):
    while int((folder / "strangers").read_text() or 0) < (step + 1) * {CONNECTIONS} // {STEPS}:
        time.sleep(0.01)  # the steps last as long as the strangers
    loss = engine.train_step(torch.randn(4, 8, generator=generator), lambda output, _: output.square().mean())
    losses.append(loss.item().hex())
    if step % 10 == 0:
        engine.save(folder / "saved")
(folder / f"losses-{{engine.rank}}").write_text("\\n".join(losses))
engine.destroy()
"""


ONE_NODE = Node([], ["127.0.0.1"], "lo", ["-n", "2"])


class Running:
    """A job on these nodes."""

    def __init__(self, job: Job, folder: Path, nodes: Sequence[Node]) -> None:
        folder.mkdir()
        (folder / "train.py").write_text(PROGRAM)
        self.folder, self.nodes, self.job = folder, nodes, job
        self.told(0)
        command, script = [sys.executable, "-m", "zeroweave.cli", "run"], [folder / "train.py", folder]
        self.launchers = [
            self.job.start(
                [*node.prefix, *command, *node.launcher, *script],
                folder / f"log-{number}",
                GLOO_SOCKET_IFNAME=node.interface,
            )
            for number, node in enumerate(nodes)
        ]

    def told(self, connections: int) -> None:
        """The steps may go on as far as so many connections allow."""
        (self.folder / "strangers.new").write_text(str(connections))
        (self.folder / "strangers.new").rename(self.folder / "strangers")

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def ends(self) -> list[str]:
        """What the ranks have written. All launchers end well, and nothing is left."""
        codes = [launcher.wait(300) for launcher in self.launchers]
        assert codes == [0] * len(codes), self.logs()
        assert self.job.running() == {}
        return [path.read_text() for path in sorted(self.folder.glob("losses-*"))]

    def listening(self) -> list[set[Listener]]:
        """Of each node."""
        processes = self.job.running()
        on = [{pid for pid, each in processes.items() if each["GLOO_SOCKET_IFNAME"] == n.interface} for n in self.nodes]
        return [listeners(each) for each in on]

    def unexpected(self, found: Sequence[set[Listener]]) -> list[Listener]:
        """What listens where docs/security.md does not say so."""
        processes = self.job.running()
        wrong = []
        for node, each in zip(self.nodes, found, strict=True):
            for listener in each:
                environment = processes.get(listener.process)
                if environment is None or listener.address == node.addresses[-1]:
                    continue
                rendezvous = environment.get("MASTER_PORT") == str(listener.port) or "RANK" not in environment
                if listener.address not in ("::", "0.0.0.0") or not rendezvous:
                    wrong.append(listener)
        return wrong


def attacked(run: Running) -> tuple[int, dict[str, int]]:
    """Strangers on each node connect until that is enough: how often, and how often to each kind of port."""
    made, kinds, turn = 0, dict[str, int](), 0
    with ExitStack() as ends:
        talkers = [
            ends.enter_context(
                subprocess.Popen(
                    [*node.prefix, sys.executable, strangers.__file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for node in run.nodes
        ]
        for talker in talkers:
            ends.callback(talker.kill)
        while made < CONNECTIONS and all(launcher.poll() is None for launcher in run.launchers):
            found = run.listening()
            assert run.unexpected(found) == []
            for listener, owner in {(each, n) for n, node in enumerate(found) for each in node}:
                for number, talker in enumerate(talkers):
                    reachable = run.nodes[owner].addresses if number == owner else run.nodes[owner].addresses[-1:]
                    bound = listener.address in ("::", "0.0.0.0")
                    for address in reachable if bound else {listener.address} & set(reachable):
                        turn += 1
                        assert talker.stdin is not None and talker.stdout is not None
                        print(address, listener.port, BATCH, turn, file=talker.stdin, flush=True)
                        came = int(talker.stdout.readline())
                        made += came
                        kind = f"node {owner}, {'all interfaces' if bound else listener.address}"
                        kinds[kind] = kinds.get(kind, 0) + came
                        run.told(made)
            time.sleep(0.02)
        run.told(CONNECTIONS)
    return made, kinds


@pytest.mark.parametrize("way", ["one", "static", "c10d"])
def test_strangers_change_nothing(way: str, tmp_path: Path) -> None:
    """On one node, or on two, by two kinds of rendezvous."""
    with ExitStack() as ends:
        try:
            machines = [ONE_NODE] if way == "one" else ends.enter_context(two_nodes(way))
        except OSError as error:
            pytest.skip(f"this machine has no network namespaces for us: {error}")
        alone = Running(ends.enter_context(Job()), tmp_path / "alone", machines)
        alone.told(CONNECTIONS)
        expected = alone.ends()
        run = Running(ends.enter_context(Job()), tmp_path / "run", machines)
        made, kinds = attacked(run)
        assert run.ends() == expected and len(expected) == 2
        print(f"{made} connections: {kinds}")
        assert made >= CONNECTIONS, run.logs()
