"""Runs of transformers' Trainer, the library's own and zeroweave's, on the same model and data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers.trainer_callback import PrinterCallback

from tests.support.hf_models import SIZES
from tests.support.marks import WITH_INDUCTOR
from zeroweave.integrations import hf


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, of which each sentence has another number to predict."""

    def __init__(self, count: int) -> None:
        random = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(3, SIZES["vocab_size"], (count, 12), generator=random)
        self.ends = torch.randint(4, 12, (count,), generator=random)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[self.ends[index] :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def llama(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 2, **more})
    return transformers.LlamaForCausalLM(config)


def mixture() -> nn.Module:
    """Its experts are one tensor in transformers 5, and apart in the files."""
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**{**SIZES, "num_hidden_layers": 2}, num_local_experts=3)
    )


@contextmanager
def launched(folder: str) -> Iterator[None]:
    """The environment of a rank that torchrun has started, in a folder of this test's own."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    several = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    before = os.getcwd()
    with mock.patch.dict(os.environ, several if world != "1" else {}):
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # transformers leaves it behind
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def said(kind: type[transformers.TrainingArguments], **more: Any) -> Any:
    """Twelve sentences in an optimizer step of two ranks, clipped, with a warm-up; an epoch ends within a window."""
    settings = {
        "output_dir": "out",
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 20,
        "max_grad_norm": 0.5,
        "learning_rate": 1e-3,
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "eval_steps": 5,
        "save_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return kind(**{**settings, **more})


def config(stage: int, mode: str) -> dict[str, Any]:
    return {"stage": stage, "compile": WITH_INDUCTOR[mode]}


def ours(zeroweave: dict[str, Any], model: nn.Module | None = None, **more: Any) -> hf.Trainer:
    arguments = said(hf.TrainingArguments, zeroweave=zeroweave, **more)
    return quiet(hf.Trainer(model or llama(), arguments, train_dataset=Sentences(64), eval_dataset=Sentences(10)))


def theirs(model: nn.Module | None = None, **more: Any) -> transformers.Trainer:
    arguments = said(transformers.TrainingArguments, **more)
    return quiet(
        transformers.Trainer(model or llama(), arguments, train_dataset=Sentences(64), eval_dataset=Sentences(10))
    )


def quiet(trainer: Any) -> Any:
    trainer.remove_callback(PrinterCallback)
    return trainer


def logged(trainer: transformers.Trainer, *keys: str) -> list[float]:
    """The values that a Trainer has logged under these names, in their order."""
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def whole(trainer: hf.Trainer) -> dict[str, Tensor]:
    """A copy of all parameters, on every rank."""
    with trainer.engine.full_parameters() as full:
        return {name: parameter.detach().clone() for name, parameter in full.items()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between parameters of the same names."""
    assert one.keys() <= other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def weights(folder: str) -> dict[str, Tensor]:
    """What `from_pretrained` makes of a folder, once all ranks are done with it."""
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained(Path(folder).resolve()).state_dict()
