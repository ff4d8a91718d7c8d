"""Worker processes that share one gloo process group and run jobs together.

A `Pool` starts its workers at the first job and keeps them for all later ones, because importing torch costs
more than most jobs. A job is a module-level function with picklable arguments; every rank calls it at the same
time and returns a picklable value. A job that passes its deadline, or that raises on some ranks while others
wait for them, ends with every rank's stack. The pool then starts afresh for the next job, so that one bad test
cannot spoil another; it also does behind a job that leaves an engine running.
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

DEADLINE = 300.0
START = 300.0
"""Seconds that workers get to import torch and to find each other; a job's deadline counts from there."""
GRACE = 60.0
"""Seconds that the other ranks get to return once one rank has raised."""


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a job: a value, a traceback, or the end of its process.

    `kind` is the exception's class name and `message` its text with notes; `exit_code` is None while the process lives,
    and `stacks` says where its threads were if a signal ended it; `ended` is the wall clock (`time.time()`) at which
    the pool saw the value, the traceback or the end. `running`: the job has left threads of an engine behind, as one
    does that raises before it closes its engine.
    """

    rank: int
    ended: float
    value: Any = None
    kind: str | None = None
    message: str = ""
    trace: str = ""
    running: bool = False
    exit_code: int | None = None
    stderr: str = ""
    stacks: str = ""

    @property
    def failed(self) -> bool:
        return self.kind is not None or self.exit_code is not None

    def describe(self) -> str:
        head = f"--- rank {self.rank}: "
        if self.exit_code is not None:
            return f"{head}process ended with exit code {self.exit_code}\n{self.stderr[-4000:]}\n{self.stacks[:8000]}"
        if self.kind is not None:
            return f"{head}{self.kind}\n{self.trace}{self.stderr[-1000:]}"
        return f"{head}returned"


def describe(outcomes: list[Outcome]) -> str:
    """What every rank made of a job; a traceback that several ranks share is shown once."""
    parts: list[str] = []
    shown: dict[str, int] = {}
    for outcome in outcomes:
        first = shown.setdefault(outcome.trace, outcome.rank) if outcome.trace else outcome.rank
        parts.append(outcome.describe() if first == outcome.rank else f"--- rank {outcome.rank}: as rank {first}")
    return "\n".join(parts)


class JobFailed(AssertionError):
    """A job raised, or a worker's process ended, where the test expected values."""


class DeadlineExceeded(AssertionError):
    """A job did not return in time; the message holds every rank's stacks."""


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    pipe: Connection
    stderr: Path
    stacks: Path
    read: int = field(default=0)

    def new_stderr(self) -> str:
        """What the worker has written to stderr since the last call."""
        data = self.stderr.read_bytes() if self.stderr.exists() else b""
        text, self.read = data[self.read :].decode(errors="replace"), len(data)
        return text

    def last_stacks(self) -> str:
        """Where its threads were when it was asked, or when a signal ended it."""
        return self.stacks.read_text() if self.stacks.exists() else "(no stacks)"


