"""The sections of the config, each its own table; see `config` for what all of them are in."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_Scale = Annotated[float, Field(gt=0)]
_DYNAMIC = frozenset({"initial_loss_scale", "loss_scale_window", "loss_scale_hysteresis", "min_loss_scale"})
"""Keys of `precision` that mean something for a dynamic loss scale only."""


class Section(BaseModel):
    """A table of keys: unknown ones are errors, and values are not converted."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class PrecisionConfig(Section):
    """Dtypes of parameters, gradients in transit and gradients at rest, and the loss scale. Masters are float32."""

    params: Literal["bfloat16", "float16", "float32"] | None = None
    """Dtype in which floating-point parameters are gathered and computed with; None: the model's own."""

    autocast: Literal["bfloat16", "float16"] | None = None
    """`engine(...)` runs the model under `torch.autocast` with this dtype; None: not."""

    master: Literal["split", "float32"] = "split"
    """How the masters of bfloat16 parameters are kept: "split" into the bfloat16 that is gathered and the 16 bits that
    it lacks, or in float32. Equal bit for bit; masters of float16 and of `offload.params` are always float32."""

    optimizer: Literal["full", "compact"] = "full"
    """"compact": Adam and AdamW of bfloat16 parameters keep 5.125 bytes an element instead of 12, the upper 24 bits of
    masters and 8 of moments; close to "full", but not equal bit for bit."""

    reduce: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype in which gradients travel and are summed over ranks; None: that of the parameters."""

    accumulate: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the gradient shards in which the micro-steps of a window add up."""

    loss_scale: Literal["dynamic"] | _Scale | None = None
    """What losses are multiplied by; None: "dynamic" where anything is trained in float16, else none."""

    initial_loss_scale: _Scale = 65536.0
    """The dynamic loss scale at the start."""

    loss_scale_window: Annotated[int, Field(ge=1)] = 2000
    """Steps in a row without an overflow that double the dynamic loss scale."""

    loss_scale_hysteresis: Annotated[int, Field(ge=1)] = 1
    """Overflows until the dynamic loss scale is halved, from the start and from each doubling on."""

    min_loss_scale: _Scale = 1.0
    """The dynamic loss scale is never lower."""

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        for name in ("loss_scale", "initial_loss_scale", "min_loss_scale"):
            if isinstance(value := getattr(self, name), float) and not 2.0**-126 <= value <= 2.0**127:
                raise ValueError(f"precision.{name} must be from 2**-126 to 2**127, as float32 has it, not {value:g}")
        if self.optimizer == "compact" and self.params not in (None, "bfloat16"):
            raise ValueError(
                f"[ZW103] precision.optimizer 'compact' is for bfloat16 parameters, not {self.params}: set "
                "precision.params to 'bfloat16', or precision.optimizer to 'full'"
            )
        if self.optimizer == "compact" and self.master == "float32":
            raise ValueError(
                "[ZW103] precision.master 'float32' is for precision.optimizer 'full': 'compact' keeps masters in a "
                "way of its own; leave precision.master out"
            )
        given = sorted(self.model_fields_set & _DYNAMIC)
        if isinstance(self.loss_scale, float) and given:
            names = ", ".join(f"precision.{name}" for name in given)
            raise ValueError(
                f"[ZW103] precision.loss_scale is the number {self.loss_scale:g}, which never changes: leave out "
                f"{names}, or set it to 'dynamic'"
            )
        if self.initial_loss_scale < self.min_loss_scale:
            raise ValueError(
                "[ZW103] precision.initial_loss_scale must be at least precision.min_loss_scale "
                f"({self.min_loss_scale:g}), not {self.initial_loss_scale:g}"
            )
        return self


class BucketConfig(Section):
    """How parameters are grouped for communication."""

    bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Largest bucket in bytes; a single parameter above it has its own bucket."""

    by_block: bool | Annotated[int, Field(ge=1)] = True
    """One bucket for each block; a number: for so many neighbouring blocks of a list, or as many as fit into `bytes`;
    false: neighbours fill buckets up to `bytes`, also across blocks."""


class ReduceConfig(Section):
    """How gradients are reduced over ranks."""

    depth: Annotated[int, Field(ge=1)] = 2
    """Most reductions in flight at once; each holds one gradient flat. Buckets of less than 1/256 of the largest one's
    bytes count together, by their bytes."""

    op: Literal["average", "predivide"] = "average"
    """"average": the backend's average; "predivide": divide by the world, then sum."""


