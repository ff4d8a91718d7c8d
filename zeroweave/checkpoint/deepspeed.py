"""DeepSpeed's ZeRO checkpoints, read as what a checkpoint of zeroweave holds.

    DIR/latest                                            the tag
    DIR/TAG/mp_rank_00_model_states.pt                    buffers, names and shapes; at stage 3 zero_pp_rank_R_…
    DIR/TAG/zero_pp_rank_R_mp_rank_00_optim_states.pt     rank R's masters and optimizer states, flat, for each group;
                                                          of a run in bfloat16 bf16_zero_pp_rank_R_…

At stages 1 and 2, and in its `BF16_Optimizer`, a group's parameters follow each other in the order of
`param_shapes`, and each rank has an equal range of that, the last ones padded. (`param_slice_mappings` tells another
order where `round_robin_gradients` is on, and is wrong there.) At stage 3 each rank has a piece of each parameter, all
of one length, the last one padded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zeroweave.checkpoint import plain
from zeroweave.checkpoint.export import Model
from zeroweave.checkpoint.files import Part
from zeroweave.checkpoint.folder import Folder
from zeroweave.checkpoint.manifest import NAMES
from zeroweave.checkpoint.torch_save import load
from zeroweave.checkpoint.writer import Content, Saving
from zeroweave.errors import CheckpointError, EngineError
from zeroweave.ranks.control import Control

_OPTIMIZER: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_OWN: Final = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler "
    "data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config "
    "ds_version checkpoint_parallel_dimensions sparse_tensor_module_names autotp_uc_info torch_rng_state".split()
)
"""What DeepSpeed itself writes besides what a program hands in."""
_NOT_OF_TORCH: Final = frozenset({"params", "step", "bias_correction"})
"""In groups of DeepSpeed's `FusedAdam` and `DeepSpeedCPUAdam`, whose states are those of `Adam` and `AdamW`."""


class Imported(NamedTuple):
    """A checkpoint that can be written: `left_out` names what of it cannot."""

    tag: str
    step: int
    stage: int
    content: Content
    left_out: list[str]


class _Source(NamedTuple):
    """A parameter's elements: in order, ranges of flat tensors, of which the last may be longer than is needed."""

    shape: tuple[int, ...]
    ranges: list[tuple[torch.Tensor, int, int]]

    def whole(self) -> torch.Tensor:
        numel = torch.Size(self.shape).numel()
        flat = torch.cat([tensor.narrow(0, start, count) for tensor, start, count in self.ranges])
        return flat[:numel].view(self.shape)


def convert(source: Path, folder: Path, optimizer: str) -> str:
    """Makes a checkpoint in `folder`, whose optimizer is of the class `optimizer`; what was done, in words."""
    found, alone = read(source, optimizer), Control()
    Saving(Folder(folder), found.tag, found.step, found.stage, lambda: found.content, alone, None).finish()
    left_out = f", without {', '.join(found.left_out)}" if found.left_out else ""
    return f"wrote the checkpoint {found.tag} of {source} to {folder}{left_out}"


def read(path: Path, kind: str) -> Imported:
    """The checkpoint in `path`, or the latest there. `kind`: the class of its optimizer, which it does not tell.

    CheckpointError for what is missing, does not fit together, or is of another parallelism.
    """
    try:
        return _read(path, kind)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        if isinstance(error, EngineError):
            raise
        raise CheckpointError(
            f"[ZW608] {path} is laid out in an unknown way: {type(error).__name__}: {error}"
        ) from None


