"""transformers' Trainer on an engine: `from zeroweave.integrations.hf import Trainer, TrainingArguments`.

The Trainer's loop is unchanged. Its accelerator is `TrainerAccelerator`, so that forwards, backwards, clipping and
steps are the engine's; overridden here is what reads or writes the model's or the optimizer's values.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from zeroweave.config import Config
from zeroweave.engine import Engine
from zeroweave.errors import ConfigError, EngineError, UnsupportedError
from zeroweave.integrations.pretrained import converted
from zeroweave.optim.multi_optimizer import WholeMatrices

try:
    import accelerate
    import transformers
    from packaging.version import Version
except ImportError as error:
    raise UnsupportedError(
        "[ZW803] zeroweave.integrations.hf needs transformers and accelerate: "
        "pip install 'transformers>=4.57.1,<6' 'accelerate>=1.15'"
    ) from error
if not Version("4.57.1") <= Version(transformers.__version__) < Version("6.dev0"):
    raise UnsupportedError(
        "[ZW803] zeroweave.integrations.hf needs transformers 4.57.1 or newer, below 6, not "
        f"{transformers.__version__}: pip install 'transformers>=4.57.1,<6'"
    )
if Version(accelerate.__version__) < Version("1.15"):  # older ones resume an epoch with the batches of the first one
    raise UnsupportedError(
        f"[ZW803] zeroweave.integrations.hf needs accelerate 1.15 or newer, not {accelerate.__version__}: "
        "pip install 'accelerate>=1.15'"
    )

from accelerate.utils import DataLoaderConfiguration
from transformers.trainer import SCHEDULER_NAME

from zeroweave.integrations.accelerate import AcceleratedModel, ZeroweaveAccelerator

__all__ = ["Seq2SeqTrainer", "Seq2SeqTrainingArguments", "Trainer", "TrainingArguments"]

_FOLDER: Final = "zeroweave"
"""Where in a folder `checkpoint-…` of a Trainer the engine's checkpoint is."""

_REFUSED: Final = {
    "deepspeed": "leave it out; zeroweave.Config.from_deepspeed reads its file, for zeroweave=",
    "fsdp": "leave it out, the stage in zeroweave= says what is sharded",
    "parallelism_config": "leave it out, zeroweave shards over all ranks",
    "torch_compile": "leave it out, zeroweave compiles each block: see `compile` in its config",
    "torch_compile_backend": "leave it out: see `compile` in zeroweave's config",
    "torch_compile_mode": "leave it out: see `compile` in zeroweave's config",
    "jit_mode_eval": "leave it out, evaluation runs through the engine",
    "fp16_full_eval": 'leave it out, or compute in 16 bits everywhere: zeroweave={"precision": {"params": "float16"}}',
    "bf16_full_eval": 'leave it out, or compute in 16 bits everywhere: zeroweave={"precision": {"params": "bfloat16"}}',
    "auto_find_batch_size": "leave it out, ranks that run out of memory in the middle of a step cannot try again",
    "enable_jit_checkpoint": "leave it out, each rank would decide for itself at which step to save",
    "save_on_each_node": "leave it out, all ranks write to one folder that they share",
    "ddp_bucket_cap_mb": "leave it out: see `bucket.bytes` in zeroweave's config",
    "ddp_broadcast_buffers": "leave it out, each rank keeps its own buffers",
}
"""Arguments of transformers that contradict zeroweave, and what to do."""

