"""A DeepSpeed configuration as arguments of zeroweave's `Config`. `deepspeed_keys` has the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from zeroweave.config.deepspeed_keys import IGNORED, KEYS, MAPPED, NAMES, REFUSED, RENAMED, SECTIONS, owner
from zeroweave.config.messages import finding, nearest
from zeroweave.errors import ConfigError

_ZERO: Final = "zero_optimization."
_DEFAULT_IF_AUTO: Final = tuple(
    f"{_ZERO}{name}"
    for name in ("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "stage3_prefetch_bucket_size")
)
"""Mapped keys that change no result: with an "auto" that is not filled in they keep zeroweave's default."""

_BATCH: Final = "train_batch_size / (train_micro_batch_size_per_gpu × ranks)"
_STRICT: Final = ConfigDict(strict=True, allow_inf_nan=False)


def translate(source: Mapping[str, Any], auto: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The arguments of `Config` that a DeepSpeed configuration means, and the warnings for the user.

    `auto`: see `Config.from_deepspeed`. One ConfigError names all keys that are refused, unknown, wrong or still
    "auto".
    """
    problems = [f"{key!r} of `auto`: unknown{_meant(key)}" for key in map(str, auto) if owner(key) is None]
    given: dict[str, Any] = {}
    for key, value in _flat(fill(source, auto, problems)):
        if key in given:
            problems.append(f"{key} is written twice, under an older name as well: keep one")
        given[key] = value
    off = tuple(f"{name}." for name in ("bf16", "fp16", "torch_autocast") if given.get(f"{name}.enabled") is False)
    values: dict[str, Any] = {}
    for key, value in given.items():
        if off and key in KEYS and key.startswith(off):  # unknown keys may be misspelt ones
            continue
        if (problem := _problem(key, value, values)) is not None:
            problems.append(problem)
    refuse(problems or [*_contradictions(given, values)])
    return _config(values), [*_warnings(given)]


def refuse(problems: Sequence[str]) -> None:
    """Raise a ConfigError that lists the problems, if there are any."""
    if problems:
        raise ConfigError(
            "\n".join(["[ZW105] the DeepSpeed config cannot be followed:", *(f"- {each}" for each in problems)])
        )


def fill(source: Mapping[Any, Any], auto: Mapping[str, Any], problems: list[str], prefix: str = "") -> dict[str, Any]:
    """The configuration with `auto`'s values in place of "auto". `problems` gets the keys that have another value."""
    filled: dict[str, Any] = {}
    for name, value in source.items():
        key = RENAMED.get(f"{prefix}{name}", f"{prefix}{name}")
        if isinstance(value, Mapping):
            filled[str(name)] = fill(value, auto, problems, f"{key}.")
            continue
        filled[str(name)] = auto[key] if value == "auto" and key in auto else value
        known = list(auto[key]) if isinstance(auto.get(key), tuple) else auto.get(key)  # JSON has lists
        if key in auto and value not in ("auto", known):
            problems.append(f'{key} is {value!r}, but `auto` says {known!r}: make them equal, or write "auto"')
    return filled


def left(key: str) -> str:
    """The problem of a key that is still "auto"."""
    return f"{key} is 'auto', which an integration fills in: write the value, or pass auto={{{key!r}: ...}}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values. A section that is taken as a whole is a value."""
    for name, value in values.items():
        key = RENAMED.get(prefix + name, prefix + name)
        if key == "zero_optimization" and isinstance(value, bool):  # DeepSpeed's first form
            yield f"{_ZERO}stage", int(value)
        elif isinstance(value, Mapping) and key in SECTIONS:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _problem(key: str, value: Any, values: dict[str, Any]) -> str | None:
    """What is wrong with a key, or None. `values` gets what a mapped key is converted to."""
    if key in IGNORED:
        return None
    if key in REFUSED:
        return None if _is_off(value, REFUSED[key].off) else f"{key} is {value!r}: {REFUSED[key].instead}"
    if key not in MAPPED:
        section = f"{key} is {value!r}: a section of keys"
        return section if key in NAMES else f"{key}: unknown, and it may change results{_meant(key)}"
    if value == "auto":
        return None if key in _DEFAULT_IF_AUTO else left(key)
    if value is not None:
        try:
            values[key] = TypeAdapter[Any](MAPPED[key].kind, config=_STRICT).validate_python(value)
        except ValidationError as error:
            return finding(key, error.errors())
    return None


def _meant(key: str) -> str:
    near = nearest(key, NAMES)
    return f"; did you mean {near!r}?" if near else "; remove it"


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """True if the value is one of `off`, or a section that has one of them among other keys."""
    if isinstance(value, Mapping) and value:
        return any(isinstance(each, Mapping) and each and each.items() <= value.items() for each in off)
    return any(value == each and (value is True) is (each is True) for each in off)  # True equals 1


def _contradictions(given: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    halves = [half for half in ("bf16", "fp16") if values.get(f"{half}.enabled")]
    if len(halves) > 1:
        yield "bf16.enabled and fp16.enabled: one of them"
    params = values[f"{halves[0]}.enabled"] if halves else "float32"
    if (dtype := values.get("data_types.param_dtype", params)) != params:
        yield f"data_types.param_dtype is {dtype}, but bf16.enabled and fp16.enabled say {params}"
    # DeepSpeed's batch is micro-batch × accumulation × ranks, and it computes the one that is missing.
    batch, micro = given.get("train_batch_size"), given.get("train_micro_batch_size_per_gpu")
    steps = values.get("gradient_accumulation_steps")
    if steps is None and batch is not None and micro is not None:
        yield f"gradient_accumulation_steps is missing: write {_BATCH}"
    samples = micro if isinstance(micro, int) and micro > 0 else 1
    if steps is not None and isinstance(batch, int) and batch % (steps * samples):
        times = f"{steps} steps of accumulation" + (f" × {samples} samples" if samples > 1 else "")
        yield f"train_batch_size is {batch}, which no number of ranks makes of {times}: correct one of them"


def _warnings(given: Mapping[str, Any]) -> Iterator[str]:
    if "gradient_clipping" not in given:
        yield (
            "the DeepSpeed config has no gradient_clipping, and nothing is clipped: newer DeepSpeed (0.19.8) clips at "
            "1.0 then, older does not. Write the value; 0 is none"
        )
    if ignored := sorted(key for key in given if key in IGNORED):
        yield f"ignored keys of the DeepSpeed config, which change no result: {', '.join(ignored)}"


def _config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Zeroweave's keys. Missing keys have DeepSpeed's defaults where those differ from zeroweave's."""
    config: dict[str, Any] = {"stage": 0}  # no stage is 0 for DeepSpeed, which `Config` refuses
    precision: dict[str, Any] = config.setdefault("precision", {})
    for key, value in values.items():
        if (ours := MAPPED[key].ours) and value is not None:
            section, _, name = ours.rpartition(".")
            place = config.setdefault(section, {}) if section else config
            place[name] = place.get(name) or value  # of two switches of one thing one is enough
    half = bool(values.get("bf16.enabled") or values.get("fp16.enabled"))
    if values.get("bf16.enabled") and values.get("bf16.check_grad_overflow", True):
        config["on_nonfinite"] = "skip"
    if values.get("fp16.enabled"):
        if scale := values.get("fp16.loss_scale", 0):
            precision["loss_scale"] = float(scale)
        else:
            config["on_nonfinite"] = "raise"  # at the smallest scale; above it the step is skipped
            precision |= {
                "loss_scale": "dynamic",
                "initial_loss_scale": 2.0 ** values.get("fp16.initial_scale_power", 16),
                "loss_scale_window": values.get("fp16.loss_scale_window", 1000),
                "loss_scale_hysteresis": values.get("fp16.hysteresis", 2),
                "min_loss_scale": values.get("fp16.min_loss_scale", 1),
            }
    if values.get("torch_autocast.enabled"):
        precision["autocast"] = values.get("torch_autocast.dtype", "bfloat16")
    sizes = [f"{_ZERO}reduce_bucket_size", f"{_ZERO}allgather_bucket_size"]
    if elements := [values[size] for size in sizes if size in values]:
        config["bucket"] = {"bytes": min(elements) * (2 if half else 4)}
    if values.get("compile.free_activation"):
        threshold = values.get("compile.free_activation_threshold", 10 << 20)
        nbytes = 2 if half or values.get("torch_autocast.enabled") else 4
        config["activations"] = {"free_threshold_bytes": threshold * nbytes}
    return config
