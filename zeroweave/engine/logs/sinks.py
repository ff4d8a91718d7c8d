"""Where a log goes. Each sink is made on rank 0 only, and takes what `Log` tells."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

FILE: Final = "metrics.jsonl"
_Take = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Figures:
    """How the steps since the last figures went, on all ranks together. What is not known is None.

    step: optimizer steps so far, with those that were skipped. loss: what the gradients of a step are of, where
    `engine.backward`, `engine.scale` or `engine.train_step` knows it: the mean over steps and ranks. seconds: of one
    step on the wall clock, with all that the program did between steps. memory: bytes of device memory that were
    allocated at most, on the rank with most. exposed: seconds of a step in which computation waits for collectives, as
    predicted from what its schedule's instructions have cost. gradient_norm: before the last clipping. skipped: steps
    so far.
    """

    step: int
    loss: float | None
    seconds: float
    tokens_per_second: float | None
    memory: int | None
    exposed: float | None
    learning_rates: tuple[float | None, ...]
    loss_scale: float
    gradient_norm: float | None
    skipped: int

    def values(self) -> Iterator[tuple[str, float]]:
        """What is known, each by its own name: for what draws curves."""
        for name, value in asdict(self).items():
            if name == "learning_rates":
                several = len(value) > 1
                for group, rate in enumerate(value):
                    if rate is not None:
                        yield f"learning_rate_{group}" if several else "learning_rate", rate
            elif name != "step" and value is not None:
                yield name, float(value)


@dataclass(frozen=True)
class Happened:
    """An event (see `notices.Event`), the step at whose end it was told, and the rank."""

    step: int
    rank: int
    kind: str
    reason: str


class Sink:
    """Takes what a log tells, and leaves out what it has no use for."""

    name = ""
    """what users call it"""

    def begin(self, about: dict[str, Any]) -> None:
        """First: what the run is, as JSON has it."""

    def step_ended(self, step: int) -> None:
        """So many optimizer steps so far."""

    def figures(self, figures: Figures) -> None:
        """How the last steps went."""

    def happened(self, happened: Happened) -> None:
        """An event."""

    def close(self) -> None:
        """Last."""


class JsonLines(Sink):
    """`metrics.jsonl`: one object in each line, distinguished by `kind`; a resumed run appends.

    Numbers that JSON does not have (infinite, NaN) are null. OSError where the folder cannot be written.
    """

    name = FILE

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE).open("a", encoding="utf-8")

    def begin(self, about: dict[str, Any]) -> None:
        self._write("run", about)

    def figures(self, figures: Figures) -> None:
        self._write("figures", asdict(figures))

    def happened(self, happened: Happened) -> None:
        self._write("event", {"event" if k == "kind" else k: v for k, v in asdict(happened).items()})

    def close(self) -> None:
        self._file.close()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        line = {"kind": kind, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        self._file.flush()


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


class Tracker(Sink):
    """The curves of a library. Events are not sent.

    `about` gets what the run is, and `log` the figures, each by name, `zeroweave/step` among them.
    """

    def __init__(self, name: str, about: _Take, log: _Take, close: Callable[[], object]) -> None:
        self.name, self._about, self._log, self._close = name, about, log, close

    def begin(self, about: dict[str, Any]) -> None:
        self._about(about)

    def figures(self, figures: Figures) -> None:
        self._log({"zeroweave/step": figures.step, **{f"zeroweave/{name}": value for name, value in figures.values()}})

    def close(self) -> None:
        self._close()


def _tensorboard(folder: Path | None) -> Tracker:
    """Writes to the folder."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(values: dict[str, Any]) -> None:
        step = values.pop("zeroweave/step")
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def about(run: dict[str, Any]) -> None:
        writer.add_text("run", f"```\n{json.dumps(run, indent=2)}\n```")

    return Tracker("TensorBoard", about, log, writer.close)


def _wandb(folder: Path | None) -> Tracker:
    """The program's open run, or a new one."""
    wandb = import_module("wandb")
    own = wandb.run is None
    run = wandb.init(dir=None if folder is None else str(folder)) if own else wandb.run
    run.define_metric("zeroweave/step")  # the program may have its own steps
    run.define_metric("zeroweave/*", step_metric="zeroweave/step")

    def about(told: dict[str, Any]) -> None:
        run.config.update({"zeroweave": told}, allow_val_change=True)

    return Tracker("Weights & Biases", about, run.log, run.finish if own else lambda: None)


def _mlflow(folder: Path | None) -> Tracker:
    """The program's active run, or a new one."""
    mlflow = import_module("mlflow")
    own = mlflow.active_run() is None
    run = (mlflow.start_run() if own else mlflow.active_run()).info.run_id

    def log(values: dict[str, Any]) -> None:
        mlflow.log_metrics(values, step=values.pop("zeroweave/step"), run_id=run)

    def about(told: dict[str, Any]) -> None:
        mlflow.log_dict(told, "zeroweave.json", run_id=run)

    return Tracker("MLflow", about, log, mlflow.end_run if own else lambda: None)


TRACKERS: Final = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
"""What makes each, of `log_dir`; by the names of `log.to`, which are those of the libraries."""
