"""Where a log goes: a file, and libraries that draw curves. Sinks are made on rank 0 only."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

FILE: Final = "metrics.jsonl"
Values: TypeAlias = dict[str, Any]


class Sink(NamedTuple):
    """Takes what a log tells, and leaves out what it has no use for.

    `tell(kind, values)`: "run", first, is what the run is; "step" the optimizer steps so far; "figures" those of
    `Log`; "event" what happened.
    """

    name: str
    """what users call it"""
    tell: Callable[[str, Values], object]
    close: Callable[[], object]


def json_lines(folder: Path) -> Sink:
    """`metrics.jsonl`: one object in each line, distinguished by `kind`; a resumed run appends.

    Numbers that JSON does not have (infinite, NaN) are null. OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / FILE).open("a", encoding="utf-8")

    def tell(kind: str, values: Values) -> None:
        if kind != "step":
            line = {"kind": kind, "time": round(time.time(), 3), **values}
            file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
            file.flush()

    return Sink(FILE, tell, file.close)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def _curves(
    name: str, about: Callable[[Values], object], log: Callable[[Values], object], close: Callable[[], object]
) -> Sink:
    """Those of a library: `about` takes what the run is, and `log` the figures that are known, each by its name."""

    def tell(kind: str, values: Values) -> None:
        if kind == "run":
            about(values)
        elif kind == "figures":
            rates = values["learning_rates"]
            names = ["learning_rate"] if len(rates) == 1 else [f"learning_rate_{group}" for group in range(len(rates))]
            known = {**values, **dict(zip(names, rates, strict=True)), "learning_rates": None}
            log({f"zeroweave/{name}": value for name, value in known.items() if value is not None})

    return Sink(name, tell, close)


def _tensorboard(folder: Path | None) -> Sink:
    """Writes to the folder."""
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def log(values: Values) -> None:
        step = values.pop("zeroweave/step")
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def about(run: Values) -> None:
        writer.add_text("run", f"```\n{json.dumps(run, indent=2)}\n```")

    return _curves("TensorBoard", about, log, writer.close)


def _wandb(folder: Path | None) -> Sink:
    """The program's open run, or a new one."""
    wandb = import_module("wandb")
    own = wandb.run is None
    run = wandb.init(dir=None if folder is None else str(folder)) if own else wandb.run
    run.define_metric("zeroweave/step")  # the program may have its own steps
    run.define_metric("zeroweave/*", step_metric="zeroweave/step")

    def about(told: Values) -> None:
        run.config.update({"zeroweave": told}, allow_val_change=True)

    return _curves("Weights & Biases", about, run.log, run.finish if own else lambda: None)


def _mlflow(folder: Path | None) -> Sink:
    """The program's active run, or a new one."""
    mlflow = import_module("mlflow")
    own = mlflow.active_run() is None
    run = (mlflow.start_run() if own else mlflow.active_run()).info.run_id

    def log(values: Values) -> None:
        mlflow.log_metrics(values, step=values.pop("zeroweave/step"), run_id=run)

    def about(told: Values) -> None:
        mlflow.log_dict(told, "zeroweave.json", run_id=run)

    return _curves("MLflow", about, log, mlflow.end_run if own else lambda: None)


CURVES: Final = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
"""What makes each, of `log_dir`; by the names of `log.to`, which are those of the libraries."""