class Pool:
    """`world` worker processes with one gloo group; see the module's docstring.

    `directory` receives stderr and stack files. `fresh_dynamo` resets Dynamo between jobs, so that Dynamo's
    limits, which count per process, see each job alone. `forked` workers come from a process that has imported torch
    already, and start at once; what they lack is a hash seed of their own, by which ranks iterate over sets of strings
    in different orders.
    """

    def __init__(
        self,
        world: int,
        directory: Path,
        deadline: float = DEADLINE,
        fresh_dynamo: bool = True,
        forked: bool = False,
    ) -> None:
        self.world = world
        self.deadline = deadline
        self._context = forking() if forked else multiprocessing.get_context("spawn")
        self._fresh_dynamo = fresh_dynamo
        self._directory = directory
        self._workers: list[_Worker] = []
        self._store: dist.TCPStore | None = None
        self._starts = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> list[Any]:
        """Every rank's value of `function(*args)`, in rank order; raises `JobFailed` with all tracebacks otherwise."""
        outcomes = self.outcomes(function, *args, deadline=deadline)
        if any(outcome.failed for outcome in outcomes):
            self.kill()
            raise JobFailed(f"{getattr(function, '__name__', function)}{args}\n{describe(outcomes)}")
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any, deadline: float | None = None) -> list[Outcome]:
        """As `run`, for jobs in which ranks are expected to raise or to end."""
        self._start()
        for worker in self._workers:
            worker.new_stderr()
            worker.pipe.send((function, args))
        outcomes = self._collect(time.monotonic() + (self.deadline if deadline is None else deadline))
        apart = len({outcome.failed for outcome in outcomes}) > 1
        if apart or any(outcome.exit_code is not None or outcome.running for outcome in outcomes):
            self.kill()
        return outcomes

    def first_end(self, function: Callable[..., Any], *args: Any) -> Outcome:
        """What the first rank makes of a job, rather one whose process ends; the others are killed then."""
        self._start()
        for worker in self._workers:
            worker.new_stderr()
            worker.pipe.send((function, args))
        ready = wait([each for w in self._workers for each in (w.process.sentinel, w.pipe)], self.deadline)
        if not ready:
            raise self._late([], self._workers)
        outcomes = [self._receive(w) for w in self._workers if w.pipe in ready or w.process.sentinel in ready]
        self.kill()
        return max(outcomes, key=lambda outcome: outcome.exit_code is not None)

    def _collect(self, end: float) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.world:
            waiting = [worker for worker in self._workers if worker.rank not in outcomes]
            ready = wait(
                [w.pipe for w in waiting] + [w.process.sentinel for w in waiting],
                max(0.0, end - time.monotonic()),
            )
            if not ready:
                raise self._late([outcomes[rank] for rank in sorted(outcomes)], waiting)
            for worker in waiting:
                if worker.pipe in ready or worker.process.sentinel in ready:
                    outcomes[worker.rank] = self._receive(worker)
                    if outcomes[worker.rank].failed:
                        end = min(end, time.monotonic() + GRACE)
        return [outcomes[rank] for rank in range(self.world)]

    def _receive(self, worker: _Worker) -> Outcome:
        now = time.time()
        try:
            reply = worker.pipe.recv() if worker.pipe.poll() else None
        except (EOFError, ConnectionResetError):
            reply = None
        if reply is None:
            worker.process.join()
            said = {"stderr": worker.new_stderr(), "stacks": worker.last_stacks()}
            return Outcome(worker.rank, now, exit_code=worker.process.exitcode, **said)
        return Outcome(worker.rank, now, **reply, stderr=worker.new_stderr())

    def _late(self, outcomes: list[Outcome], waiting: list[_Worker]) -> DeadlineExceeded:
        for worker in waiting:
            if worker.process.is_alive() and worker.process.pid is not None:
                os.kill(worker.process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        parts = [outcome.describe() for outcome in outcomes]
        for worker in waiting:
            stacks = worker.last_stacks()
            parts.append(f"--- rank {worker.rank} did not return:\n{stacks}\n{worker.new_stderr()[-2000:]}")
        self.kill()
        return DeadlineExceeded("\n".join(parts))

    def _start(self) -> None:
        if self._workers and all(worker.process.is_alive() for worker in self._workers):
            return
        self.kill()
        self._starts += 1
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = self._context.Pipe()
            stderr, stacks = (self._directory / f"{kind}.{self._starts}.{rank}" for kind in ("stderr", "stacks"))
            arguments = (
                rank,
                self.world,
                self._store.port,
                theirs,
                str(stderr),
                str(stacks),
                self._fresh_dynamo,
                dict(os.environ),
            )
            process = self._context.Process(target=_serve, args=arguments, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()
            self._workers.append(_Worker(rank, process, ours, stderr, stacks))
        started = self._collect(time.monotonic() + START)
        if any(outcome.failed for outcome in started):
            self.kill()
            raise JobFailed(f"the workers did not start\n{describe(started)}")

    def close(self) -> None:
        """Ask the workers to leave in order (process groups destroyed); kill those that do not within ten seconds."""
        for worker in self._workers:
            try:
                worker.pipe.send(None)
            except OSError:
                pass
        end = time.monotonic() + 10.0
        for worker in self._workers:
            worker.process.join(max(0.0, end - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the workers at once; the next job starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []
        self._store = None


Pools = Callable[[int], Pool]
"""The fixtures `pools` and `disposable`: a pool of so many ranks."""


def forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    # None of these starts a thread, which would be missing in the workers.
    context.set_forkserver_preload(["torch.distributed", "torch._inductor.compile_fx", "zeroweave.engine.assembly"])
    return context


def _serve(
    rank: int,
    world: int,
    port: int,
    jobs: Connection,
    stderr: str,
    stacks: str,
    fresh_dynamo: bool,
    environment: dict[str, str],
) -> None:
    """A worker's life: join the group, then run jobs until told to leave."""
    os.environ.clear()  # a forked one has that of the first test
    os.environ.update(environment)
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    stack_file = open(stacks, "w")
    faulthandler.enable(stack_file)
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(minutes=20))
    jobs.send({"value": "ready"})
    try:
        while (job := jobs.recv()) is not None:
            gc.freeze()  # each of the many collections to come would walk all that imported modules hold
            jobs.send({**_answer(*job), "running": _engine_runs()})
            if fresh_dynamo:
                torch._dynamo.reset()
            gc.collect()
    except (EOFError, BrokenPipeError):
        pass  # the test process has gone
    finally:
        dist.destroy_process_group()


def _answer(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return {"value": function(*args)}
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return {"kind": type(error).__name__, "message": text, "trace": traceback.format_exc()}


def _engine_runs() -> bool:
    """Has an engine that nobody closed left its threads?"""
    return any(thread.name.startswith("zeroweave ") for thread in threading.enumerate())