def _read(path: Path, kind: str) -> Imported:
    if (latest := path / "latest").is_file():
        tag = latest.read_text().strip()
        if tag in ("", ".", "..") or Path(tag).name != tag:
            raise CheckpointError(f"[ZW608] {latest} names {tag!r}, which is no folder beside it")
        path = path / tag
    optimizers = _ranks(path)
    states = [load(file)["optimizer_state_dict"] for file in optimizers]
    sharded = "fp32_flat_groups" in states[0]  # stage 3
    files = [path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(states))]
    models = [load(file) for file in (files if sharded else [path / "mp_rank_00_model_states.pt"])]
    model = models[0]
    if model["dp_world_size"] != len(states):
        raise CheckpointError(
            f"[ZW608] {path} has the files of {len(states)} ranks, and {model['dp_world_size']} wrote it"
        )
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    sources, scalars, groups = (_stage_3 if sharded else _stage_2)(states, shapes)
    trained = dict.fromkeys(name for group in shapes for name in group)
    for name, value in model["module"].items():
        if name in model["buffer_names"]:
            sources[f"buffer/{name}"] = _of([value], tuple(value.shape))
        elif name not in trained and name not in model["shared_params"] and not sharded:
            sources[f"param/{name}"] = _of([value], tuple(value.shape))
    for name, shape in (model["frozen_param_shapes"] or {}).items() if sharded else ():
        sources[f"param/{name}"] = _of([one["frozen_param_fragments"][name] for one in models], tuple(shape))
    for name, source in sources.items():
        have, need = sum(count for _, _, count in source.ranges), torch.Size(source.shape).numel()
        if not need <= have < need + (len(states) if sharded else 1):
            raise CheckpointError(f"[ZW608] {path} has {have} elements of {name}, which has {need}")
        if any(start + count > tensor.numel() for tensor, start, count in source.ranges):
            raise CheckpointError(f"[ZW608] {path} has fewer elements of {name} than it says")
    if not sharded:
        _check_masters(sources, {name: model["module"][name] for name in trained})
    stored = plain.Stored("client")
    values, left_out = _values(model, states[0], kind, shapes, groups, stored)
    sources |= {name: _of([tensor], tuple(tensor.shape)) for name, tensor in stored.tensors.items()}
    if hasattr(torch.optim, kind):  # it counts in tensors, and cannot continue with numbers, in which DeepSpeed counts
        for name, value in scalars.items():
            if isinstance(value, int):
                scalars[name] = torch.tensor(float(value), dtype=torch.float32, device="cpu")
    values |= {name: plain.encode(value, name) for name, value in scalars.items()}
    parts = [
        Part(name, source.shape, source.ranges[0][0].dtype, 0, torch.Size(source.shape).numel())
        for name, source in sources.items()
    ]
    tensors = (source.whole() for source in sources.values() if torch.Size(source.shape).numel())
    stage = 3 if sharded else states[0]["zero_stage"].arguments[0] if "zero_stage" in states[0] else 1
    return Imported(path.name, model["global_steps"], stage, Content(parts, tensors, values), left_out)


def _check_masters(sources: Mapping[str, _Source], weights: Mapping[str, torch.Tensor]) -> None:
    """The model's own weights are the masters in its dtype. CheckpointError where other elements have been found."""
    for name, weight in weights.items():
        found = sources[f"param/{name}"].whole().to(weight.dtype)
        if not torch.equal(found.nan_to_num(), weight.nan_to_num()):
            raise CheckpointError(f"[ZW608] the master of {name} is not that of the model's weight")


def _of(pieces: Sequence[torch.Tensor], shape: tuple[int, ...]) -> _Source:
    return _Source(shape, [(piece.reshape(-1), 0, piece.numel()) for piece in pieces])


def _ranks(path: Path) -> list[Path]:
    """The files of the optimizer, by rank."""
    found: dict[int, Path] = {}
    for file in path.glob("*optim_states.pt"):
        if (match := _OPTIMIZER.fullmatch(file.name)) is None:
            raise CheckpointError(f"[ZW608] {file} is of tensor, pipeline or expert parallelism")
        if (rank := int(match[1])) in found:
            raise CheckpointError(
                f"[ZW608] {path} has the files of two checkpoints: {found[rank].name} and {file.name}"
            )
        found[rank] = file
    if not found or sorted(found) != list(range(len(found))):
        raise CheckpointError(
            f"[ZW608] {path} is no whole checkpoint of DeepSpeed's ZeRO: it has files of the ranks {sorted(found)}"
        )
    return [found[rank] for rank in range(len(found))]


_Found = tuple[dict[str, _Source], dict[str, Any], Sequence[Mapping[str, Any]]]
"""Sources of tensors and values of parameters, by their names in a checkpoint, and the optimizer's groups."""