_OWNED: Final = {
    "gradient_accumulation_steps": "gradient_accumulation_steps=",
    "gradient_clipping": "max_grad_norm=",
    "checkpoint": "save_strategy=, save_total_limit= and the like",
}
"""Keys of zeroweave's config that a Trainer sets, and by what it is told."""


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """transformers' arguments, with zeroweave's config.

    ConfigError for arguments that contradict zeroweave, and for keys of its config that other arguments decide.
    """

    zeroweave: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "zeroweave's config: a dict, or the path of a JSON or TOML file, such as {'stage': 3}."},
    )
    """What `zeroweave.initialize` takes as its config, a `zeroweave.Config` as well; afterwards the keys that were set,
    as a dict. None: the defaults."""

    def __post_init__(self) -> None:
        wrong = [f"{name}= with zeroweave: {todo}" for name, todo in _REFUSED.items() if getattr(self, name, None)]
        # Of transformers 4, which has two names for it.
        if "apex" in [getattr(self, name, None) for name in ("half_precision_backend", "fp16_backend")]:
            wrong.append("apex with zeroweave: leave half_precision_backend= out")
        given: Any = self.zeroweave
        if isinstance(given, str) and given.startswith("{"):  # from a command line
            given = json.loads(given)
        config = Config.load(given)
        wrong += [
            f"{key!r} in zeroweave=: {owner} of the TrainingArguments decides that"
            for key, owner in _OWNED.items()
            if key in config.model_fields_set
        ]
        if wrong:
            raise ConfigError(f"[ZW804] {'; '.join(wrong)}")
        if self.save_only_model and self.load_best_model_at_end:
            raise ConfigError(
                "[ZW804] load_best_model_at_end= with save_only_model=: the best model is loaded from zeroweave's own "
                "checkpoint, which save_only_model leaves out"
            )
        self.zeroweave = config.model_dump(mode="json", exclude_unset=True)
        super().__post_init__()

    @property
    def place_model_on_device(self) -> bool:
        """False: the engine moves the model, bucket by bucket."""
        return False


@dataclass
class Seq2SeqTrainingArguments(transformers.Seq2SeqTrainingArguments, TrainingArguments):
    """transformers' arguments for generation, with zeroweave's config."""


class TrainerAccelerator(ZeroweaveAccelerator):
    """The engine is made when the Trainer first runs its model, with an optimizer or for evaluation alone."""

    def __init__(self, config: Config, dataloader_config: DataLoaderConfiguration) -> None:
        one = config.checkpoint.model_copy(update={"keep_last": 1})  # the Trainer has a folder for each
        super().__init__(
            zeroweave_config=config.model_copy(update={"checkpoint": one}), dataloader_config=dataloader_config
        )
        self.wrapper: AcceleratedModel | None = None
        """the model of the engine, where there is one; also when `free_memory` has forgotten it"""

    @property
    def engine(self) -> Engine:
        """EngineError before there is one."""
        if self.wrapper is None:
            raise EngineError("[ZW802] there is no engine yet: train(), evaluate() and predict() make it")
        return self.wrapper.engine

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> tuple[AcceleratedModel, Any]:
        """The engine's model and optimizer; makes the engine if it is missing, without an optimizer for evaluation.

        EngineError for another model than the engine's.
        """
        if self.wrapper is None:
            made = (model, optimizer) if optimizer is None else self.prepare(model, optimizer)
            self.wrapper, optimizer = self.prepare_model(made[0]), made[1]
        if self.wrapper.module is not model:
            raise EngineError(
                "[ZW802] the Trainer's model is another one than its engine's: make a Trainer for each model"
            )
        return self.wrapper, optimizer

    def end_engine(self) -> None:
        """Gives the model back as an ordinary one. Collective."""
        self.engine.destroy(optimizer_state=False)
        self._models = [model for model in self._models if model is not self.wrapper]
        self.wrapper = None

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """The backward of `loss`, which the Trainer has divided. Collective."""
        self.engine.set_gradient_accumulation_boundary(self.sync_gradients)
        super().backward(loss, **kwargs)
        if not self.sync_gradients:
            self.engine.step()  # ends the micro-step; at the boundary the optimizer's step does