class CompileConfig(Section):
    """What is compiled and how."""

    enabled: bool = True
    """False: every module runs eagerly, through hooks."""

    regions: Literal["auto"] | Annotated[tuple[str, ...], Field(strict=False)] = "auto"
    """"auto": the repeated blocks and what is left between them; else patterns of module names (fnmatch).

    Named regions have their own buckets, compiled or not, which are gathered together.
    """

    lower: Literal["inductor", "aot_eager"] = "inductor"
    """What turns a traced graph into code: Inductor, or PyTorch's own eager kernels."""

    recompile_limit: Annotated[int, Field(ge=1, le=256)] = 16
    """Most variants that are compiled of regions with equal code; further ones run eagerly and are reported."""

    activation_budget: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of activation bytes that a compiled forward may save; the rest is computed again in the backward."""

    prefetch: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """How many calls ahead of its use a bucket's gather is issued; "auto": as early as measured times require."""

    keep: Literal["auto", "none", "all"] | Annotated[tuple[str, ...], Field(strict=False)] = "auto"
    """Stage 3: buckets that stay gathered from one use to the next; "auto": as many as `memory_budget` has room for."""

    memory_budget: Literal["auto", "none"] | Annotated[int, Field(ge=0)] = "auto"
    """Bytes of device memory that "auto" may fill; "auto": what is free once steps were measured, less a reserve;
    "none": gathers one bucket more ahead, keeps none. On a CPU "auto" is "none"."""

    record_steps: Annotated[int, Field(ge=0)] = 3
    """How many steps are timed before "auto" decides; 0: it never does."""

    passes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Your passes, which run after the built-in ones, each as "module:function"."""

    cuda_graphs: bool = True
    """On GPUs compiled calls are launched as CUDA graphs, once steps have settled and where memory is not short."""

    dynamic: bool | None = None
    """As in torch.compile: None: dynamic shapes after the first recompile; true: at once; false: never."""

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _no_budget(cls, budget: object) -> object:
        return "none" if budget is None else budget


class TransportConfig(Section):
    """How data crosses ranks."""

    gathers: Literal["auto", "copy_engine", "kernel"] = "auto"
    """What gathers parameters inside one node: kernels or copy engines; "auto": copy engines from 1 MiB on."""


class ShardingConfig(Section):
    """How parameters are sharded."""

    group_size: Annotated[int, Field(ge=1)] | None = None
    """Ranks that gather parameters together, normally those of one node; a divisor of all ranks. None: all ranks.

    Parameters are sharded over groups of so many consecutive ranks and replicated across groups. Between groups each
    step sends two parts of the model, however many micro-steps it has: gradients before the update, and parameters
    after it. A rank keeps model / group_size in the dtype of the computation, and as much for gradients."""

    states: Literal["all", "group"] = "all"
    """Whether optimizer states are sharded over all ranks or over those of a group, so that each group has all.

    With "group" gradients are all-reduced between groups, and nothing is sent after the update. As many bytes travel; a
    rank keeps states / group_size."""

    optional: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Stage 3: patterns of the names of modules (fnmatch) that some ranks may leave out of a forward.

    Their parameters stay gathered from the window's first forward to the optimizer step, as at stage 2."""


class ExpertsConfig(Section):
    """Which parameters are experts', each rank's own, and how many ranks exchange tokens."""

    parameters: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of the names of experts' parameters (fnmatch)."""

    parallel_size: Annotated[int, Field(ge=1)] = 1
    """How many consecutive ranks exchange tokens, each with its own experts; 1: all ranks have the same experts."""

    @model_validator(mode="after")
    def _experts_have_names(self) -> Self:
        if self.parallel_size > 1 and not self.parameters:
            raise ValueError(
                f"[ZW103] experts.parallel_size is {self.parallel_size}, but experts.parameters does not say which "
                "parameters "
                'are experts\'; name them by patterns such as "*.experts.*"'
            )
        return self


