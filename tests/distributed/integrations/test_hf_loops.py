"""Loops of transformers' Trainer that leave the plain path, beside the library's own on DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("accelerate", minversion="1.15", reason="transformers' Trainer needs accelerate")

import transformers

from tests.distributed.integrations import trainers
from tests.distributed.integrations.trainers import apart, config, launched, logged, said, whole
from tests.support.harness import Pools
from zeroweave.integrations import hf

pytestmark = pytest.mark.matrix

Loop = Callable[[type[Any], type[Any], dict[str, Any]], Any]
"""Makes a Trainer of a class and one of its arguments, runs it and returns it; `more`: what the arguments are told."""


class Cut(trainers.Sentences):
    """Sentences of their own lengths."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index][: self.ends[index]]
        return {"input_ids": tokens, "labels": tokens.clone()}


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Sentences whose number nobody knows."""

    def __init__(self, count: int) -> None:
        self.sentences = trainers.Sentences(count)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.sentences[index] for index in range(len(self.sentences)))


def padded(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    fills = {"input_ids": 0, "labels": -100}
    return {
        key: torch.nn.utils.rnn.pad_sequence([each[key] for each in batch], True, fill) for key, fill in fills.items()
    }


class Ending(transformers.TrainerCallback):
    """In the middle of the third window it asks for the end, or raises; once."""

    def __init__(self, raises: bool) -> None:
        self.raises, self.done = raises, False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if state.global_step == 2 and not self.done:
            self.done = True
            if self.raises:
                raise InterruptedError("from a callback")
            control.should_training_stop = True
        return control


def ended_and_again(raises: bool) -> Loop:
    def loop(trainer: type[Any], kind: type[Any], more: dict[str, Any]) -> Any:
        data, arguments = trainers.Sentences(64), said(kind, max_steps=5, **more)
        run = trainers.quiet(trainer(trainers.llama(), arguments, train_dataset=data, callbacks=[Ending(raises)]))
        try:
            run.train()
        except InterruptedError:
            assert raises
        run.train()
        return run

    return loop


def by_length(trainer: type[Any], kind: type[Any], more: dict[str, Any]) -> Any:
    settings = {"max_steps": -1, "num_train_epochs": 2, "dataloader_drop_last": True}
    # transformers 5 has one argument for all ways to sample.
    grouped = {"train_sampling_strategy": "group_by_length"} if hasattr(kind, "train_sampling_strategy") else {}
    arguments = said(kind, **settings, **(grouped or {"group_by_length": True}), **more)
    run = trainers.quiet(trainer(trainers.llama(), arguments, train_dataset=Cut(37), data_collator=padded))
    run.train()
    return run


def streamed(trainer: type[Any], kind: type[Any], more: dict[str, Any]) -> Any:
    arguments = said(kind, max_steps=8, eval_strategy="steps", **more)
    run = trainers.quiet(trainer(trainers.llama(), arguments, train_dataset=Stream(37), eval_dataset=Stream(13)))
    run.train()
    return run


def with_groups(trainer: type[Any], kind: type[Any], more: dict[str, Any]) -> Any:
    """An optimizer and a schedule of the script's own."""
    model = trainers.llama()
    plain = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    decayed = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 8)
    data, arguments = trainers.Sentences(64), said(kind, max_steps=8, **more)
    run = trainers.quiet(trainer(model, arguments, train_dataset=data, optimizers=(optimizer, schedule)))
    run.train()
    return run


LOOPS: dict[str, Loop] = {
    "ended by a callback in a window, and trained again": ended_and_again(raises=False),
    "ended by an exception in a window, and trained again": ended_and_again(raises=True),
    "grouped by length, the last batch dropped": by_length,
    "without a length": streamed,
    "with groups of one's own": with_groups,
}


def both(folder: str, loop: str) -> tuple[float, float, list[Any], list[Any]]:
    with launched(folder):
        library = LOOPS[loop](transformers.Trainer, transformers.TrainingArguments, {})
        sharded = LOOPS[loop](hf.Trainer, hf.TrainingArguments, {"zeroweave": config(3, "eager")})
        want = library.model.state_dict()
        found = apart(whole(sharded), want), apart(trainers.llama().state_dict(), want)
        logs = [logged(run, "loss", "eval_loss", "learning_rate") for run in (library, sharded)]
        sharded.engine.destroy()
        return *found, *logs


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_what_it_trains_with_the_library(pools: Pools, tmp_path: Path, loop: str) -> None:
    for found, moved, library, sharded in pools(2).run(both, str(tmp_path), loop):
        assert found <= 1e-6 < 1e-3 < moved
        assert sharded == pytest.approx(library, abs=1.01e-4)  # losses are logged with four decimals
