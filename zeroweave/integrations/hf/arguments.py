"""What a Trainer is told: transformers' arguments and zeroweave's config, where each setting has one place."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

import transformers

from zeroweave.config import Config
from zeroweave.errors import ConfigError

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
