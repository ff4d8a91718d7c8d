"""transformers' Trainer on an engine, beside the library's own on DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("accelerate", minversion="1.15", reason="transformers' Trainer needs accelerate")

import transformers

from tests.distributed.integrations import trainers
from tests.distributed.integrations.test_hf_trainer_steps import side_by_side
from tests.distributed.integrations.trainers import apart, config, equal, launched, logged, ours, theirs, weights, whole
from tests.support.harness import Pools
from zeroweave.eager import chunked_loss

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_and_evaluation_in_between_change_nothing(
    pools: Pools, tmp_path: Path, world: int, reentrant: bool
) -> None:
    more = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
        "eval_strategy": "steps",
        "eval_on_start": True,
    }
    for found in pools(world).run(side_by_side, str(tmp_path), 3, "aot_eager", more):
        assert found["apart"] <= 1e-6 < 1e-3 < found["moved"]
        losses, sharded = found["evaluations"]
        assert len(losses) == 5 and sharded == pytest.approx(losses, rel=1e-6)


def evaluated(folder: str) -> list[Any]:
    """A run with evaluations and one without: are the weights and the schedules equal, and which steps departed?"""
    with launched(folder):
        zeroweave = config(3, "aot_eager")
        zeroweave["compile"] = {**zeroweave["compile"], "record_steps": 0}  # no decisions by measured times
        runs = [ours(zeroweave, eval_strategy=when) for when in ("no", "steps")]
        for run in runs:
            run.train()
        plain, evaluating = (run.engine for run in runs)
        found = [
            equal(whole(runs[0]), whole(runs[1])),
            plain.schedule == evaluating.schedule,
            plain.stats.departures == evaluating.stats.departures,
            plain.micro_steps == evaluating.micro_steps,
            len(logged(runs[1], "eval_loss")),
        ]
        plain.destroy()
        evaluating.destroy()
        return found


def test_an_evaluation_neither_trains_nor_is_recorded(pools: Pools, tmp_path: Path) -> None:
    for found in pools(2).run(evaluated, str(tmp_path)):
        assert found == [True, True, True, True, 4]


def in_bfloat16(folder: str) -> list[tuple[list[float], list[float]]]:
    with launched(folder):
        more = {"bf16": True, "max_steps": 1, "eval_strategy": "steps", "eval_on_start": True, "warmup_steps": 0}
        library = theirs(**more)
        library.train()
        sharded = ours(config(3, "eager"), **more)
        sharded.train()
        assert sharded.engine.config.precision.autocast == "bfloat16"
        assert sharded.predict(trainers.Sentences(4)).predictions.dtype == "float32"
        sharded.engine.destroy()
        return [(logged(library, key), logged(sharded, key)) for key in ("eval_loss", "loss", "grad_norm")]


def test_bfloat16_is_the_librarys_autocast(pools: Pools, tmp_path: Path) -> None:
    """Compared before rounding can go two ways: weights that are an ulp apart may round to other bfloat16 numbers."""
    for (evaluations, evaluated), *rest in pools(2).run(in_bfloat16, str(tmp_path)):
        assert evaluated[0] == evaluations[0]
        for library, sharded in rest:
            assert sharded == pytest.approx(library, rel=1e-5)


def in_chunks(folder: str, stage: int, more: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """How far the parameters are from the library's with whole logits, and losses of training and evaluation."""
    five_tokens = mock.patch.object(chunked_loss, "BYTES", 5 * 4 * trainers.SIZES["vocab_size"])
    with launched(folder), five_tokens:
        library = theirs(eval_strategy="steps", **more)
        library.train()
        sharded = ours({**config(stage, "aot_eager"), "loss": "chunked"}, eval_strategy="steps", **more)
        sharded.train()
        assert sharded.predict(trainers.Sentences(4)).predictions.shape[-1] == trainers.SIZES["vocab_size"]
        found = apart(whole(sharded), library.model.state_dict())
        sharded.engine.destroy()
        return found, [logged(run, "loss", "eval_loss") for run in (library, sharded)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loss_in_chunks_trains_as_the_librarys(pools: Pools, tmp_path: Path, stage: int) -> None:
    """Three micro-steps of sentences that have different numbers of labels, all of which count the same."""
    for found, (library, sharded) in pools(2).run(in_chunks, str(tmp_path), stage, {}):
        assert found <= 1e-6 and sharded == pytest.approx(library, rel=1e-5, abs=1.01e-4)


def test_a_loss_in_chunks_under_autocast(pools: Pools, tmp_path: Path) -> None:
    for _, (library, sharded) in pools(2).run(in_chunks, str(tmp_path), 3, {"bf16": True, "max_steps": 5}):
        assert len(sharded) == 6 and sharded == pytest.approx(library, rel=1e-3)


class Applied(transformers.TrainerCallback):
    """Writes down which steps were applied."""

    def __init__(self) -> None:
        self.steps: list[bool] = []

    def on_step_end(self, *args: Any, optimizer: Any, **kwargs: Any) -> None:
        self.steps.append(not optimizer.step_was_skipped)


def in_float16(folder: str) -> dict[str, Any]:
    """A loss scale that overflows at first; a run that goes on from its end; and one in float32."""
    with launched(folder):
        steep = {**config(2, "eager"), "precision": {"initial_loss_scale": 2.0**40}}
        sharded = ours(steep, fp16=True, max_steps=40, save_strategy="steps", save_steps=30)
        sharded.add_callback(applied := Applied())
        sharded.train()
        resumed = ours(config(2, "eager"), fp16=True, max_steps=40)
        resumed.train(resume_from_checkpoint="out/checkpoint-30")
        plain = ours(config(2, "eager"), max_steps=40)
        plain.train()
        engine = sharded.engine
        assert engine.config.precision.autocast == "float16" and engine.skipped_steps == applied.steps.count(False)
        found = {
            "applied": applied.steps,
            "counted": [engine.global_steps, sharded.lr_scheduler.last_epoch],
            "scale": engine.loss_scale,
            "rates": logged(sharded, "learning_rate"),
            "plain": logged(plain, "learning_rate"),
            "resumed": equal(whole(resumed), whole(sharded)) and resumed.engine.loss_scale == engine.loss_scale,
        }
        for trainer in (sharded, resumed, plain):
            trainer.engine.destroy()
        return found


def test_steps_that_float16_skips_do_not_move_the_learning_rate(pools: Pools, tmp_path: Path) -> None:
    for found in pools(2).run(in_float16, str(tmp_path)):
        done = sum(found["applied"])
        assert 10 < done < 40 and not found["applied"][0]
        assert found["counted"] == [done, done] and found["scale"] == 2.0**done
        before = [sum(found["applied"][:step]) for step in range(40)]
        assert found["rates"] == [found["plain"][steps] for steps in before]
        assert found["resumed"]


def stopped_and_resumed(folder: str, before: dict[str, Any], after: dict[str, Any]) -> tuple[bool, bool, bool]:
    """A run, and the one that goes on from its middle: equal weights, equal losses, and they moved."""
    with launched(folder):
        first = ours(before, trainers.llama(attention_dropout=0.1), save_strategy="steps", eval_strategy="steps")
        first.train()
        second = ours(after, trainers.llama(attention_dropout=0.1), eval_strategy="steps")
        second.train(resume_from_checkpoint="out/checkpoint-10")
        losses, halved = (logged(trainer, "loss", "grad_norm", "eval_loss") for trainer in (first, second))
        found = equal(whole(first), whole(second)), losses == halved, len(set(losses)) > 20
        first.engine.destroy()
        second.engine.destroy()
        return found


@pytest.mark.parametrize(
    ("saved", "loaded"),
    # Not stage 1 behind another one: where backwards accumulate it adds up before it reduces, the others behind that.
    [
        ((3, "eager"), (3, "eager")),
        ((3, "aot_eager"), (3, "aot_eager")),
        ((1, "eager"), (1, "eager")),
        ((2, "eager"), (3, "eager")),
    ],
)
def test_a_run_that_is_resumed_in_the_middle_of_an_epoch_is_exact(
    pools: Pools, tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]
) -> None:
    for found in pools(2).run(stopped_and_resumed, str(tmp_path), config(*saved), config(*loaded)):
        assert found == (True, True, True)


