"""The engine's configuration: what may be set, the defaults, and error messages that help.

Keys exist only when they work. Unknown keys are errors that suggest the nearest known key; wrong values
are errors that name the key and say what is allowed. Values are never converted silently: `"3"` is not a
stage and `true` is not a number.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from zeroweave.config import sections
from zeroweave.config.deepspeed import translate
from zeroweave.config.deepspeed_keys import OUTERMOST
from zeroweave.config.messages import explain
from zeroweave.errors import ConfigError, UnsupportedStage
from zeroweave.notices import warn


class _Explained(sections.Section):
    """A section whose errors are ConfigErrors that say what to do."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            causes = [type(details.get("ctx", {}).get("error")) for details in error.errors()]
            kind = UnsupportedStage if UnsupportedStage in causes else ConfigError
            raise kind(explain(error, type(self))) from None


class Config(_Explained):
    """All settings of one engine. Immutable; `Config(stage=2)` and `Config.load(...)` raise ConfigError."""

    stage: Literal[1, 2, 3] = 3
    """ZeRO stage: 1 shards optimizer state, 2 gradients as well, 3 parameters as well."""

    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 1
    """Backwards in one optimizer step."""

    gradient_clipping: Annotated[float, Field(gt=0)] | None = None
    """Largest global 2-norm of the gradient; None: no clipping."""

    on_nonfinite: Literal["skip", "raise"] | None = None
    """Gradients that are infinite or NaN: skip the step, or raise; None: skip where losses are scaled, else no look."""

    loss: Literal["chunked"] | None = None
    """"chunked": cross-entropy of a language model in chunks of tokens, without whole logits; None: all at once."""

    gather_after_step: bool = False
    """Stages 1 and 2: gather the new parameters inside `step()`, for code that reads them in between."""

    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a rank waits for the others before it says which one is missing."""

    log_dir: Annotated[str, Field(min_length=1)] | None = None
    """Folder of `metrics.jsonl`, which rank 0 writes: figures and events of the run; None: none is written."""

    precision: sections.PrecisionConfig = sections.PrecisionConfig()
    bucket: sections.BucketConfig = sections.BucketConfig()
    reduce: sections.ReduceConfig = sections.ReduceConfig()
    sharding: sections.ShardingConfig = sections.ShardingConfig()
    compile: sections.CompileConfig = sections.CompileConfig()
    transport: sections.TransportConfig = sections.TransportConfig()
    experts: sections.ExpertsConfig = sections.ExpertsConfig()
    activations: sections.ActivationsConfig = sections.ActivationsConfig()
    offload: sections.OffloadConfig = sections.OffloadConfig()
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    log: sections.LogConfig = sections.LogConfig()
    debug: sections.EngineDebugConfig = sections.EngineDebugConfig()

    @field_validator("stage", mode="before")
    @classmethod
    def _stage_is_a_number(cls, stage: object) -> object:
        if isinstance(stage, bool):  # True == 1, and a Literal compares by equality
            raise ValueError(f"stage must be 1, 2 or 3, not {stage}")
        if stage == 0:
            raise UnsupportedStage(
                "stage must be 1, 2 or 3, not 0: every stage shards at least the optimizer's states; what "
                "shards nothing is torch.nn.parallel.DistributedDataParallel"
            )
        return stage

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        if self.gather_after_step and self.stage == 3:
            raise ValueError(
                "[ZW103] gather_after_step works with stages 1 and 2 only: stage 3 keeps no parameters gathered; "
                "read them in engine.full_parameters()"
            )
        if self.offload.params and self.stage != 3:
            raise ValueError(
                f"[ZW103] offload.params works with stage 3 only, not {self.stage}: stages 1 and 2 keep parameters "
                "gathered; set stage to 3, or use offload.optimizer"
            )
        if self.precision.optimizer == "compact" and self.offload.params:
            raise ValueError(
                "[ZW103] precision.optimizer 'compact' keeps what is gathered on the device, and offload.params in "
                "host memory: leave offload.params out, or set precision.optimizer to 'full'"
            )
        if "tensorboard" in self.log.to and self.log_dir is None:
            raise ValueError("[ZW103] log.to 'tensorboard' writes to log_dir: set that to a folder")
        return self

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> Config:
        """The config that `source` describes: a Config, a mapping, the path of a .json or .toml file, None.

        None gives the defaults. ConfigError where a file is missing or malformed, a key is unknown, or a
        value is wrong; the message names all offending keys at once.
        """
        if isinstance(source, Config):
            return source
        if source is None:
            return cls()
        if not isinstance(source, Mapping | str | os.PathLike):
            raise ConfigError(
                "[ZW104] the config must be a dict, a zeroweave.Config or the path of a JSON or TOML file, "
                f"not {type(source).__name__}"
            )
        with opened(source) as given:
            return cls._of_mapping(given)

    @classmethod
    def from_deepspeed(
        cls, source: Mapping[str, Any] | str | os.PathLike[str], auto: Mapping[str, Any] | None = None
    ) -> Config:
        """The config that means what a DeepSpeed config does: a mapping, or the path of its JSON file.

        `auto`: what "auto" means in it, by dotted names, such as {"bf16.enabled": True}. A key that is not "auto" must
        have that value, too; one that the file does not have stays out. A file with an `optimizer` or a `scheduler` is
        read by `zeroweave.load_deepspeed`.

        docs/deepspeed.md says what becomes of each key. A warning names the keys that change no result and are
        ignored; another says that nothing is clipped where `gradient_clipping` is missing. ConfigError names all keys
        at once that change results or memory and cannot be honoured.
        """
        with opened(source) as given:
            values, warnings = translate(given, auto or {})
            config = cls._of_mapping(values)
        for warning in warnings:
            warn(warning)
        return config

    @classmethod
    def _of_mapping(cls, values: Mapping[Any, Any]) -> Config:
        for key in values:
            if not isinstance(key, str):
                raise ConfigError(f"[ZW104] keys of the config must be strings, not {key!r}")
        if foreign := [key for key in values if key in OUTERMOST and key not in cls.model_fields]:
            raise ConfigError(
                f"[ZW105] {', '.join(map(repr, foreign))} of a DeepSpeed config: read it with "
                "zeroweave.Config.from_deepspeed(path_or_dict), and pass what that returns"
            )
        return cls(**values)


class RuntimeConfig(_Explained, sections.DebugConfig):
    """Settings of the low-level runtime (`zeroweave.dc`)."""

    double_buffer: bool = True
    """Two reductions in flight at once instead of one."""

    symmetric_memory: bool = False
    """Gather parameters through a registered buffer, by copy engine; a warning says why where that is not possible."""

    pre_div_reduce: bool = True
    """Divide gradients by the world before they are summed; false: the backend's average."""

    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype in which gradients travel and are summed over ranks; None: their own, for sums of micro-steps too."""

    free_activation_threshold: Annotated[int, Field(ge=0)] = 10_000_000
    """`free_tensors` frees tensors of more elements than this."""

    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a rank waits for the others before it says which one is missing."""

    @classmethod
    def load(cls, source: object) -> RuntimeConfig:
        """From a mapping, whose keys must be known, or an object, of which only the known attributes are read."""
        if source is None:
            return cls()
        if isinstance(source, cls):
            return source
        if isinstance(source, Mapping):
            return cls(**source)
        return cls(**{name: getattr(source, name) for name in cls.model_fields if hasattr(source, name)})