class Trainer(transformers.Trainer):
    """transformers' Trainer, sharded: `args` are this package's `TrainingArguments`.

    A subclass of transformers' Trainer, such as one of TRL's, is sharded by `class Sharded(Trainer, Subclass)`, with
    `class Arguments(SubclassConfig, TrainingArguments)` where it has its own arguments.

    Besides `train`, `evaluate` and `predict`, `save_model` is collective, too: all ranks call it.
    """

    accelerator: TrainerAccelerator
    optimizer: Any

    @property
    def engine(self) -> Engine:
        """The engine, from the first `train`, `evaluate` or `predict` on; EngineError before."""
        return self.accelerator.engine

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As transformers'. ConfigError for several optimizers, of which its loop knows nothing."""
        super().__init__(*args, **kwargs)
        if isinstance(self.optimizer, list | tuple | WholeMatrices):
            raise ConfigError(
                f"[ZW804] optimizers= with a {type(self.optimizer).__name__} in the place of the optimizer: the "
                "Trainer has one torch.optim.Optimizer; several, or a WholeMatrices, go with zeroweave.initialize or "
                "Accelerate"
            )

    # ------------------------------------------------------------------ how the engine comes in
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not isinstance(self.args, TrainingArguments):
            kind = type(self.args).__name__
            raise ConfigError(
                f"[ZW804] args is a {kind} without zeroweave=: pass zeroweave.integrations.hf.TrainingArguments, or "
                f"make a class of both, `@dataclass class Arguments({kind}, hf.TrainingArguments): pass`"
            )
        if self.args.n_gpu > 1:
            raise ConfigError(
                f"[ZW804] one process with {self.args.n_gpu} GPUs, which transformers would use by DataParallel: start "
                "one process for each with `zeroweave run --nproc-per-node`, or let this one see one "
                "(CUDA_VISIBLE_DEVICES)"
            )
        self.accelerator = TrainerAccelerator(Config.load(self.args.zeroweave), self.accelerator.dataloader_config)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_sharded:
            if self.engine.optimizer is None or self.model_init is not None:
                self.accelerator.end_engine()  # an evaluation's, or that of a model that the Trainer makes again
            else:
                self.engine.zero_grad()  # an exception or a callback may have ended an earlier call within a window
        return super().train(*args, **kwargs)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> AcceleratedModel:
        """The Trainer's own place for other engines than accelerate's; here they begin, for evaluation as well."""
        if isinstance(model, AcceleratedModel):
            return model
        if self.is_model_parallel:
            raise ConfigError("[ZW804] a model on several devices: load it without device_map=")
        if getattr(model, "is_distributed_loading_by_transformers", getattr(model, "tp_size", None)):
            raise ConfigError(
                "[ZW804] a model that transformers has split over the ranks already: load it without "
                "distributed_config= and tp_plan="
            )
        if getattr(adapter := getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigError(
                f"[ZW804] a model with peft's {type(adapter).__name__}, which rank 0 alone would run to save it: use "
                "LoRA, or another method that adds weights to layers"
            )
        if getattr(adapter, "target_parameters", None):
            raise ConfigError(
                "[ZW804] a model with peft's target_parameters, which writes parameters in every call: name layers in "
                "target_modules= instead"
            )
        wrapper, optimizer = self.accelerator.wrap(model, self.optimizer if training else None)
        if training:
            self.optimizer = optimizer
        return wrapper

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """False, without a look at gradients, which wait in the engine: transformers 5 would clip DTensors itself."""
        return False

    @property
    def _is_sharded(self) -> bool:
        return self.accelerator.wrapper is not None

    # ------------------------------------------------------------------ what is written and read
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self._is_sharded:
            super().save_model(output_dir, _internal_call)
            return
        with self.engine.full_on_rank_0() as weights:
            if self.args.should_save:
                self._save(output_dir, state_dict=weights)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save(os.path.join(output_dir, _FOLDER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if _is_ours(resume_from_checkpoint):
            return  # `_load_optimizer_and_scheduler` loads all of it
        weights = None
        if isinstance(self.model, transformers.PreTrainedModel) and any(
            Path(resume_from_checkpoint).glob("*.safetensors")
        ):
            weights = converted(self.model, resume_from_checkpoint)
        if weights is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:  # transformers 5 would leave what it had converted as it is, with a warning
            weights.give_parameters()
            weights.give_buffers()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self.engine.load(os.path.join(checkpoint, _FOLDER))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing: the engine's checkpoint has its loss scale."""

    def _load_best_model(self) -> None:
        self.engine.load(os.path.join(self.state.best_model_checkpoint, _FOLDER))


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """transformers' Trainer that evaluates by generating, sharded."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().evaluate(*args, **self._together(kwargs))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict(*args, **self._together(kwargs))

    def _together(self, generation: dict[str, Any]) -> dict[str, Any]:
        """Ranks whose sequences have ended continue with the others: at stage 3 all take part in each forward."""
        return {"synced_gpus": self.args.world_size > 1, **generation}


def _is_ours(checkpoint: str) -> bool:
    return os.path.isdir(os.path.join(checkpoint, _FOLDER))