def from_the_library(folder: str, experts: bool) -> float:
    make = trainers.mixture if experts else trainers.llama
    with launched(folder):
        library = theirs(make(), save_strategy="steps")
        library.train()
        sharded = ours(config(3, "eager"), make())
        sharded.train(resume_from_checkpoint="out/checkpoint-10")
        found = apart(whole(sharded), library.model.state_dict())
        sharded.engine.destroy()
        return found


@pytest.mark.parametrize("experts", [False, True])
def test_a_checkpoint_of_the_librarys_own_run_goes_on_sharded(pools: Pools, tmp_path: Path, experts: bool) -> None:
    """On one rank: on several CPU ranks transformers 4 cannot load its own."""
    assert pools(1).run(from_the_library, str(tmp_path), experts)[0] <= 1e-6


def best(folder: str) -> tuple[str, bool, bool, list[str]]:
    """What is called best is the first of several checkpoints; two runs write to one folder."""
    with launched(folder):
        for _ in range(2):
            trainer = ours(
                config(3, "eager"),
                max_steps=15,
                eval_strategy="steps",
                save_strategy="steps",
                save_total_limit=2,
                load_best_model_at_end=True,
                metric_for_best_model="loss",
                greater_is_better=True,
            )
            trainer.train()
            first = whole(trainer)
            trainer.save_model("final")
            trainer.engine.destroy()
        kept = sorted(path.name for path in Path("out").iterdir())
        engines = [len(list(Path("out", name, "zeroweave").glob("step-*"))) for name in kept]
        assert engines == [1, 1], engines
        saved = trainer.state.best_model_checkpoint
        return saved, equal(weights(saved), weights("final")), equal(weights("final"), first_named(first)), kept


