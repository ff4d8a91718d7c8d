"""Plain processes, started without a launcher: engines after each other, and ranks that fail early."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.matrix

LIMIT = 240.0
ROOT = Path(__file__).resolve().parents[3]


def ranks(tmp_path: Path, script: str, world: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Runs the script in `world` processes that find each other through the environment, as with srun."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(script))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    return [
        subprocess.CompletedProcess(process.args, process.returncode, *each)
        for process, each in zip(started, said, strict=True)
    ]


ENGINES = """
    import time, torch, torch.distributed as dist, zeroweave as zw

    for turn in range(3):
        module = torch.nn.Linear(8, 8)
        config = {"compile": {"enabled": False}, "deadline_seconds": 120}
        with zw.initialize(module, torch.optim.AdamW(module.parameters()), config=config) as engine:
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
        assert dist.is_initialized(), "the next engine needs it"
        if engine.rank == turn % 2:
            time.sleep(0.5)  # the other one is in the next initialize
    print("done")
"""


def test_engines_after_each_other(tmp_path: Path) -> None:
    """Ranks leave one engine and come to the next at different times; the group ends with the process."""
    for done in ranks(tmp_path, ENGINES):
        assert done.returncode == 0 and done.stdout == "done\n", done.stderr
        assert done.stderr == ""


DISTURBED = """
    import os, time
    from datetime import timedelta
    import torch, torch.distributed as dist, torch.distributed.distributed_c10d as c10d
    from zeroweave.ranks import start
    from zeroweave.ranks.control import Control
    from zeroweave.comm.process_group import own_group

    ways, rank, starts = {ways}, int(os.environ["RANK"]), -1
    sound, make, exchange = c10d.ProcessGroupGloo, dist.init_process_group, dist.all_to_all_single
    start.TRY = timedelta(seconds=4)

    def broken(*_, **__):
        raise RuntimeError("Connection closed by peer")

    def making(*arguments, store, world_size, **named):
        global starts
        starts += world_size > 1
        way = ways.get((starts, rank)) if world_size > 1 else None
        if way == "connected, and closed":
            make(*arguments, store=store, world_size=world_size, **named)
            dist.destroy_process_group()
        if way in ("closed", "connected, and closed"):
            c10d.ProcessGroupGloo = broken
        try:
            make(*arguments, store=dist.PrefixStore(str(way), store) if way else store, world_size=world_size, **named)
        finally:
            c10d.ProcessGroupGloo = sound

    def exchanging(found, *arguments, **named):
        way = ways.get((starts, rank))
        if way == "silent":
            time.sleep(9.0)
            raise RuntimeError("Timed out")
        work = exchange(found, *arguments, **named)
        if way == "another answers":
            found[1 - rank] += 1
            ways.pop((100, rank), None)
        return work

    dist.init_process_group, dist.all_to_all_single = making, exchanging
    start.start_process_group(60.0)
    starts = 100  # groups of the engine's own
    with_control = Control.over(None, 60.0)
    own = own_group(None, with_control, timedelta(seconds=60))
    for group in (None, own):
        summed = torch.ones(1)
        if rank:
            time.sleep(6.0)  # the time of the first attempts is not that of collectives
        dist.all_reduce(summed, group=group)
        assert summed.item() == 2.0
    assert dist.new_group([0, 1]) is not None
    with_control.close()
    print("done")
"""


@pytest.mark.parametrize(
    "ways",
    [
        {},
        {(0, 0): "closed"},
        {(0, 1): "closed", (1, 0): "closed"},
        {(0, 0): "connected, and closed"},
        {(0, 1): "silent"},
        {(0, 1): "another answers", (1, 0): "another answers", (100, 0): "another answers"},
    ],
)
def test_ranks_whose_connections_are_taken_connect_again(tmp_path: Path, ways: dict[tuple[int, int], str]) -> None:
    for done in ranks(tmp_path, DISTURBED.replace("{ways}", repr(ways))):
        assert done.returncode == 0 and done.stdout == "done\n", done.stderr


GLOO_THREADS = """
import atexit
from pathlib import Path

