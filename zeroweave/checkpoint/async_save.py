"""A thread of each rank writes a checkpoint concurrently with the next steps."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence

from zeroweave.checkpoint.writer import Saving
from zeroweave.errors import CheckpointError
from zeroweave.notices import warn
from zeroweave.ranks.control import Control
from zeroweave.runtime.executor import Staging

_RUNS, _DONE, _FAILED = range(3)


class AsyncSave:
    """A `Saving` whose `write` and `publish` have a thread. It is over when `advance` says so.

    A thread, and no process: it reads host memory in place, and ends with the program, however that ends. It holds
    Python's lock only between two pieces of some MiB.
    """

    def __init__(self, saving: Saving, staging: Staging, control: Control, name: str) -> None:
        """`staging`: how the steps begin copies in time. `name`: of the checkpoint, for warnings."""
        self._saving, self._staging, self._control = saving, staging, control
        staging.begin(saving.snapshots)
        self._phases: list[tuple[Callable[[], None], Callable[[], None]]] = [
            (saving.write, saving.exchange),
            (saving.publish, saving.end),
        ]
        """what is left: what the thread does, and what all ranks do together when all threads have done it"""
        self._threads = [_started(saving.write)]
        self._left = weakref.finalize(self, _leave, saving, self._threads, name, control.rank, os.getpid())

    def advance(self, wait: bool) -> bool:
        """Advances as all ranks can without waiting for a thread, or if they `wait`, to the end. True if it is over.

        Collective. CheckpointError on all ranks as soon as one has failed. It is over then.
        """
        self._staging.start_all()  # what no step has begun: perhaps none comes, and frozen buckets have no update
        while self._phases:
            if wait:
                self._threads[-1].join()
            states = {
                theirs[0] for theirs in self._control.all_gather_bytes(bytes([self._state]), "the writers' state")
            }
            if _RUNS in states and _FAILED not in states:
                return False
            if _FAILED in states:
                self._end()
            self._staging.begin({})
            _, together = self._phases.pop(0)
            try:
                together()
            except CheckpointError:
                self._end()
                raise
            if self._phases:
                self._threads.append(_started(self._phases[0][0]))
        self._end()
        return True

    @property
    def _state(self) -> int:
        if self._threads[-1].is_alive():
            return _RUNS
        return _FAILED if self._saving.failed else _DONE

    def _end(self) -> None:
        """No thread runs any more."""
        self._left.detach()
        _stop(self._saving, self._threads)


def _started(job: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=job, name="zeroweave checkpoint", daemon=True)  # `_leave` ends it
    thread.start()
    return thread


def _stop(saving: Saving, threads: Sequence[threading.Thread]) -> None:
    saving.stop()
    for thread in threads:
        if thread is not threading.current_thread():  # which may collect the engine's garbage
            thread.join()


def _leave(saving: Saving, threads: Sequence[threading.Thread], name: str, rank: int, process: int) -> None:
    """The program ends, or drops its engine, before the checkpoint is there."""
    if os.getpid() != process:  # a forked child has copies of the objects: the save is not its own
        return
    _stop(saving, threads)
    if not saving.published:
        saving.discard()
        warn(f"the checkpoint {name} was not finished: engine.destroy() would have waited for it", rank)
