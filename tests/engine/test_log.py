"""What is told of a run while it goes, on one rank."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import zeroweave as zw
from zeroweave.engine.logs.log import tokens_of
from zeroweave.engine.logs.sinks import FILE, json_lines
from zeroweave.engine.logs.terminal import Terminal
from zeroweave.errors import ConfigError

EAGER = {"compile": {"enabled": False}}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.square().mean()


def started(config: dict[str, Any]) -> zw.Engine:
    model = Tagger()
    return zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 2, **EAGER, **config})


def ids(index: int, rows: int = 4) -> Tensor:
    return torch.arange(index, index + 3 * rows).remainder(16).view(rows, 3)


def lines(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    return [each for each in found if kind in (None, each["kind"])]


def train(engine: zw.Engine, steps: int) -> list[float]:
    return [float(engine.train_step({"input_ids": ids(step)})) for step in range(steps)]


# ---------------------------------------------------------------------- figures
def test_figures_are_those_of_the_steps_since_the_last_ones(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "logs"
    with started({"log_dir": str(folder), "log": {"every": 3}, "gradient_clipping": 0.5}) as engine:
        losses = train(engine, 8)
        norm = engine.get_global_grad_norm()
    run, told = lines(folder, "run"), lines(folder, "figures")
    assert len(run) == 1 and run[0]["world"] == 1 and run[0]["config"]["log"]["every"] == 3
    assert run[0]["model"] == "Tagger" and run[0]["versions"]["PyTorch"] == torch.__version__
    # The first step, every third one, and at the end what is left.
    assert [each["step"] for each in told] == [1, 3, 6, 8]
    means = [losses[0], sum(losses[1:3]) / 2, sum(losses[3:6]) / 3, sum(losses[6:]) / 2]
    assert [each["loss"] for each in told] == pytest.approx(means, rel=1e-6)
    tokens = [each["tokens_per_second"] * each["seconds"] for each in told]
    assert tokens == pytest.approx([12.0] * 4), "12 tokens a step"
    assert told[-1]["gradient_norm"] == pytest.approx(norm) and told[-1]["learning_rates"] == [0.1]
    assert all(each["seconds"] > 0 and each["memory"] is None and each["skipped"] == 0 for each in told)


def test_micro_steps_of_one_window_are_one_step(tmp_path: Path) -> None:
    config = {"log_dir": str(tmp_path), "log": {"every": 1}, "gradient_accumulation_steps": 2}
    with started(config) as engine:
        losses = train(engine, 4)
    told = lines(tmp_path, "figures")
    assert [each["loss"] for each in told] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2], rel=1e-6)
    assert [round(each["tokens_per_second"] * each["seconds"]) for each in told] == [24, 24]


def test_a_loss_is_what_the_gradients_are_of(tmp_path: Path) -> None:
    """Two losses of one micro-step add up, a block divides nothing, and what the program has divided stays so."""
    with started({"log_dir": str(tmp_path), "log": {"every": 1}, "gradient_accumulation_steps": 2}) as engine:
        one, other = (float(engine(ids(each)).detach()) for each in (0, 1))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(ids(0)) / 4, scale_wrt_gas=False)
        engine.backward(engine(ids(1)))
        engine.step()
        engine.set_gradient_accumulation_boundary(None)
        third, fourth = (float(engine(ids(each)).detach()) for each in (0, 1))
        with engine.coalesce_grad_reduction():
            for each in (0, 1):
                engine.backward(engine(ids(each)))
        engine.step()
    told = [each["loss"] for each in lines(tmp_path, "figures")]
    assert told == pytest.approx([one / 4 + other / 2, third + fourth], rel=1e-6)


def test_the_ordinary_loop_tells_the_same_as_train_step(tmp_path: Path) -> None:
    told = []
    for name in ("train_step", "backward", "scale"):
        with started({"log_dir": str(tmp_path / name), "log": {"every": 2}}) as engine:
            for step in range(4):
                if name == "train_step":
                    engine.train_step(ids(step))
                elif name == "backward":
                    engine.backward(engine(ids(step)))
                    engine.step()
                else:
                    engine.scale(engine(ids(step))).backward()
                    engine.step()
                engine.eval()
                engine(ids(step))  # what is evaluated does not count
                engine.train()
        figures = lines(tmp_path / name, "figures")
        told.append(
            [(each["step"], each["loss"], round(each["tokens_per_second"] * each["seconds"])) for each in figures]
        )
    assert told[0] == told[1] == told[2] and told[0][1][2] == 12


def test_what_is_given_up_or_tried_out_does_not_count(tmp_path: Path) -> None:
    with started({"log_dir": str(tmp_path), "log": {"every": 1}}) as engine:
        engine.backward(engine(ids(5)) * 1000)
        engine.zero_grad()
        losses = train(engine, 1)
        with engine.profiling():
            train(engine, 3)
        losses += train(engine, 1)
    told = lines(tmp_path, "figures")
    assert [each["loss"] for each in told] == pytest.approx(losses, rel=1e-6) and [each["step"] for each in told] == [
        1,
        2,
    ]


def test_a_run_that_goes_on_appends(tmp_path: Path) -> None:
    for steps, loads in ((2, False), (1, True)):
        with started({"log_dir": str(tmp_path / "logs"), "log": {"every": 1}}) as engine:
            if loads:
                engine.load(tmp_path / "saved")
            train(engine, steps)
            engine.save(tmp_path / "saved")
    assert [each["kind"] for each in lines(tmp_path / "logs") if each["kind"] != "event"] == [
        "run",
        "figures",
        "figures",
        "run",
        "figures",
    ]
    assert [each["step"] for each in lines(tmp_path / "logs", "figures")] == [1, 2, 3]


def test_without_a_log_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with started({}) as engine:
        train(engine, 3)
    assert not list(tmp_path.iterdir())


def test_an_engine_without_an_optimizer_has_no_steps_to_tell_of(tmp_path: Path) -> None:
    with zw.initialize(Tagger(), None, {"stage": 2, **EAGER, "log_dir": str(tmp_path / "log")}) as engine:
        engine(ids(0))
    assert not list(tmp_path.iterdir()), "nothing was told, and no file begun"


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"labels": torch.zeros(2, 7, dtype=torch.long), "input_ids": torch.zeros(2, 5, dtype=torch.long)}, 10),
        ({"input_ids": torch.zeros(9, dtype=torch.int32)}, 9),
        (({"x": [torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int64)]}, torch.zeros(3, dtype=torch.int64)), 12),
        ((torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), None, "text"), 0),
    ],
)
def test_tokens_of_batches(batch: Any, tokens: int) -> None:
    assert tokens_of(batch) == tokens


# ---------------------------------------------------------------------- events
def test_events_have_their_reasons(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "zeroweave")
    with started({"log_dir": str(tmp_path), "stage": 3, "on_nonfinite": "skip"}) as engine:
        train(engine, 8)
        engine.reschedule(prefetch=2)
        engine.backward(engine(ids(0)) * float("nan"))
        engine.step()
        engine.backward(engine(ids(0)) + engine(ids(1)))  # two forwards in one step: another record
        engine.step()
    told = [(each["step"], each["event"], each["reason"]) for each in lines(tmp_path, "event")]
    assert (1, "schedule") == told[0][:2] and "follow its record" in told[0][2]
    reasons = {kind: [(step, reason) for step, each, reason in told if each == kind] for _, kind, _ in told}
    assert [reason for _, reason in reasons["schedule"]].count("another one was asked for: prefetch 2") == 1
    (skipped,) = reasons["skipped"]
    assert skipped[0] == 9 and skipped[1].startswith("optimizer step 8 skipped, because gradients are infinite or NaN")
    (departed,) = reasons["departed"]
    assert departed[0] == 10 and "Run embedding forward [embedding] came, and Run layers.1 backward" in departed[1]
    assert lines(tmp_path, "figures")[-1]["loss"] is None, "JSON has no NaN"
    assert lines(tmp_path, "figures")[-1]["skipped"] == 1
    levels = {record.getMessage().removeprefix("zeroweave: "): record.levelno for record in caplog.records}
    assert levels[skipped[1]] == logging.WARNING and levels[departed[1]] == logging.INFO


def test_a_schedule_that_what_was_measured_changes_says_by_how_much(tmp_path: Path) -> None:
    with started({"log_dir": str(tmp_path), "stage": 3, "log": {"every": 1}}) as engine:
        train(engine, 8)
        changed = engine.schedule is not None and engine.schedule.costs is not None
    assert changed, "steps were measured"
    exposed = [each["exposed"] for each in lines(tmp_path, "figures")]
    assert exposed[0] is None and exposed[-1] is not None and exposed[-1] >= 0


def test_a_region_that_is_compiled_once_more_says_why(tmp_path: Path) -> None:
    config = {"log_dir": str(tmp_path), "compile": {"lower": "aot_eager", "dynamic": False}}
    with started(config) as engine:
        engine.train_step(ids(0))
        assert not [each for each in lines(tmp_path, "event") if each["event"] == "recompiled"]
        engine.train_step(ids(0, rows=6))
    told = [each for each in lines(tmp_path, "event") if each["event"] == "recompiled"]
    assert told and all(each["step"] == 2 and "expected 4, actual 6" in each["reason"] for each in told)


def test_a_region_that_cannot_be_compiled_says_why(tmp_path: Path) -> None:
    class Closed(nn.Linear):
        @torch.compiler.disable
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden)

    model = Tagger()
    model.layers = nn.ModuleList(nn.Sequential(Closed(8, 8)) for _ in range(2))
    config = {"stage": 2, "log_dir": str(tmp_path), "compile": {"lower": "aot_eager"}}
    with (
        pytest.warns(UserWarning, match="trains eagerly, exact but slower"),
        zw.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config) as engine,
    ):
        engine.train_step(ids(0))
    (told,) = [each["reason"] for each in lines(tmp_path, "event") if each["event"] == "fallback"]
    assert "layers.0 trains eagerly, exact but slower: " in told


# ---------------------------------------------------------------------- on the terminal
def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with started({"log": {"progress": True, "every": 2, "steps": 4}}) as engine:
        losses = train(engine, 4)
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if not line.split(": ")[1:2] == ["schedule"]]
    assert not out and [line.split(":")[0] for line in told] == ["step 1", "step 2", "step 4"]
    assert f"loss {sum(losses[2:]) / 2:.4f}, " in told[-1] and " tokens/s, " in told[-1] and " ms a step" in told[-1]


def figures(step: int, **known: Any) -> dict[str, Any]:
    unknown = {"loss": None, "tokens_per_second": None, "memory": None, "exposed": None, "gradient_norm": None}
    return {"step": step, "seconds": 0.25, "learning_rates": [0.1], "loss_scale": 1.0, "skipped": 0, **unknown, **known}


def plain(shown: str) -> list[str]:
    """What a terminal was sent, without colours and the like, by lines."""
    return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", shown).replace("\r", "\n").splitlines()


@pytest.mark.parametrize("width", [200, 60])
def test_a_bar_on_a_terminal(width: int) -> None:
    file = io.StringIO()
    bar = Terminal(Console(file=file, force_terminal=True, width=width), 10)
    bar.tell("step", {"step": 1})
    known = {"loss": 2.5, "tokens_per_second": 12345.6, "memory": 3 << 30, "exposed": 0.0123, "skipped": 2}
    bar.tell("figures", figures(1, **known))
    bar.tell("event", {"step": 2, "rank": 3, "event": "fallback", "reason": "a [reason] of rank 3"})
    bar.tell("step", {"step": 2})
    bar.close()
    shown = plain(file.getvalue())
    told = "loss 2.5000, 12,346 tokens/s, 250.0 ms a step, 3.0 GiB, 12.3 ms of it exposed communication, 2 skipped"
    assert all(len(line) <= width for line in shown)
    assert any("1/10" in line and (told in line if width == 200 else "loss 2" in line) for line in shown)
    assert "2/10" in shown[-1] and "step 2, rank 3: fallback: a [reason] of rank 3" in map(str.strip, shown)


# ---------------------------------------------------------------------- refusals
def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = Tagger()
    with pytest.raises(ConfigError, match=r"log_dir '.*file' cannot be written"):
        zw.initialize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), {"stage": 3, **EAGER, "log_dir": str(tmp_path / "file")}
        )
    assert model(ids(0)).item() > 0, "the model is an ordinary one"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"log": {"steps": 3}}, "log.steps is the length of the bar that log.progress shows"),
        ({"log": {"to": ["tensorboard"]}}, "log.to 'tensorboard' writes to log_dir"),
        ({"log": {"to": ["comet"]}}, "log.to"),
        ({"log": {"every": 0}}, "log.every"),
        ({"log_dir": ""}, "log_dir"),
    ],
)
def test_settings_that_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        zw.Config.load(config)


def test_a_library_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroweave.engine.logs.log.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"log\.to: not installed: wandb, mlflow; pip install wandb mlflow"):
        started({"log": {"to": ["wandb", "mlflow"]}})


def test_what_json_has_no_numbers_for_is_null(tmp_path: Path) -> None:
    sink = json_lines(tmp_path)
    sink.tell("figures", figures(1, loss=float("inf"), learning_rates=[float("nan"), 0.5]))
    sink.close()
    (told,) = lines(tmp_path)
    assert told["loss"] is None and told["learning_rates"] == [None, 0.5]


def test_a_log_that_cannot_be_written_any_more_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    with started({"log_dir": str(tmp_path), "log": {"every": 1}}) as engine:
        train(engine, 2)
        monkeypatch.setattr("zeroweave.engine.logs.sinks._finite", full)
        with pytest.warns(
            UserWarning, match=r"the log goes to metrics.jsonl no more: OSError: .*No space left"
        ) as told:
            train(engine, 3)
        assert len(told) == 1 and engine.global_steps == 5
    assert [each["step"] for each in lines(tmp_path, "figures")] == [1, 2]


# ------------------------------------- libraries, which come with `make matrix`
@pytest.mark.matrix
def test_tensorboard_has_the_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with started({"log_dir": str(tmp_path), "log": {"to": ["tensorboard"], "every": 1}}) as engine:
        losses = train(engine, 3)
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [each.value for each in found.Scalars("zeroweave/loss")] == pytest.approx(losses)
    assert [each.step for each in found.Scalars("zeroweave/learning_rate")] == [1, 2, 3]
    assert any("run" in tag for tag in found.Tags()["tensors"])


@pytest.mark.matrix
@pytest.mark.parametrize("own", [True, False], ids=["own", "theirs"])
def test_weights_and_biases_has_the_curves(own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = None if own else wandb.init(dir=str(tmp_path), project="theirs")
    with started({"log_dir": str(tmp_path), "log": {"to": ["wandb"], "every": 1}}) as engine:
        losses = train(engine, 3)
        summary = dict(wandb.run.summary)
    assert summary["zeroweave/step"] == 3 and summary["zeroweave/loss"] == pytest.approx(losses[-1])
    assert (wandb.run is None) == own
    if run is not None:
        assert run.config["zeroweave"]["model"] == "Tagger"
        run.finish()


@pytest.mark.matrix
def test_mlflow_has_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the smaller mlflow-skinny has no database
    mlflow.set_tracking_uri(tmp_path.as_uri())
    mlflow.set_experiment("training")
    monkeypatch.chdir(tmp_path)
    with started({"log": {"to": ["mlflow"], "every": 1}}) as engine:
        run = mlflow.active_run().info.run_id
        losses = train(engine, 3)
    assert mlflow.active_run() is None
    told = mlflow.MlflowClient().get_metric_history(run, "zeroweave/loss")
    assert [(each.step, each.value) for each in told] == [(i + 1, pytest.approx(loss)) for i, loss in enumerate(losses)]
