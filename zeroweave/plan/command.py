"""The command `zeroweave plan`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from zeroweave.plan.hardware import Calibration


def plan(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="config.json, its folder, or module:function", show_default=False),
    ] = None,
    stage: Annotated[Literal["1", "2", "3", "all"], typer.Option(help="ZeRO stage")] = "all",
    world: Annotated[
        list[int] | None, typer.Option(metavar="N", help="ranks, 1 to 1,024; may be given several times")
    ] = None,
    micro_batch: Annotated[int, typer.Option(metavar="N", min=1, help="sequences of a rank's batch")] = 1,
    seq: Annotated[int, typer.Option(metavar="N", min=2, help="tokens of a sequence")] = 1024,
    gas: Annotated[int, typer.Option(metavar="N", min=1, help="micro-steps of an optimizer step")] = 1,
    clip: Annotated[bool, typer.Option("--clip", help="gradients are clipped by their global norm")] = False,
    precision: Annotated[
        Literal["bfloat16", "float32"], typer.Option(help="of the parameters as they are computed with")
    ] = "bfloat16",
    compact: Annotated[
        bool, typer.Option("--compact", help="masters and moments of few bits (precision.optimizer 'compact')")
    ] = False,
    activation_budget: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="of activations that compiled blocks save; 0: none")
    ] = 1.0,
    loss: Annotated[
        Literal["chunked"] | None, typer.Option(help="of a language model without whole logits", show_default=False)
    ] = None,
    offload: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT[,WHAT]", help="optimizer, params (stage 3) and activations live in host memory"),
    ] = None,
    gpu: Annotated[
        Literal["a100", "h100", "h200"] | None,
        typer.Option(help="by its data sheet; the one that was calibrated if left out, else h200", show_default=False),
    ] = None,
    inside: Annotated[
        float | None, typer.Option(metavar="GB/S", min=0.001, help="of a rank inside its node, one direction")
    ] = None,
    between: Annotated[
        float | None, typer.Option(metavar="GB/S", min=0.001, help="of a rank between nodes, one direction")
    ] = None,
    host: Annotated[
        float | None, typer.Option(metavar="GB/S", min=0.001, help="of a rank to and from host memory, one direction")
    ] = None,
    group_size: Annotated[
        list[int] | None,
        typer.Option(metavar="N", min=1, help="of sharding groups; may be given several times", show_default="all"),
    ] = None,
    states: Annotated[
        Literal["all", "group"], typer.Option(help="which ranks share optimizer states, with --group-size")
    ] = "all",
    ranks_per_node: Annotated[int, typer.Option(metavar="N", min=1, help="ranks of a node")] = 8,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="measure this machine first, and write what it does to this file"),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="plan by a file that --calibrate has written"),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="also write the figures to this file")] = None,
) -> None:
    """Say what training MODEL with AdamW would take in memory and time, at each stage, without a GPU.

    One rank runs on tensors without memory, with the engine's own buckets, regions and schedules. What a GPU would do
    to it is calculated from its data sheet, and from what --calibrate has measured. With --calibrate MODEL may be left
    out.
    """
    from dataclasses import asdict, replace
    from json import dumps

    from zeroweave.errors import ConfigError, EngineError
    from zeroweave.notices import working
    from zeroweave.plan.hardware import GPUS, Efficiency, Hardware
    from zeroweave.plan.model import source_of
    from zeroweave.plan.plan import config_of, lines, make

    if model is None and calibrate is None:
        raise typer.BadParameter("which model? Only --calibrate needs none", param_hint="MODEL")
    if calibrate is not None and calibration is not None:
        raise typer.BadParameter("--calibrate measures anew: leave it or --calibration out", param_hint="--calibrate")
    sys.path.insert(0, "")  # as `python -m` has it, for module:function
    worlds = world or [8]
    try:
        if wrong := [each for each in worlds if not 1 <= each <= 1024]:
            raise EngineError(f"[ZW903] worlds have 1 to 1,024 ranks, not {wrong[0]}")
        known = _calibration(calibrate, calibration)
        if model is None:
            return
        links = {"inside": inside, "between": between, "host": host}
        given: dict[str, Any] = {name: rate * 1e9 for name, rate in links.items() if rate is not None}
        name = gpu or (None if known is None else known.gpu) or "h200"
        sheet = replace(GPUS[name], ranks_per_node=ranks_per_node, **given)
        hardware = Hardware(sheet, Efficiency() if known is None else known.efficiency(sheet))
        away = _offload(offload or ())
        settings = {
            "precision": {"params": precision, "optimizer": "compact" if compact else "full"},
            "compile": {"activation_budget": activation_budget},
            "offload": away,
            "loss": loss,
            "gradient_accumulation_steps": gas,
            "gradient_clipping": 1.0 if clip else None,
            "sharding": {"states": states},
        }
        every = (3,) if "params" in away else (1, 2, 3)
        stages = every if stage == "all" else (int(stage),)
        with working() as tell:
            tell(f"reading {model}")
            source = source_of(model, micro_batch, seq)
            plans = make(source, stages, worlds, settings, hardware, tell, group_size or (None,))
    except (ConfigError, EngineError) as error:
        print(f"zeroweave: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    for line in lines(plans):
        print(line)
    for row in (advice.take for advice in plans.advice if advice.take is not None):
        print(f"config of {row.name} on {row.world} ranks: {dumps(config_of(row, settings, plans.room))}")
    if json is not None:
        asked = {"micro_batch": micro_batch, "seq": seq, "config": settings, "hardware": asdict(hardware)}
        json.write_text(dumps(asdict(plans) | asked, indent=1))


def _calibration(anew: Path | None, known: Path | None) -> Calibration | None:
    """What is measured now and written to `anew`, or was before. EngineError where that fails."""
    from zeroweave.errors import EngineError
    from zeroweave.plan.hardware import Calibration

    if anew is None:
        return None if known is None else Calibration.load(known)
    import torch

    from zeroweave.notices import working
    from zeroweave.plan.calibrate import measured

    ranks = torch.cuda.device_count() or 2  # without GPUs, on the CPU
    try:
        with working() as tell:
            tell(f"measuring this machine with {ranks} {'rank' if ranks == 1 else 'ranks'}")
            found = measured(ranks)
        found.save(anew)
    except (RuntimeError, OSError) as error:
        raise EngineError(f"[ZW903] --calibrate: {error}") from None
    print(*found.lines(), f"wrote {anew}", sep="\n", flush=True)
    return found


def _offload(words: Iterable[str]) -> dict[str, Any]:
    """The section `offload` of the config. EngineError for words that are not in it, or that no plan is made of."""
    from zeroweave.errors import EngineError

    known: dict[str, dict[str, Any]] = {
        "optimizer": {"optimizer": "all"},
        "params": {"params": True},
        "activations": {"activations": True},
        "adaptive": {"optimizer": "adaptive", "memory_budget": 0},  # the rank says why there is no plan of it
    }
    found: dict[str, Any] = {}
    for word in (each.strip() for words_at_once in words for each in words_at_once.split(",")):
        if word not in known:
            raise EngineError(
                f"[ZW903] --offload {word!r}: write optimizer, params, activations, or several with commas"
            )
        found |= known[word]
    return found