def _stage_2(states: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> _Found:
    sources: dict[str, _Source] = {}
    scalars: dict[str, Any] = {}
    options = states[0]["base_optimizer_state"]
    if isinstance(options, list):
        raise CheckpointError("[ZW608] it was written with elastic_checkpoint, and has no options of the optimizer")
    for group, named in enumerate(shapes):
        masters = [rank["single_partition_of_fp32_groups"][group] for rank in states]
        held = [rank["base_optimizer_state"]["state"].get(group, {}) for rank in states]
        ranks = [_split(*each) for each in zip(held, masters, strict=True)]
        gaps = states[0].get("param_alignment_paddings")
        start = 0
        for (name, shape), gap in zip(named.items(), gaps[group] if gaps else [0] * len(named), strict=True):
            numel = torch.Size(shape).numel()
            for rank, first, count in _cut(start, numel, masters[0].numel(), len(states)):
                flats, single = ranks[rank]
                for key, flat in flats.items():
                    sources.setdefault(key.format(name), _Source(shape, [])).ranges.append((flat, first, count))
                scalars.update({f"scalar/{name}/{key}": value for key, value in single.items()})
            start += numel + gap
    return sources, scalars, options["param_groups"]


def _cut(start: int, numel: int, size: int, world: int) -> Iterator[tuple[int, int, int]]:
    """Elements `start` to `start + numel` of ranges of `size` each: which rank has how many, and from where in its own.

    The last rank's range ends with what it has.
    """
    end = start + numel
    while start < end:
        rank = min(start // size, world - 1) if size else world - 1
        count = end - start if rank == world - 1 else min(end, (rank + 1) * size) - start
        yield rank, start - rank * size, count
        start += count


def _stage_3(states: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> _Found:
    sources: dict[str, _Source] = {}
    scalars: dict[str, Any] = {}
    pieces = [
        (name, shape, -(-torch.Size(shape).numel() // len(states))) for group in shapes for name, shape in group.items()
    ]
    for rank in states:
        held, masters = rank["optimizer_state_dict"]["state"], rank["fp32_flat_groups"]
        subs = [(flat.numel(), *_split(held.get(index, {}), flat)) for index, flat in enumerate(masters)]
        have, needed = sum(size for size, _, _ in subs), sum(count for _, _, count in pieces)
        if have != needed:
            raise CheckpointError(f"[ZW608] a rank has {have} elements, and {needed} of the parameters")
        sub, start = 0, 0
        for name, shape, left in pieces:
            while left:
                while start == subs[sub][0]:
                    sub, start = sub + 1, 0
                size, flats, single = subs[sub]
                count = min(left, size - start)
                for key, flat in flats.items():
                    sources.setdefault(key.format(name), _Source(shape, [])).ranges.append((flat, start, count))
                scalars.update({f"scalar/{name}/{key}": value for key, value in single.items()})
                left, start = left - count, start + count
    return sources, scalars, states[0]["optimizer_state_dict"]["param_groups"]


def _split(held: Mapping[str, Any], masters: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What there is of each element, by name with a place for the parameter's, and of all of them together."""
    flats, single = {"param/{}": masters}, {}
    for key, value in held.items():
        if isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() >= masters.numel():
            flats[f"state/{{}}/{key}"] = value
        else:
            single[key] = value
    return flats, single


def _values(
    model: Mapping[str, Any],
    state: Mapping[str, Any],
    kind: str,
    shapes: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    stored: plain.Stored,
) -> tuple[dict[str, Any], list[str]]:
    """What is not of single parameters, and the names of what has no place in a checkpoint of zeroweave.

    `stored`: gets what of it are large tensors.
    """
    left_out = ["lr_scheduler"] if model["lr_scheduler"] is not None else []
    client = {}
    for name in sorted(model.keys() - _OWN):
        try:
            client[name] = plain.encode(model[name], name, stored)
        except EngineError:
            left_out.append(name)
    steps = int(model["ds_config"].get("gradient_accumulation_steps", 1))
    dtypes = {name: NAMES[model["module"][name].dtype] for group in shapes for name in group}
    told = Model(dtypes=dtypes, aliases=dict(model["shared_params"]), configs={})
    names = [list(group) for group in shapes]
    dropped = _NOT_OF_TORCH if hasattr(torch.optim, kind) else {"params"}
    options = [{key: value for key, value in group.items() if key not in dropped} for group in groups]
    if dropped is _NOT_OF_TORCH and not all(group.get("bias_correction", True) for group in groups):
        raise CheckpointError(f"[ZW608] its optimizer does without bias_correction, which {kind} cannot")
    scale = float(state["loss_scaler"].cur_scale) if "zero_stage" in state else 1.0  # BF16_Optimizer has neither
    values = {
        "run": {"micro_steps": model["global_steps"] * steps, "skipped_steps": model["skipped_steps"]},
        "client": client,
        "loss_scale": plain.encode({"value": scale, "good_steps": 0, "patience": 1}, "loss_scale"),
        "model": plain.encode(told.model_dump(), "model"),
        "optimizer": {
            "kind": kind,
            "groups": [
                {"params": mine, "options": {key: plain.encode(value, key) for key, value in own.items()}}
                for mine, own in zip(names, options, strict=True)
            ],
        },
    }
    return values, sorted(left_out)
