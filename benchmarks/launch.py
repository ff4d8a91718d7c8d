"""Starts the ranks of one measurement in fresh processes, waits for them and collects their records."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import peers
from benchmarks.worker import Record, Spec

ROOT = Path(__file__).resolve().parent.parent
# What the ranks still need once they have written their records: to close the process group and to exit.
CLOSING_SECONDS = 30.0


class LaunchError(RuntimeError):
    """A measurement failed; the message ends with the last lines of the ranks that failed."""


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="zeroweave-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def meeting() -> Iterator[int]:
    """The port of a store at which ranks meet. This process has it, as torchrun would: nobody can take the port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield store.port


def join(rank: int, world: int, port: int) -> torch.device:
    """Makes this process a rank of the default process group; returns what it computes on: GPU `rank`, or the CPU."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), **address(port))
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    return device


def spawned(main: Callable[[int, int, int, Namespace, str], None], world: int, arguments: Namespace) -> Any:
    """Runs `main(rank, world, port, arguments, path)` in new processes; what rank 0 leaves at the path, as JSON."""
    with temporary_folder() as folder, meeting() as port:
        result = folder / "result.json"
        mp.spawn(main, (world, port, arguments, str(result)), nprocs=world)  # type: ignore[attr-defined]
        return json.loads(result.read_text())


def address(port: int) -> dict[str, str]:
    """torchrun's variables for ranks that meet at `meeting`'s port."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def environment(
    rank: int, world: int, port: int, cache: Path, variables: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The parent's environment, torchrun's variables, compiler caches in `cache`, and `variables`."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        **address(port),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        **(variables or {}),
    }


def run(spec: Spec, world: int, timeout: float, log: TextIO, cache: Path | None = None) -> list[Record]:
    """The records of all ranks in order. The compiler's caches start empty, or are those kept in `cache`.

    Otherwise as `ranks`.
    """
    with temporary_folder() as folder:
        variables = peers.environment(spec.impl)
        found = ranks("benchmarks.worker", spec.impl, asdict(spec), folder, world, timeout, log, cache, variables)
        return [Record(**record) for record in found]


def ranks(
    module: str,
    name: str,
    request: Mapping[str, Any],
    folder: Path,
    world: int,
    timeout: float,
    log: TextIO,
    cache: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Runs `module` on `world` ranks with `request` as `spec.json`; what each wrote as `rank<r>.json`, beside it.

    `folder` is where these files lie, `variables` are added to the ranks' environment. What the ranks print goes to
    `log`; rank 0's lines are also printed as they come. LaunchError when a rank fails or `timeout` seconds pass; no
    process is left behind.
    """
    path = folder / "spec.json"
    path.write_text(json.dumps(request))
    outputs = [folder / f"rank{rank}.log" for rank in range(world)]
    command = [sys.executable, "-m", module, str(path)]
    with ExitStack() as stack:
        port = stack.enter_context(meeting())
        processes = []
        for rank, output in enumerate(outputs):
            handle = stack.enter_context(output.open("w"))
            env = environment(rank, world, port, cache or folder / "cache", variables)
            process = subprocess.Popen(command, env=env, stdout=handle, stderr=subprocess.STDOUT)
            processes.append(process)
            stack.callback(stop, process)
        failure = wait(processes, folder, outputs[0], timeout)
    for rank, output in enumerate(outputs):
        log.write(f"===== {name} rank {rank}\n{output.read_text(errors='replace')}\n")
    log.flush()
    if failure is not None:
        tails = "\n".join(f"--- rank {r}:\n{tail(o)}" for r, o in enumerate(outputs))
        raise LaunchError(f"{name}: {failure}\n{tails}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def wait(processes: Sequence[subprocess.Popen[bytes]], folder: Path, follow: Path, timeout: float) -> str | None:
    """Waits for all ranks, printing rank 0's lines as they come. The reason of a failure, or None."""
    deadline = time.monotonic() + timeout
    recorded: float | None = None
    with follow.open() as lines:
        while True:
            print(lines.read(), end="", flush=True)
            codes = [process.poll() for process in processes]
            if all(code == 0 for code in codes):
                return None
            complete = all((folder / f"rank{rank}.json").exists() for rank in range(len(processes)))
            if complete and recorded is None:
                recorded = time.monotonic()
            failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed and not complete:
                time.sleep(2.0)  # the others may say why as well
                return ", ".join(f"rank {rank} exited with {code}" for rank, code in failed)
            overdue = recorded is not None and time.monotonic() - recorded > CLOSING_SECONDS
            if overdue or (failed and complete):
                print(f"warning: measured, but not closed cleanly: exit codes {codes}", flush=True)
                return None
            if time.monotonic() > deadline:
                return f"not done after {timeout:g} s"
            time.sleep(0.1)


def tail(path: Path, lines: int = 30) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
