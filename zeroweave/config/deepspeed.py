"""DeepSpeed's configuration in terms of zeroweave's: what of it is mapped, what is ignored, what is refused.

`KEYS` is the whole of it. Whatever is not in it is refused as well: a key that nobody knows may change results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from zeroweave.config.deepspeed_keys import KEYS, key_of
from zeroweave.config.deepspeed_values import DTYPES, RULES, SYNCS
from zeroweave.config.messages import nearest
from zeroweave.errors import ConfigError

_FREED: Final = 10 * 1024 * 1024
"""`compile.free_activation_threshold` where it is not written."""


_NAMES: Final = tuple(dict.fromkeys(name for key in KEYS for name in accumulate(key.split("."), "{}.{}".format)))
"""All dotted names, those of sections included."""


_PREFIXED: Final = "zero_optimization.stage3_"
_RENAMED: Final = {
    "bfloat16": "bf16",
    **{f"zero_optimization.{key.removeprefix(_PREFIXED)}": key for key in KEYS if key.startswith(_PREFIXED)},
}
"""Other names of the same keys."""

_AUTO_IS_DEFAULT: Final = frozenset(
    f"zero_optimization.{name}"
    for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size")
)
"""Mapped keys that change no result: an integration's "auto" leaves zeroweave's default."""

_SWITCHED: Final = ("bf16", "fp16", "torch_autocast")
"""Sections of several keys with a switch, "enabled"."""


def translate(source: Mapping[str, Any], auto: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `Config` that a DeepSpeed configuration means, and what users are to be warned of.

    `auto`: see `Config.from_deepspeed`. ConfigError names every key that is refused, unknown or left to an
    integration, at once.
    """
    problems = [f"{key!r} of `auto`: unknown{_meant(key)}" for key in map(str, auto) if key_of(key) is None]
    filled = fill(source, auto, problems)
    problems += [f"{old} and {new}: one of them" for old, new in _RENAMED.items() if {old, new} <= filled.keys()]
    values = _asked(dict(_flat(filled)))
    problems += [problem for key, value in values.items() if (problem := _problem(key, value))]
    if not problems:
        problems = [*_contradictions(values)]
    refuse(problems)
    return _config(values), [*_warnings(values)]


def refuse(problems: Sequence[str]) -> None:
    """ConfigError that lists them, if there are any."""
    if problems:
        raise ConfigError("\n".join(["the DeepSpeed config cannot be followed:", *(f"- {each}" for each in problems)]))


def fill(source: Mapping[Any, Any], auto: Mapping[str, Any], problems: list[str], prefix: str = "") -> dict[str, Any]:
    """The configuration with `auto`'s values where it says "auto". `problems` gets what else differs."""
    filled: dict[str, Any] = {}
    for name, value in source.items():
        key = _RENAMED.get(f"{prefix}{name}", f"{prefix}{name}")
        if not isinstance(name, str):
            problems.append(f"{key} is not a string, as names are")
        elif isinstance(value, Mapping):
            filled[name] = fill(value, auto, problems, f"{key}.")
        elif value == "auto" and key in auto:
            filled[name] = auto[key]
        else:
            filled[name] = value
            known = list(auto[key]) if isinstance(auto.get(key), tuple) else auto.get(key)  # as JSON has them
            if key in auto and value != known:
                problems.append(f'{key} is {value!r}, but `auto` says {known!r}: make them equal, or write "auto"')
    return filled


def _asked(values: dict[str, Any]) -> dict[str, Any]:
    """Without what is in sections that are switched off. Unknown keys stay, as they may be misspelt ones."""
    off = [f"{section}." for section in _SWITCHED if values.get(f"{section}.enabled") is False]
    return {key: value for key, value in values.items() if key not in KEYS or not key.startswith(tuple(off))}


def left(key: str) -> str:
    """What is wrong with a key that is still "auto"."""
    return f"{key} is 'auto', which an integration fills in: write the value, or pass auto={{{key!r}: ...}}"