# ---------------------------------------------------------------------- files
@contextmanager
def opened(source: Mapping[Any, Any] | str | os.PathLike[str]) -> Iterator[Mapping[Any, Any]]:
    """The table of keys that `source` is, or that it names. A ConfigError inside gets the file's name in front."""
    if isinstance(source, Mapping):
        yield source
        return
    path = Path(source)
    try:
        yield _read(path)
    except ConfigError as error:
        raise type(error)(f"{path}: {error}") from None


def _read(path: Path) -> Mapping[str, Any]:
    """The table of keys in a .json or .toml file. ConfigError where it cannot be read, or holds none."""
    kind = path.suffix.lower()
    if kind not in (".json", ".toml"):
        raise ConfigError("[ZW104] the config file must end in .json or .toml")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if kind == ".toml" else json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        raise ConfigError(f"[ZW104] the config file cannot be read: {error.strerror}") from None
    except ValueError as error:  # malformed JSON, TOML or UTF-8
        raise ConfigError(f"[ZW104] the config file is not valid {kind[1:].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"[ZW104] the config file must hold a table of keys, not a {type(values).__name__}")
    return values


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON. Python's parser takes the last of two equal keys silently; TOML's refuses them."""
    table = dict(pairs)
    if len(table) != len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"[ZW104] more than one {' and '.join(map(repr, twice))} in one table: keep one")
    return table
