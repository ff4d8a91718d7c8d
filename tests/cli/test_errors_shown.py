"""What a user sees on stderr when ranks of `zeroweave run` are ended: the reason, and little else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import zeroweave

pytestmark = pytest.mark.matrix

TRAINING = """
import os, signal, sys, time
import torch
import zeroweave as zw

def fail(*_):
    raise ValueError("inside")

class SGD(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if SGD.fails:
            fail()
        return super().step(closure)

what = sys.argv[1]
torch.manual_seed(0)
module = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()) for _ in range(4)))
deadline = 6 if what == "stuck" else 120
config = {"stage": 3, "deadline_seconds": deadline, "compile": {"enabled": False}}
engine = zw.initialize(module, zw.element_wise(SGD(module.parameters(), lr=0.1)), config=config)
for step in range(5):
    odd = step == 3
    if odd and what == "one" and engine.rank == 1:
        raise ValueError("bad batch")
    if odd and what == "killed" and engine.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if odd and what == "stuck" and engine.rank == 1:
        time.sleep(600)
    if odd and what == "state_dict" and engine.rank == 0:
        engine.state_dict()
    inside = odd and engine.rank == 1
    if inside and what == "forward":
        module[1].register_forward_pre_hook(fail)
    SGD.fails = inside and what == "step"
    loss = engine(torch.randn(8, 16)).square().mean()
    if inside and what == "backward":
        loss.register_hook(fail)
    engine.backward(loss)
    if odd and what == "gradients" and engine.rank == 0:
        engine.gradients()
    engine.step()
engine.destroy()
"""

SHOWN = [
    ("one", "rank 1 failed with exit code 1: ValueError: bad batch"),
    ("state_dict", "rank 0 at 'state_dict', rank 1 at 'collective "),
    ("killed", "rank 1 failed with signal 9"),
    ("stuck", "did not arrive within the deadline"),
    ("gradients", "rank 0 failed in gradients"),
]


@pytest.mark.parametrize(("what", "reason"), SHOWN)
def test_one_short_block(tmp_path: Path, what: str, reason: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    done = zeroweave("run", "--nproc-per-node", 2, script, what)
    assert done.returncode != 0
    assert reason in done.stderr, done.stderr
    for noise in ("frame #", "Exception raised from", "gloo/transport", "torch/distributed/elastic", "control.py"):
        assert noise not in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) <= 24, done.stderr


@pytest.mark.parametrize("what", ["forward", "backward", "step"])
def test_an_exception_inside_the_engine_is_exit_code_1(tmp_path: Path, what: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    done = zeroweave("run", "--nproc-per-node", 2, script, what)
    assert "rank 1 failed with exit code 1: ValueError: inside" in done.stderr, done.stderr
    assert done.returncode == 1