def _warnings(values: Mapping[str, Any]) -> Iterator[str]:
    if "gradient_clipping" not in values:
        yield (
            "the DeepSpeed config has no gradient_clipping, and nothing is clipped: newer DeepSpeed (0.19.8) clips at "
            "1.0 then, older does not. Write the value; 0 is none"
        )
    if ignored := sorted(key for key in values if KEYS[key].fate == "ignored"):
        yield f"ignored keys of the DeepSpeed config, which change no result: {', '.join(ignored)}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = _RENAMED.get(prefix + name, prefix + name)
        if key == "zero_optimization" and isinstance(value, bool):
            yield "zero_optimization.stage", int(value)
        elif isinstance(value, Mapping) and any(known.startswith(f"{key}.") for known in KEYS):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _problem(key: str, value: Any) -> str | None:
    known = KEYS.get(key)
    if known is None and key in _NAMES:
        return f"{key} is {value!r}: a section of keys"
    if known is None:
        return f"{key}: unknown, and it may change results{_meant(key)}"
    if known.fate == "ignored":
        return None
    if known.fate == "refused":
        return None if _asks_nothing(value, known.off) else f"{key} is {value!r}: {known.instead}"
    if value == "auto" and key not in _AUTO_IS_DEFAULT:
        return left(key)
    fits, allowed = RULES[key]
    return None if fits(value) else f"{key} is {value!r}: {allowed}"


def _meant(key: str) -> str:
    near = nearest(key, _NAMES)
    return f"; did you mean {near!r}?" if near else "; remove it"


def _asks_nothing(value: Any, off: tuple[Any, ...]) -> bool:
    """Is it one of `off`, or a section that is switched off as one of them is, whatever else it says?

    Sections of sections are off where all of them are; what a section's parts share is under `shared_parameters`.
    """
    if isinstance(value, Mapping) and value:
        switches = [each for each in off if isinstance(each, Mapping) and each]
        if any(each.items() <= value.items() for each in switches):
            return True
        parts = [value["shared_parameters"]] if "shared_parameters" in value else value.values()
        return bool(switches) and all(isinstance(part, Mapping) and part and _asks_nothing(part, off) for part in parts)
    return any(value == each and (value is True) is (each is True) for each in off)  # True would equal 1


def _contradictions(values: Mapping[str, Any]) -> Iterator[str]:
    if values.get("torch_autocast.enabled") and _dtype(values, "torch_autocast.dtype") == "float32":
        yield "torch_autocast.dtype is float32: bfloat16 or float16"
    if values.get("bf16.enabled") and values.get("fp16.enabled"):
        yield "bf16.enabled and fp16.enabled: one of them"
    yield from _batches(values)
    half = "bfloat16" if values.get("bf16.enabled") else "float16" if values.get("fp16.enabled") else "float32"
    if (dtype := _dtype(values, "data_types.param_dtype")) not in (None, half):
        yield f"data_types.param_dtype is {dtype}, but bf16.enabled and fp16.enabled say {half}"
    if _dtype(values, "data_types.grad_accum_dtype") == "float16":
        yield "data_types.grad_accum_dtype is 'fp16': fp32 or bf16"


