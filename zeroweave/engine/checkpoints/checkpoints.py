"""Checkpoints of one engine: when they are written and loaded, and when they are refused."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from zeroweave.checkpoint import random_numbers
from zeroweave.checkpoint.async_save import AsyncSave
from zeroweave.checkpoint.compatibility import Compatibility
from zeroweave.checkpoint.export import CONFIGS, cast, export
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.reader import opened
from zeroweave.checkpoint.writer import Saving, words
from zeroweave.comm import rounding
from zeroweave.engine.checkpoints.content import Loaded, Saved
from zeroweave.engine.context import EngineContext
from zeroweave.engine.parameter_access import ParameterAccess
from zeroweave.engine.scheduler import Scheduler
from zeroweave.engine.state_dict import listed, stream
from zeroweave.engine.step import OptimizerStep
from zeroweave.engine.window import Window
from zeroweave.errors import CheckpointError, EngineError
from zeroweave.notices import warn
from zeroweave.parameters.foreign import foreign_parameters
from zeroweave.ranks.faults import Faults
from zeroweave.ranks.signals import NUMBERS

StrPath: TypeAlias = str | os.PathLike[str]
Plain: TypeAlias = Mapping[str, Any]
"""Values that `plain.encode` takes, by name."""

_LOG: Final = logging.getLogger("zeroweave")


class Checkpoints:
    """Saves one engine and loads into it. The public methods are those of `Engine`, which tells more of them."""

    def __init__(
        self,
        context: EngineContext,
        window: Window,
        step: OptimizerStep,
        scheduler: Scheduler,
        values: ParameterAccess,
        faults: Faults,
    ) -> None:
        self._context, self._control, self._window = context, context.control, window
        self._values, self._faults = values, faults
        self._scheduler, self._staging = scheduler, context.runtime.replay.executor.staging
        self._saved, self._loaded = Saved(context, window, step, faults), Loaded(context, window, step)
        self._async_save: AsyncSave | None = None
        """the save that runs while steps run"""
        self._client_state: Callable[[], Plain] = dict
        self._data: Any = None
        """both: what a checkpoint has that a signal asks for"""

    @contextmanager
    def alone(self, call: str) -> Iterator[None]:
        """Guards a call that all ranks make, between two windows. A save that still runs is over then."""
        with self._context.guard(call):
            what, window = f"{call}()", self._window
            window.refuse_inside(what)
            window.refuse_coalescing(what)
            window.refuse_computing(what, "call it between them")
            window.refuse_waiting(what)
            self._context.guard.meet()
            self.finish()
            yield

    def save(
        self, path: StrPath, tag: str | None, client_state: Plain | None, data: Any, asynchronous: bool = False
    ) -> str:
        _check(path, tag)
        if not isinstance(client_state, Mapping | None):
            raise EngineError(f"client_state is a {type(client_state).__name__}: pass a dictionary, or nothing")
        client = dict(client_state or {})
        with self.alone("save"):
            if (
                self._context.optimizer is not None
            ):  # what groups hold by now has no name, or no values that were trained
                self._context.optimizer.groups.refuse_changed()
            # The directory that the process works in may be another one by the time that a thread writes.
            step, folder = self._context.progress.step, Folder(Path(path).absolute() if asynchronous else path)
            keeping, stage = self._context.config.checkpoint, self._context.config.stage
            keep = None if keeping.keep_last is None else (keeping.keep_last, keeping.keep_every)
            staged = asynchronous and self._stages()
            content = self._saved.content(client, data, asynchronous)
            folder = self._faults.before(folder, "publish", "publish")
            saving = Saving(folder, tag, step, stage, content, self._control, keep)
            if asynchronous:
                self._async_save = AsyncSave(saving, self._staging, self._control, str(folder.path / saving.tag))
                if not staged:  # nothing else would begin copies before the updates
                    self._staging.start_all()
            else:
                saving.finish()
            return saving.tag

    def _stages(self) -> bool:
        """Makes the next window begin copies for a save. True if it will. Collective."""
        if not self._context.between_windows:
            return False
        if not self._scheduler.settings.stage:
            self._scheduler.reschedule({"stage": True})
        return self._scheduler.schedule is not None

    def finish(self) -> None:
        """Waits for a save that still runs. Collective."""
        if (failure := self._advance(wait=True)) is not None:
            raise failure

    def close(self) -> None:
        """As `finish`, where the engine ends: what has failed is raised when all else has ended."""
        if self._async_save is not None:
            self._context.guard.meet()
        if (failure := self._advance(wait=True)) is not None:
            self._context.ends.callback(_raise, failure)

    def _advance(self, wait: bool) -> CheckpointError | None:
        """Advances an asynchronous save, to its end if the ranks `wait`. Returns the failure, or None."""
        background, self._async_save = self._async_save, None
        try:
            if background is not None and not background.advance(wait):
                self._async_save = background
        except CheckpointError as error:
            return error
        return None

    def on_signal(self, client_state: Callable[[], Plain] | None, data: Any) -> None:
        self._client_state, self._data = client_state or dict, data

    def step_ended(self, boundary: bool) -> None:
        """Advances an asynchronous save; at the boundary, signals are obeyed. Collective."""
        if self._context.transport.skips:
            return
        signals, failure = self._context.agreements.notes.take(NUMBERS) if boundary else frozenset(), None
        if self._async_save is not None:
            with self._context.guard("step"):
                failure = self._advance(wait=bool(signals))
        if signals:
            if failure is not None and self._control.rank == 0:
                _LOG.warning("zeroweave: %s", failure)  # the job may end here
            self._obey(signals)
        if failure is not None:
            with self._context.guard("step"):
                raise failure

    def _obey(self, signals: frozenset[signal.Signals]) -> None:
        """Saves, and ends the job, as signals ask for that all ranks know of. Collective."""
        folder = self._context.config.checkpoint.save_on_signal
        assert folder is not None  # else no signal is handled
        tag, ends = self.save(folder, None, self._client_state(), self._data), signal.SIGTERM in signals
        if self._control.rank == 0:
            names = " and ".join(sorted(number.name for number in signals))
            _LOG.warning("zeroweave: %s: saved as %s%s", names, Path(folder) / tag, "; the job ends" if ends else "")
        if ends:
            raise SystemExit(128 + signal.SIGTERM)

    def load(self, path: StrPath, tag: str | None, strict: bool, data: Any, missing_ok: bool) -> dict[str, Any]:
        _check(path, tag)
        with self.alone("load"):
            folder = Folder(path)
            if missing_ok and self._control.broadcast_object(folder.empty, label="whether there is a checkpoint"):
                return {}
            with opened(folder, tag, self._control) as reader:
                compatibility = Compatibility(reader.manifest, self._loaded.wanted(), strict)
                compatibility.check(self._control)
                # First: there may be no memory for it, and then nothing has changed.
                client = compatibility.client(reader)
                if data is not None:  # it may refuse, too
                    _take_position(data, compatibility.data(self._control.rank, self._control.world))
                self._loaded.load_extra(compatibility)
                if (numbers := compatibility.values.get(f"rank/{self._control.rank}/random")) is not None:
                    random_numbers.restore(numbers, self._context.device)
                with self._values.rewriting("load()"):
                    self._loaded.load(reader, compatibility)
            return client

    def export(self, path: StrPath, dtype: torch.dtype | None, shard_bytes: int) -> None:
        _check(path, None)
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
            raise EngineError(
                f"the dtype of an export is {dtype!r}: pass a floating one, as torch.bfloat16 is, or none"
            )
        if type(shard_bytes) is not int or shard_bytes < 1:
            raise EngineError(f"shard_bytes of an export is {shard_bytes!r}: pass a number of bytes, 1 or more")
        with self.alone("export"):
            self._values.tell_left_out("export()")
            failure, items = "", stream(self._context)
            cause: Exception | None = None
            if foreign := foreign_parameters(self._context.model):
                warn(f"the export leaves out frozen parameters that are not sharded: {foreign}", self._control.rank)
            if self._control.rank == 0:
                tensors = (rounding.cast(value, cast(value.dtype, dtype)) for _, value in items)
                try:
                    all_of = [
                        Part(name, shape, cast(kind, dtype), 0, prod(shape))
                        for name, shape, kind in listed(self._context)
                    ]
                    export(Path(path), all_of, tensors, shard_bytes, self._save_config)
                except (OSError, CheckpointError) as error:
                    failure, cause = words(error), error
            for _ in items:
                pass  # rank 0 takes part in what gathers are left, also where it has failed before the first
            if failure := self._control.broadcast_object(failure, label="the end of an export"):
                raise CheckpointError(f"[ZW610] {path} was not exported: {failure}") from cause

    def _save_config(self, folder: Path) -> None:
        """Models of transformers have a config, which `from_pretrained` reads."""
        for config in (getattr(self._context.model, name, None) for name in CONFIGS):
            if config is not None and hasattr(config, "save_pretrained"):
                try:
                    config.save_pretrained(folder)
                except Exception as error:  # of any kind: the other ranks wait to be told
                    raise CheckpointError(f"[ZW610] {type(config).__name__}.save_pretrained: {words(error)}") from error


def _check(path: StrPath, tag: str | None) -> None:
    """EngineError for what is no path and no tag, before anything is begun."""
    if not isinstance(path, str | os.PathLike):
        raise EngineError(f"the folder of a checkpoint is {path!r}: pass a string or a path, the same on all ranks")
    if not isinstance(tag, str | None):
        raise EngineError(f"the tag of a checkpoint is {tag!r}: pass a string, or nothing")


def _take_position(data: Any, position: Any) -> None:
    try:
        data.load_state_dict(position)
    except EngineError:
        raise
    except Exception as error:  # a loader of another library may raise anything
        raise CheckpointError(
            f"[ZW609] the position of data cannot be taken: {type(error).__name__}: {error}"
        ) from error


def _raise(failure: Exception) -> None:
    raise failure