def first_named(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: parameters[name] for name in trainers.llama().state_dict()}


def test_the_best_model_is_loaded_at_the_end(pools: Pools, tmp_path: Path) -> None:
    for saved, loaded, written, kept in pools(2).run(best, str(tmp_path)):
        assert saved.endswith("checkpoint-5") and loaded and written
        assert kept == ["checkpoint-15", "checkpoint-5"]


class Recorder(transformers.TrainerCallback):
    """Writes down which events come, and what a step's has."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            object.__getattribute__(self, "events").append(name)
        return object.__getattribute__(self, name)


def custom(base: type[transformers.Trainer]) -> type[Any]:
    """An unmodified subclass, such as scripts have."""

    class Custom(base):  # type: ignore[valid-type, misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            scores = outputs.logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(scores, labels[:, 1:].flatten())
            assert self.accelerator.unwrap_model(model) is self.model and model.config is self.model.config
            return (loss, outputs) if return_outputs else loss

    return Custom


def subclassed(folder: str) -> tuple[float, list[str], list[str]]:
    with launched(folder):
        runs = []
        for base, kind, more in (
            (transformers.Trainer, transformers.TrainingArguments, {}),
            (trainers.hf.Trainer, trainers.hf.TrainingArguments, {"zeroweave": config(3, "eager")}),
        ):
            data, recorder = trainers.Sentences(64), Recorder()
            arguments = trainers.said(kind, max_steps=5, eval_strategy="steps", **more)
            run = trainers.quiet(
                custom(base)(trainers.llama(), arguments, train_dataset=data, eval_dataset=data, callbacks=[recorder])
            )
            run.model_accepts_loss_kwargs = False  # as transformers asks for where the loss leaves the count out
            run.train()
            runs.append((run, recorder.events))
        (library, wanted), (sharded, events) = runs
        found = apart(whole(sharded), library.model.state_dict())
        sharded.engine.destroy()
        return found, wanted, events


def test_an_unmodified_subclass_with_callbacks_runs_as_it_does(pools: Pools, tmp_path: Path) -> None:
    # On one rank, where the library hands the subclass the model itself and not DistributedDataParallel.
    for found, wanted, events in pools(1).run(subclassed, str(tmp_path)):
        assert found <= 1e-6
        assert events == wanted and "on_pre_optimizer_step" in events and "on_substep_end" in events


def lives(folder: str) -> dict[str, Any]:
    """An evaluation before any training, two trainings, and a model that is made anew for each."""
    with launched(folder):
        trainer = ours(config(3, "eager"), max_steps=3)
        before = trainer.evaluate()["eval_loss"]
        found = {"before": before, "evaluated": trainer.engine.optimizer is None}
        trainer.train()
        engine, first = trainer.engine, trainer.evaluate()["eval_loss"]
        trainer.train()
        found["went on"] = trainer.engine is engine and engine.global_steps == 6
        found["losses fell"] = trainer.evaluate()["eval_loss"] < first < before
        engine.destroy()

        arguments = trainers.said(trainers.hf.TrainingArguments, max_steps=3, zeroweave=config(3, "eager"))
        made = {"model_init": lambda: trainers.llama(), "train_dataset": trainers.Sentences(64)}
        anew = trainers.quiet(trainers.hf.Trainer(args=arguments, **made))
        ends = []
        for _ in range(2):
            anew.train()
            ends.append(whole(anew))
        found["made anew"] = equal(*ends)
        anew.engine.destroy()
        found["given back"] = anew.model.lm_head.weight.requires_grad and bool(anew.model.lm_head.weight.sum())
        library = theirs()
        found["library"] = library.evaluate()["eval_loss"]
        return found


def test_evaluation_before_training_and_training_twice(pools: Pools, tmp_path: Path) -> None:
    for found in pools(2).run(lives, str(tmp_path)):
        assert found.pop("before") == pytest.approx(found.pop("library"), rel=1e-6)
        assert all(found.values()), found