class ActivationsConfig(Section):
    """What becomes of activations that a forward has saved for its backward."""

    free_threshold_bytes: Annotated[int, Field(ge=0)] | None = None
    """Activations of this size and more that no backward has used up are freed before the optimizer step; None: none.

    Those of retained graphs and of forwards without a backward: an ordinary backward leaves none.
    """


class CheckpointConfig(Section):
    """Which checkpoints stay, and when one is written unasked; see docs/checkpoints.md."""

    keep_last: Annotated[int, Field(ge=1)] | None = None
    """Each save removes older checkpoints of its folder than this many; None: all stay."""

    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Those whose optimizer step is a multiple of this stay for good."""

    save_on_signal: Annotated[str, Field(min_length=1)] | None = None
    """SIGTERM and SIGUSR1 at any rank save to this folder at the end of the step; SIGTERM then ends the job."""

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        if self.keep_every is not None and self.keep_last is None:
            raise ValueError(
                "[ZW103] checkpoint.keep_every is for checkpoint.keep_last, without which all checkpoints stay"
            )
        return self


class LogConfig(Section):
    """How a run is logged while it trains; see docs/logs.md."""

    every: Annotated[int, Field(ge=1)] = 10
    """After so many optimizer steps the ranks put figures together, which waits for the device."""

    progress: bool = False
    """Rank 0 shows them on stderr: a bar on a terminal, else lines."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the whole run, for the bar; None: unknown."""

    to: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], Field(strict=False)] = ()
    """Where figures go besides `log_dir`; each library must be installed."""

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        if self.steps is not None and not self.progress:
            raise ValueError("[ZW103] log.steps is the length of the bar that log.progress shows: set that to true")
        return self


class OffloadConfig(Section):
    """What lives in host memory and comes to the device when it is needed."""

    optimizer: Literal["none", "all", "adaptive"] = "none"
    """The optimizer's states, masters included; "adaptive": what of them `memory_budget` has no room for."""

    params: bool = False
    """Stage 3: shards, masters included, live in host memory; each is uploaded before it is gathered."""

    memory_budget: Annotated[int, Field(ge=0)] | None = None
    """Bytes of device memory that "adaptive" may fill in addition to what training itself takes at its peak."""

    activations: bool = False
    """What forwards have saved waits in host memory for its backward, where that does not follow at once."""

    activations_threshold_bytes: Annotated[int, Field(ge=0)] = 1 << 20
    """Activations below this size stay on the device."""

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        if self.optimizer == "adaptive" and self.memory_budget is None:
            raise ValueError(
                "[ZW103] offload.optimizer is 'adaptive', which needs a limit: set offload.memory_budget to the bytes "
                "of device memory that may be used, or offload.optimizer to 'all'"
            )
        if self.optimizer != "adaptive" and self.memory_budget is not None:
            raise ValueError(
                f"[ZW103] offload.memory_budget is for offload.optimizer 'adaptive', not {self.optimizer!r}: leave it "
                "out"
            )
        return self


class DebugConfig(Section):
    """Switches that make a run slower and its errors easier to place."""

    sync_before_reduce: bool = False
    """Wait for the device before each reduction of gradients is issued."""

    sync_after_reduce: bool = False
    """Wait for each reduction of gradients to finish before anything else is done."""

    sync_before_allgather: bool = False
    """Wait for the device before each gather of parameters is issued."""

    sync_after_allgather: bool = False
    """Wait for each gather of parameters to finish before anything else is done."""

    check_every_step: bool = False
    """After every backward the ranks compare which collectives they have issued, and in which order."""


class EngineDebugConfig(DebugConfig):
    """As above, and what only an engine has."""

    check_graphs: bool = False
    """Compare each new graph of `compile.cuda_graphs` with its code; `engine.stats.graph_difference` has the result."""

    keep_gradient_targets: bool = False
    """Reduced gradients have their own memory from set-up on, instead of from their reduction to the update."""