def _batches(values: Mapping[str, Any]) -> Iterator[str]:
    """DeepSpeed wants the batch to be micro-batch × accumulation × ranks, and works out what is missing."""
    batch, micro = (values.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    if "gradient_accumulation_steps" not in values:
        if batch is not None and micro is not None:
            yield (
                "gradient_accumulation_steps is missing: write train_batch_size / (train_micro_batch_size_per_gpu × "
                "ranks)"
            )
        return
    steps = int(values["gradient_accumulation_steps"])
    one = micro if isinstance(micro, int) and micro > 0 else 1
    if isinstance(batch, int) and batch % (steps * one):
        times = f"{steps} steps of accumulation" + (f" × {one} samples" if one > 1 else "")
        yield f"train_batch_size is {batch}, which no number of ranks makes of {times}: correct one of them"


def _dtype(values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    return None if value is None else DTYPES[str(value).removeprefix("torch.")]


def _config(values: Mapping[str, Any]) -> dict[str, Any]:
    half = bool(values.get("bf16.enabled")) or bool(values.get("fp16.enabled"))
    config: dict[str, Any] = {"stage": int(values.get("zero_optimization.stage", 0)), "precision": _precision(values)}
    if "gradient_accumulation_steps" in values:
        config["gradient_accumulation_steps"] = int(values["gradient_accumulation_steps"])
    if values.get("gradient_clipping"):
        config["gradient_clipping"] = values["gradient_clipping"]
    if values.get("bf16.enabled") and values.get("bf16.check_grad_overflow", True):
        config["on_nonfinite"] = "skip"
    if config["precision"].get("loss_scale") == "dynamic":
        config["on_nonfinite"] = "raise"  # at the smallest scale; above it the step is skipped
    sizes = [values.get(f"zero_optimization.{name}") for name in ("reduce_bucket_size", "allgather_bucket_size")]
    if elements := [int(size) for size in sizes if size not in (None, "auto")]:
        config["bucket"] = {"bytes": min(elements) * (2 if half else 4)}
    config["offload"] = _offload(values)
    reduce = config["reduce"] = {}
    if values.get("prescale_gradients"):
        reduce["op"] = "predivide"
    if values.get("zero_optimization.overlap_comm") is False or values.get("compile.double_buffer") is False:
        reduce["depth"] = 1
    config["compile"] = _compile(values)
    if values.get("compile.free_activation"):
        autocast = bool(values.get("torch_autocast.enabled"))
        given = values.get("compile.free_activation_threshold")
        threshold = _FREED if given is None else int(given)
        config["activations"] = {"free_threshold_bytes": threshold * (2 if half or autocast else 4)}
    config["debug"] = {name: values[f"compile.{name}"] for name in SYNCS if f"compile.{name}" in values}
    return config


def _offload(values: Mapping[str, Any]) -> dict[str, Any]:
    offload: dict[str, Any] = {}
    if values.get("zero_optimization.offload_optimizer.device") == "cpu" or values.get("compile.offload_opt_states"):
        offload["optimizer"] = "all"
    if values.get("zero_optimization.offload_param.device") == "cpu" or values.get("compile.offload_parameters"):
        offload["params"] = True
    if values.get("activation_checkpointing.cpu_checkpointing") or values.get("compile.offload_activation"):
        offload["activations"] = True
    return offload


def _compile(values: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if switches := [values[key] for key in ("compile.enabled", "compile.deepcompile") if key in values]:
        given["enabled"] = any(switches)
    if "compile.backend" in values:
        given["lower"] = values["compile.backend"]
    if values.get("zero_optimization.stage3_prefetch_bucket_size") == 0:
        given["prefetch"] = 0
    return given


def _precision(values: Mapping[str, Any]) -> dict[str, Any]:
    precision: dict[str, Any] = {}
    if values.get("bf16.enabled"):
        precision["params"] = "bfloat16"
    if values.get("fp16.enabled"):
        precision["params"] = "float16"
        scale = values.get("fp16.loss_scale", 0)
        if scale:
            precision["loss_scale"] = float(scale)
        else:
            precision["loss_scale"] = "dynamic"
            precision["initial_loss_scale"] = 2.0 ** int(values.get("fp16.initial_scale_power", 16))
            precision["loss_scale_window"] = int(values.get("fp16.loss_scale_window", 1000))
            precision["loss_scale_hysteresis"] = int(values.get("fp16.hysteresis", 2))
            precision["min_loss_scale"] = values.get("fp16.min_loss_scale", 1)
    if values.get("torch_autocast.enabled"):
        precision["autocast"] = _dtype(values, "torch_autocast.dtype") or "bfloat16"
    for key, name in (("communication_data_type", "reduce"), ("data_types.grad_accum_dtype", "accumulate")):
        if (dtype := _dtype(values, key)) is not None:
            precision[name] = dtype
    return precision
