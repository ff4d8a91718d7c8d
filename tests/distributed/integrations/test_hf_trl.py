"""TRL's trainer on an engine, as its users would shard it, beside its own run."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", minversion="1.15", reason="transformers' Trainer needs accelerate")
pytest.importorskip("trl")

import transformers
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.distributed.integrations import trainers
from tests.distributed.integrations.trainers import apart, config, launched, said, whole
from tests.support.harness import Pools
from zeroweave.integrations import hf

pytestmark = pytest.mark.matrix  # the library comes with `make matrix`


class Sharded(hf.Trainer, SFTTrainer):
    pass


@dataclass
class Arguments(SFTConfig, hf.TrainingArguments):
    pass


def letters() -> tuple[Any, Any]:
    """A tokenizer of letters, and sentences for it."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz .,"]
    letters = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, **special)
    sentences = [("the cat sat on the mat. " * (1 + index % 3))[index % 5 :] for index in range(48)]
    return tokenizer, Dataset.from_dict({"text": sentences})


def supervised(folder: str) -> tuple[float, float, list[Any], list[Any]]:
    """How far apart the parameters are, in memory and in files, and what both logged."""
    with launched(folder):
        tokenizer, data = letters()
        more = {"bf16": False, "max_steps": 6, "max_grad_norm": 1.0}
        runs = []
        for trainer, arguments in (
            (SFTTrainer, said(SFTConfig, **more)),
            (Sharded, said(Arguments, **more, zeroweave=config(3, "aot_eager"))),
        ):
            model = trainers.llama(vocab_size=64, max_position_embeddings=128)
            run = trainers.quiet(trainer(model, arguments, train_dataset=data, processing_class=tokenizer))
            run.train()
            runs.append(run)
        library, sharded = runs
        assert sharded.args.gradient_checkpointing  # TRL's default
        assert Arguments.learning_rate == SFTConfig.learning_rate != hf.TrainingArguments.learning_rate
        sharded.save_model("final")
        found = apart(whole(sharded), library.model.state_dict())
        written = apart(trainers.weights("final"), {**library.model.state_dict()})
        logs = [trainers.logged(run, "loss", "mean_token_accuracy") for run in runs]
        sharded.engine.destroy()
        return found, written, *logs


@pytest.mark.matrix
@pytest.mark.parametrize("world", [1, 2])
def test_trls_trainer_trains_as_on_its_own(pools: Pools, tmp_path: Path, world: int) -> None:
    for found, written, library, sharded in pools(world).run(supervised, str(tmp_path)):
        assert found <= 1e-6 and written <= 1e-6
        assert sharded == pytest.approx(library, abs=1.01e-4) and len(sharded) == 12  # losses have four decimals


class ShardedPreferences(hf.Trainer, DPOTrainer):
    pass


@dataclass
class PreferenceArguments(DPOConfig, hf.TrainingArguments):
    pass


def preferences(folder: str, stage: int, reference: bool) -> tuple[float, list[Any], list[Any]]:
    """How far apart the parameters are, and the logs. `reference`: a model of its own is the reference.

    Else adapters are trained, and off where the base model is the reference.
    """
    with launched(folder):
        tokenizer, _ = letters()
        rows = [{"prompt": "the cat ", "chosen": "sat. " * (1 + i % 3), "rejected": "ate it. "} for i in range(48)]
        more = {"bf16": False, "max_steps": 6, "max_grad_norm": 1.0, "learning_rate": 1e-2}
        runs = []
        for trainer, arguments in (
            (DPOTrainer, said(DPOConfig, **more)),
            (ShardedPreferences, said(PreferenceArguments, **more, zeroweave=config(stage, "aot_eager"))),
        ):
            model = trainers.llama(vocab_size=64, max_position_embeddings=128)
            adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            torch.manual_seed(0)
            given: dict[str, Any] = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
            given |= {"ref_model": copy.deepcopy(model)} if reference else {"peft_config": adapters}
            run = trainers.quiet(trainer(model, args=arguments, **given))
            run.train()
            runs.append(run)
        library, sharded = runs
        found = apart(whole(sharded), library.model.state_dict())
        logs = [trainers.logged(run, "loss", "rewards/margins") for run in runs]
        sharded.engine.destroy()
        return found, *logs


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(("world", "stage"), [(1, 2), (2, 3)])
def test_preferences_are_learnt(pools: Pools, tmp_path: Path, world: int, stage: int, reference: bool) -> None:
    for found, library, sharded in pools(world).run(preferences, str(tmp_path), stage, reference):
        assert found <= 1e-6
        assert sharded == pytest.approx(library, abs=1.01e-4) and len(sharded) == 12


class ShardedPolicy(hf.Trainer, GRPOTrainer):
    pass


@dataclass
class PolicyArguments(GRPOConfig, hf.TrainingArguments):
    pass


def rewarded(folder: str, stage: int) -> tuple[float, list[Any], list[Any]]:
    """Completions of other lengths on each rank: how far apart the parameters are, and the logs."""
    with launched(folder):
        tokenizer, _ = letters()
        tokenizer.padding_side = "left"
        more = {"bf16": False, "max_steps": 4, "max_grad_norm": 1.0, "learning_rate": 1e-2, "beta": 0.0}
        more |= {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12}
        more |= {"generation_kwargs": {"eos_token_id": list(range(2, 26))}}  # most end early
        runs = []
        for trainer, arguments in (
            (GRPOTrainer, said(GRPOConfig, **more)),
            (ShardedPolicy, said(PolicyArguments, **more, zeroweave=config(stage, "aot_eager"))),
        ):
            torch.manual_seed(0)
            model = trainers.llama(vocab_size=64, max_position_embeddings=128)
            given = {"train_dataset": Dataset.from_list([{"prompt": "the cat "}] * 48), "processing_class": tokenizer}
            run = trainers.quiet(trainer(model, reward_funcs=length, args=arguments, **given))
            run.train()
            runs.append(run)
        library, sharded = runs
        found = apart(whole(sharded), library.model.state_dict())
        logs = [trainers.logged(run, "loss", "reward") for run in runs]
        sharded.engine.destroy()
        return found, *logs


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(each)) for each in completion_ids]


@pytest.mark.parametrize("world", [1, 2])
def test_a_policy_learns_from_rewards_at_stage_2(pools: Pools, tmp_path: Path, world: int) -> None:
    for found, library, sharded in pools(world).run(rewarded, str(tmp_path), 2):
        assert found <= 1e-5
        assert sharded == pytest.approx(library, abs=1.01e-4) and len(set(sharded)) > 2
