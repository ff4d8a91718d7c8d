"""Where a log goes. Each sink is made on rank 0 only, and takes what `Log` tells."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

FILE: Final = "metrics.jsonl"


@dataclass(frozen=True)
class Figures:
    """How the steps since the last figures went, on all ranks together. What is not known is None.

    step: optimizer steps so far, with those that were skipped. loss: what the gradients of a step are of, as far as
    `engine.backward`, `engine.scale` and `engine.train_step` know it: the mean over steps and ranks. seconds: of one
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
        """What is known, each by a name of its own: for what draws curves."""
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
    """`metrics.jsonl`: one object in each line, told apart by `kind`; a run that goes on appends.

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


class TensorBoard(Sink):
    """Curves and events for TensorBoard, in the folder."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def begin(self, about: dict[str, Any]) -> None:
        self._writer.add_text("run", f"```\n{json.dumps(about, indent=2)}\n```")

    def figures(self, figures: Figures) -> None:
        for name, value in figures.values():
            self._writer.add_scalar(f"zeroweave/{name}", value, figures.step)
        self._writer.flush()

    def happened(self, happened: Happened) -> None:
        self._writer.add_text(f"zeroweave/{happened.kind}", happened.reason, happened.step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Sink):
    """Curves in the program's open run of Weights & Biases, or in one of its own. Events are not sent."""

    name = "Weights & Biases"

    def __init__(self, folder: Path | None) -> None:
        wandb = import_module("wandb")
        self._own = wandb.run is None
        self._run = wandb.init(dir=None if folder is None else str(folder)) if self._own else wandb.run
        self._run.define_metric("zeroweave/step")  # the program may have steps of its own
        self._run.define_metric("zeroweave/*", step_metric="zeroweave/step")

    def begin(self, about: dict[str, Any]) -> None:
        self._run.config.update({"zeroweave": about}, allow_val_change=True)

    def figures(self, figures: Figures) -> None:
        values = {f"zeroweave/{name}": value for name, value in figures.values()}
        self._run.log({"zeroweave/step": figures.step, **values})

    def close(self) -> None:
        if self._own:
            self._run.finish()


class MLflow(Sink):
    """Curves in the program's active run of MLflow, or in one of its own. Events are not sent."""

    name = "MLflow"

    def __init__(self) -> None:
        self._mlflow = import_module("mlflow")
        self._own = self._mlflow.active_run() is None
        self._run = (self._mlflow.start_run() if self._own else self._mlflow.active_run()).info.run_id

    def begin(self, about: dict[str, Any]) -> None:
        self._mlflow.log_dict(about, "zeroweave.json", run_id=self._run)

    def figures(self, figures: Figures) -> None:
        values = {f"zeroweave/{name}": value for name, value in figures.values()}
        self._mlflow.log_metrics(values, step=figures.step, run_id=self._run)

    def close(self) -> None:
        if self._own:
            self._mlflow.end_run()
