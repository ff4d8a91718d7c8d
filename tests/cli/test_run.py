"""`zeroweave run`: torchrun's options, exit codes and reasons, and an orderly end of process groups."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import parse_args

import zeroweave as zw
from tests.support.commands import zeroweave
from zeroweave.errors import ConfigError
from zeroweave.report.launch import exit_reason, first_line, parse, under_runner
from zeroweave.report.runner import is_interrupted, own_frames, own_store

LEAVES_A_GROUP = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(4, 4))  # holds the group until the process ends
model(torch.ones(2, 4)).sum().backward()
print(f"rank {rank} has {sys.argv[1:]} as {__name__}")
if "raise" in sys.argv:
    if rank == 1:
        raise ValueError("no such luck")
    dist.all_reduce(torch.ones(1))
if "exit" in sys.argv and rank == 1:
    sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(LEAVES_A_GROUP)
    return path


@pytest.mark.matrix
def test_a_script_that_leaves_its_group_behind_ends_well(script: Path) -> None:
    done = zeroweave("run", "--nproc-per-node", 2, script, "--stage", "3", "--help")
    assert done.returncode == 0, done.stderr
    assert "as __main__" in done.stdout and "['--stage', '3', '--help']" in done.stdout


@pytest.mark.matrix
def test_an_exception_gives_its_reason_and_no_frames_of_the_runner(script: Path) -> None:
    done = zeroweave("run", "--nproc-per-node=2", script, "raise")
    assert done.returncode == 1
    assert "zeroweave: rank 1 failed with exit code 1: ValueError: no such luck" in done.stderr
    assert 'raise ValueError("no such luck")' in done.stderr
    assert "runner.py" not in done.stderr


@pytest.mark.matrix
def test_the_exit_code_of_the_script_is_kept(script: Path) -> None:
    done = zeroweave("run", "--nproc-per-node=2", script, "exit")
    assert done.returncode == 7
    assert "zeroweave: rank 1 failed with exit code 7" in done.stderr


@pytest.mark.matrix
def test_restarts_with_gloo_recover(tmp_path: Path) -> None:
    path = tmp_path / "fails_once.py"
    path.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1:\n"
        "    raise ValueError('once')\n"
        "dist.barrier()\n"
        "print('done')\n"
    )
    done = zeroweave("run", "--nproc-per-node=2", "--max-restarts=1", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2


def test_scripts_and_modules_run_under_the_runner() -> None:
    arguments = ["--nproc-per-node", "2", "train.py", "--steps", "1"]
    options = under_runner(parse_args(arguments), arguments)
    assert options.module and options.training_script == "zeroweave.report.runner"
    assert options.training_script_args == ["train.py", "--steps", "1"]
    arguments = ["-m", "package.train", "x"]
    options = under_runner(parse_args(arguments), arguments)
    assert options.training_script_args == ["-m", "package.train", "x"]
    arguments = ["--no-python", "train.sh", "x"]
    options = under_runner(parse_args(arguments), arguments)
    assert (options.training_script, options.training_script_args) == ("train.sh", ["x"])


@pytest.mark.parametrize(
    ("arguments", "standalone"),
    [
        ([], True),
        (["--nnodes", "1"], True),
        (["--nnodes", "2"], False),
        (["--master-port", "29501"], False),
        (["--master_port=29501"], False),
        (["--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1"], False),
        (["train.py", "--master-port", "29501"], True),
    ],
)
def test_a_free_port_unless_the_user_chose(arguments: list[str], standalone: bool) -> None:
    arguments = [*arguments, "train.py"]
    assert under_runner(parse_args(arguments), arguments).standalone is standalone


def test_reasons() -> None:
    assert exit_reason(3) == "exit code 3"
    assert exit_reason(-9) == "signal 9"
    assert first_line({"message": "ValueError: no\nmore"}) == ": ValueError: no"
    assert first_line("Signal 6 (SIGABRT) received by PID 1") == ""
    assert first_line("") == ""


def test_what_fails_behind_ctrl_c_is_no_failure_of_its_own() -> None:
    assert is_interrupted(KeyboardInterrupt())
    with pytest.raises(ValueError, match="behind it") as behind:
        try:
            raise KeyboardInterrupt
        finally:
            raise ValueError("behind it")
    assert is_interrupted(behind.value)
    with pytest.raises(ValueError, match="as another") as other:
        try:
            raise OSError
        except OSError as error:
            raise ValueError("as another") from error
    assert not is_interrupted(other.value) and not is_interrupted(ValueError())


def test_a_traceback_without_foreign_frames_is_kept_whole() -> None:
    assert own_frames(ValueError()) is None
    try:
        os.stat("/nowhere/at/all")
    except OSError as error:
        assert own_frames(error) is error.__traceback__


def test_the_traceback_of_an_own_error_ends_at_the_callers_line() -> None:
    with pytest.raises(ConfigError) as told:
        zw.initialize(torch.nn.Linear(1, 1), None, {"stag": 3})
    assert "/zeroweave/" in told.traceback[-1].path.as_posix()
    frames = traceback.extract_tb(own_frames(told.value))
    assert [frame.name for frame in frames] == ["test_the_traceback_of_an_own_error_ends_at_the_callers_line"]


@pytest.mark.parametrize("short", [["-n", "2"], ["-n2"], ["--nproc", "2"], ["--nproc=2"]])
def test_short_names_of_the_number_of_ranks(short: list[str]) -> None:
    options = parse([*short, "train.py", "-n", "7", "--nproc", "9"])
    assert options.nproc_per_node == "2" and options.training_script_args == ["-n", "7", "--nproc", "9"]
    assert parse(["train.py"]).nproc_per_node == parse_args(["train.py"]).nproc_per_node


@pytest.mark.parametrize("own", ["--log", "--signal", "--event", "--start", "--log=x", "--max", "-r", "--", "--help"])
def test_options_of_the_script_that_begin_like_torchruns_reach_the_script(own: str) -> None:
    options = parse(["--nnode", "1", "-n", "2", "--max-rest=3", "train.py", own, "7"])
    assert options.training_script == "train.py" and options.training_script_args == [own, "7"]
    assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("1", "2", 3)
    assert parse(["-m", "train", own]).training_script_args == [own]


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--nope", "t.py"], "unrecognized"), (["-n"], "expected one argument"), ([], "required")]
)
def test_wrong_options_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    assert told in capsys.readouterr().err


def test_ranks_that_were_started_again_under_a_static_rendezvous_meet_at_a_store_of_their_own() -> None:
    shared = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    first = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(shared.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert own_store(first | {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}) is None
    assert own_store({"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    ports, kept = {shared.port}, []
    for start in "12":
        ranks = [first | {"RANK": rank, "TORCHELASTIC_RESTART_COUNT": start} for rank in "01"]
        kept += [own_store(rank) for rank in ranks]
        assert {rank["TORCHELASTIC_USE_AGENT_STORE"] for rank in ranks} == {"False"}
        (port,) = {int(rank["MASTER_PORT"]) for rank in ranks}
        dist.TCPStore("localhost", port, is_master=False).set("from", start)
        ports.add(port)
    assert len(ports) == 3