def gloo_threads():
    # Those of groups that live. One that does at the interpreter's end may let go of a tensor then, which aborts it.
    names = [task.joinpath("comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo_run" in name for name in names)

atexit.register(lambda: print(gloo_threads(), "threads"))  # is called last
"""
ENDED = "0 threads\n"
HANDED = """
    import torch, torch.distributed as dist, zeroweave as zw

    dist.init_process_group("gloo")
    own = dist.new_group()
    for group in (None, own):
        module = torch.nn.Linear(8, 8)
        config = {"compile": {"enabled": False}, "deadline_seconds": 120}
        optimizer = torch.optim.AdamW(module.parameters())
        with zw.initialize(module, optimizer, config=config, process_group=group) as engine:
            engine(torch.randn(4, 8))
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=own)
    assert gloo_threads() > 0
    dist.destroy_process_group()
    del own, group
    assert gloo_threads() == 0, "somebody keeps a group"
"""


def test_a_group_that_was_handed_in_is_the_callers(tmp_path: Path) -> None:
    for done in ranks(tmp_path, GLOO_THREADS + textwrap.dedent(HANDED)):
        assert done.returncode == 0 and done.stdout == ENDED, done.stderr


MODEL = """
    import torch, torch.distributed as dist, zeroweave as zw

    dist.init_process_group("gloo") if {given} else None
    module = torch.nn.ModuleDict({{"router": torch.nn.Linear(8, 8), "experts": torch.nn.Linear(8, 8)}})
    module.forward = lambda x: module["experts"](module["router"](x))
    config = {{"compile": {{"enabled": False}}, "deadline_seconds": 120}}
    config["experts"] = {{"parameters": ["experts.*"], "parallel_size": {parallel}}}
    engine = zw.initialize(module, torch.optim.AdamW(module.parameters()), config=config)
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    assert gloo_threads() > 0
"""
EXPERTS = pytest.mark.parametrize(("parallel", "world"), [(1, 2), (2, 4)])


@EXPERTS
def test_a_process_that_ends_with_an_engine_ends_its_groups(tmp_path: Path, parallel: int, world: int) -> None:
    script = GLOO_THREADS + textwrap.dedent(MODEL.format(given=False, parallel=parallel))
    for done in ranks(tmp_path, script, world):
        assert done.returncode == 0 and done.stdout == ENDED, done.stderr


@EXPERTS
def test_an_engine_ends_behind_the_group_that_it_was_given(tmp_path: Path, parallel: int, world: int) -> None:
    script = textwrap.dedent(MODEL.format(given=True, parallel=parallel)) + "dist.destroy_process_group()\n"
    script += "engine.destroy()\n"
    for done in ranks(tmp_path, GLOO_THREADS + script, world):
        assert done.returncode == 0 and done.stdout == ENDED, done.stderr


DC = """
    import torch.distributed as dist, zeroweave.dc as dc

    dist.init_process_group("gloo")
    dc.init()
    assert gloo_threads() > 0
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("end", ["", "dc.cleanup()\ndc.cleanup()\n"])
def test_a_runtime_ends_behind_the_group_that_it_was_given(tmp_path: Path, end: str) -> None:
    for done in ranks(tmp_path, GLOO_THREADS + textwrap.dedent(DC) + end):
        assert done.returncode == 0 and done.stdout == ENDED, done.stderr


FAILS_EARLY = """
    import importlib, os, time, torch, torch.distributed as dist, zeroweave as zw

    start = importlib.import_module("zeroweave.engine.assembly")
    rank = int(os.environ["RANK"])
    if rank == 1:  # is slow in the middle of initialize
        share = start.share_buffers
        start.share_buffers = lambda *arguments: (time.sleep(5.0), share(*arguments))
    module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    config = {"stage": 2, "compile": {"enabled": False}, "deadline_seconds": 120}
    engine = zw.initialize(module, torch.optim.Adam(module.parameters()), config=config)
    print("initialized")
    if rank == 0:
        raise RuntimeError("a mistake in the next line")
    time.sleep(60.0)
"""


def test_a_rank_that_fails_while_another_is_in_initialize(tmp_path: Path) -> None:
    one, two = ranks(tmp_path, FAILS_EARLY)
    assert one.returncode != 0 and "initialized" in one.stdout
    assert two.returncode == 1 and "initialized" not in two.stdout
    assert "rank 0 failed in the script at step 0: RuntimeError: a mistake in the next line" in two.stderr
