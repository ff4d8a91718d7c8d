"""Where the config wants a log to go."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from zeroweave.config import Config
from zeroweave.engine.logs.sinks import JsonLines, MLflow, Sink, TensorBoard, WeightsAndBiases
from zeroweave.errors import ConfigError
from zeroweave.notices import on_stderr


def is_asked_for(config: Config) -> bool:
    """Does anything go anywhere?"""
    return config.log_dir is not None or config.log.progress or bool(config.log.to)


def refuse_missing(config: Config) -> None:
    """ConfigError for a library of `log.to` that is not installed."""
    if missing := [name for name in config.log.to if find_spec(name) is None]:
        raise ConfigError(f"[ZW107] log.to: not installed: {', '.join(missing)}; pip install {' '.join(missing)}")


def sinks_of(config: Config, ends: ExitStack) -> list[Sink]:
    """The sinks, for rank 0; `ends` closes each. ConfigError where `log_dir` cannot be written."""
    sinks: list[Sink] = []

    def add(make: Callable[[], Sink]) -> None:
        sinks.append(make())
        ends.callback(sinks[-1].close)

    folder = None if config.log_dir is None else Path(config.log_dir)
    try:
        if folder is not None:
            add(lambda: JsonLines(folder))
            if "tensorboard" in config.log.to:
                add(lambda: TensorBoard(folder))
    except OSError as error:
        raise ConfigError(f"[ZW107] log_dir {config.log_dir!r} cannot be written: {error}") from error
    if "wandb" in config.log.to:
        add(lambda: WeightsAndBiases(folder))
    if "mlflow" in config.log.to:
        add(MLflow)
    if config.log.progress:
        from zeroweave.engine.logs.terminal import Terminal

        add(lambda: Terminal(on_stderr(), config.log.steps))
    return sinks
