"""The command line: `zeroweave demo`, `run`, `schedule`, `report`, `plan`, `doctor`, `explain` and `ckpt`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from zeroweave.plan.command import plan

if TYPE_CHECKING:
    from zeroweave.report.course import Courses

app = typer.Typer(
    name="zeroweave",
    help="Train any PyTorch model with ZeRO-1, 2 or 3: compute compiled, communication scheduled.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes leave little room in a line, and keep the line breaks of docstrings
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        import zeroweave

        print(f"zeroweave {zeroweave.__version__} (torch {version('torch')})")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """What holds for all commands."""


PASS_THROUGH = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@app.command(short_help="Compare the stages with DDP, and train a small language model.")
def demo(
    stage: Annotated[int, typer.Option(metavar="N", min=1, max=3, help="ZeRO stage")] = 3,
    ranks: Annotated[
        int, typer.Option(metavar="N", min=1, help="processes; must divide the batch of 16 sequences")
    ] = 2,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="optimizer steps")] = 200,
    lower: Annotated[
        Literal["inductor", "aot_eager"], typer.Option(help="how compiled regions are lowered")
    ] = "inductor",
    eager: Annotated[bool, typer.Option("--eager", help="compile nothing: every module runs through hooks")] = False,
) -> None:
    """Compare the ZeRO stages with DDP, train a small language model on Python's help(), and show its schedule.

    Exits with 1 if a check fails. The last line of standard output is one JSON object with the figures.
    """
    from json import dumps

    from zeroweave.report.launch import launch

    if 16 % ranks:
        raise typer.BadParameter(f"{ranks} does not divide the batch of 16 sequences", param_hint="--ranks")
    settings = {"stage": stage, "steps": steps, "lower": lower, "eager": eager}
    print(f"starting {ranks} {'rank' if ranks == 1 else 'ranks'}", flush=True)
    raise typer.Exit(launch(["--nproc-per-node", str(ranks), "-m", "zeroweave.demo.run", dumps(settings)]))


@app.command(context_settings=PASS_THROUGH, short_help="Start a script on several ranks.")
def run(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT", help="and its arguments; before it, options of torchrun's", show_default=False
        ),
    ],
) -> None:
    """Start SCRIPT on several ranks, as torchrun does, with all of torchrun's options.

    For example: zeroweave run --nproc-per-node 2 examples/train.py (--nproc and -n are short for it)

    It differs from torchrun where that goes wrong: restarts with gloo work, one machine uses a free port, and
    process groups are ended when the script is over, so that its own exit code is what counts.
    """
    from zeroweave.report.launch import launch

    raise typer.Exit(launch(arguments))


SCRIPT: dict[str, Any] = {"ignore_unknown_options": True}
Source = Annotated[
    Path, typer.Argument(metavar="SCRIPT", exists=True, help="or a saved schedule, *.json, or a folder of a run's")
]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="of the script", show_default=False)]
Rank = Annotated[int, typer.Option(metavar="N", min=0, help="whose measured step")]
Ranks = Annotated[int, typer.Option(metavar="N", min=1, help="processes that run the script")]
Steps = Annotated[int, typer.Option(metavar="N", min=2, help="optimizer steps after which the script is ended")]


def _courses(source: Path, arguments: list[str] | None, rank: int, ranks: int, steps: int) -> Courses:
    """What is known of a saved schedule, or of a script that is run for it; ends the command where nothing is.

    A folder stands for what this rank has written there.
    """
    import os
    from tempfile import TemporaryDirectory

    from zeroweave.engine.samples import FOLDER, STEPS
    from zeroweave.errors import ScheduleError
    from zeroweave.report.course import Courses
    from zeroweave.report.launch import launch

    is_log = source.suffix == ".jsonl"
    folder = source.parent if is_log else source
    asked = f"a run writes rank{rank}.json with {FOLDER}={folder} in its environment"
    if is_log:
        raise typer.BadParameter(f"{source} is a log, which has no schedule: {asked}")
    if source.is_dir():
        source = folder / f"rank{rank}.json"
        if not source.is_file():
            raise typer.BadParameter(f"{folder} has no {source.name}: {asked}")
    saved = source.suffix == ".json"
    if saved and arguments:
        raise typer.BadParameter(f"a saved schedule takes no arguments: {' '.join(arguments)}")
    if not saved and rank >= ranks:
        raise typer.BadParameter(f"there is no rank {rank} among {ranks} ranks", param_hint="--rank")
    try:
        if saved:
            return Courses.load(source)
        with TemporaryDirectory() as written:
            os.environ[FOLDER], os.environ[STEPS] = written, str(steps)
            if code := launch(["--nproc-per-node", str(ranks), str(source), *(arguments or ())]):
                raise typer.Exit(code)
            return Courses.load(Path(written, f"rank{rank}.json").resolve(strict=True))
    except ScheduleError as error:
        raise typer.BadParameter(str(error)) from None
    except FileNotFoundError:
        print(
            f"zeroweave: {source} took no whole step that followed a schedule; that takes two optimizer steps",
            file=sys.stderr,
        )
        raise typer.Exit(1) from None


@app.command(context_settings=SCRIPT)
def schedule(
    source: Source,
    arguments: Arguments = None,
    rank: Rank = 0,
    ranks: Ranks = 2,
    steps: Steps = 10,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="also write a trace for Perfetto or chrome://tracing")
    ] = None,
) -> None:
    """Print a schedule with the times of its instructions.

    Of a file that was saved (*.json): what is predicted, as far as anything was measured. Of a training script: it
    runs, its engine is timed, and what was measured stands beside what is predicted. The options above are this
    command's wherever they stand; what follows `--` is the script's in any case.
    """
    import json

    from zeroweave.report.course import trace as traced
    from zeroweave.report.sections import schedule_lines

    shown = _courses(source, arguments, rank, ranks, steps)
    for line in schedule_lines(shown):
        print(line)
    if trace is not None:
        if not shown.courses:
            raise typer.BadParameter(f"{source} has no times to trace", param_hint="--trace")
        trace.write_text(json.dumps(traced(shown.schedule, shown.courses)))
        print(f"wrote {trace}")


@app.command(context_settings=SCRIPT, short_help="Write one page of HTML about a run.")
def report(
    source: Source,
    arguments: Arguments = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="the page")] = Path(
        "report.html"
    ),
    rank: Rank = 0,
    ranks: Ranks = 2,
    steps: Steps = 10,
) -> None:
    """Write one page of HTML about a run: its schedule as lanes over time, and all that is known around it.

    SCRIPT and the options are those of `zeroweave schedule`. The page needs no network.
    """
    from datetime import UTC, datetime

    from zeroweave.report.page import page

    if not output.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.parent}", param_hint="--output")
    shown = _courses(source, arguments, rank, ranks, steps)
    written = page(shown, source.name, datetime.now(UTC))
    output.write_text(written, encoding="utf-8")
    print(f"wrote {output}, {len(written.encode()):,} bytes")


app.command(short_help="Say what training a model takes in memory and time.")(plan)


@app.command(short_help="Check what this machine can do.")
def doctor() -> None:
    """Check what this machine can do, and name the command or the setting that mends what is wrong.

    Versions, settings, devices, links between ranks, and whether Inductor compiles here. Exits with 1 if
    training cannot work.
    """
    from zeroweave.report.doctor import checks

    states = set()
    for check in checks():
        states.add(check.state)
        print(*check.lines(), sep="\n", flush=True)
    if "failed" in states:
        print("zeroweave cannot train here")
        raise typer.Exit(1)
    limits = ["within limits"] * ("limited" in states) + ["slower than it could"] * ("slow" in states)
    print(", ".join(["zeroweave works here", *limits]))


@app.command(short_help="Explain the code of an error.")
def explain(code: Annotated[str, typer.Argument(metavar="CODE", help="such as ZW101")]) -> None:
    """Explain the code that an error's message begins with: the cause, an example, and what to do."""
    from importlib.resources import files

    table = (files("zeroweave") / "error_codes.md").read_text(encoding="utf-8")
    head, _, *rows = ([cell.strip(" *") for cell in line.strip("|\n").split(" | ")] for line in table.splitlines())
    known = {row[0]: row for row in rows}
    if (row := known.get(code.strip("[]").upper())) is None:
        raise typer.BadParameter(f"there is no {code!r}; the codes are {', '.join(known)}", param_hint="CODE")
    print(*(f"{name}: {cell.replace('**', '')}" for name, cell in zip(head, row, strict=True)), sep="\n")


ckpt = typer.Typer(
    name="ckpt",
    no_args_is_help=True,
    help="Look at checkpoints, verify, compare, export, import and remove them.",
    short_help="Look at checkpoints, verify and export them.",
    rich_markup_mode=None,
)
app.add_typer(ckpt)

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", exists=True, help="DIR/TAG, or DIR for its latest", show_default=False)
]


@contextmanager
def _told() -> Iterator[None]:
    """What cannot be read or written is said in one line, and ends the command with 2."""
    from zeroweave.checkpoint.writer import words
    from zeroweave.errors import EngineError

    try:
        yield
    except BrokenPipeError:  # who reads has seen enough
        raise
    except (EngineError, OSError) as error:
        print(f"zeroweave: {words(error)}", file=sys.stderr)
        raise typer.Exit(2) from None


@ckpt.command(short_help="Print what a checkpoint holds.")
def inspect(checkpoint: Checkpoint) -> None:
    """Print what a checkpoint holds: its step, ranks, stage and sizes, and every tensor. Reads its manifest only."""
    with _told():
        from zeroweave.report.checkpoints import inspect

        inspect(checkpoint)


@ckpt.command(short_help="Read every byte, and say what is whole.")
def verify(
    checkpoint: Annotated[
        Path,
        typer.Argument(metavar="CHECKPOINT", exists=True, help="DIR/TAG, or DIR for all of it", show_default=False),
    ],
) -> None:
    """Read every byte of a checkpoint, or of all in a folder, and say which are whole. Exits with 1 if one is not."""
    with _told():
        from zeroweave.checkpoint.offline import verify

        broken = False
        for tag, failure in verify(checkpoint):
            print(f"broken  {tag}: {failure}" if failure else f"whole   {tag}", flush=True)
            broken |= bool(failure)
    if broken:
        raise typer.Exit(1)


@ckpt.command(short_help="Say in what two checkpoints differ.")
def diff(first: Checkpoint, second: Checkpoint) -> None:
    """Say which tensors and values of two checkpoints differ, bit by bit, however many ranks wrote them.

    Exits with 1 if any do.
    """
    with _told():
        from zeroweave.checkpoint.offline import differences, verified

        different = False
        with verified(first) as a, verified(second) as b:
            for line in differences(a, b):
                print(line, flush=True)
                different = True
    if different:
        raise typer.Exit(1)
    print("equal")


@ckpt.command(short_help="Write the model as Hugging Face has it.")
def export(
    checkpoint: Checkpoint,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="a new one", show_default=False)],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="of floating tensors; the model's own if left out"),
    ] = None,
    shard_bytes: Annotated[int, typer.Option(metavar="N", min=1, help="bytes of a file at most")] = 5 << 30,
) -> None:
    """Write the model of a checkpoint as Hugging Face has it: safetensors files, an index, and the model's config."""
    with _told():
        import torch

        from zeroweave.checkpoint.export import export_checkpoint
        from zeroweave.checkpoint.offline import verified

        with verified(checkpoint) as reader:
            kind = None if dtype is None else getattr(torch, dtype)
            left_out = export_checkpoint(reader, folder, kind, shard_bytes)
    print(f"wrote {folder}")
    if left_out:
        print(f"zeroweave: the export leaves out extra state of modules: {left_out} entries", file=sys.stderr)


@ckpt.command(name="import", short_help="Take weights of torch.save, or a ZeRO checkpoint.")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", exists=True, help="a file of torch.save, or DeepSpeed's folder")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where to write", show_default=False)],
    trust_pickle: Annotated[bool, typer.Option("--trust-pickle", help="SOURCE may be read, which is a pickle")] = False,
    key: Annotated[
        str | None, typer.Option(metavar="NAME", help="the entry of a file that is the model's state dict")
    ] = None,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="the class of DeepSpeed's base optimizer")] = "AdamW",
    shard_bytes: Annotated[int, typer.Option(metavar="N", min=1, help="bytes of a file of weights at most")] = 5 << 30,
) -> None:
    """Write the weights of a file as safetensors, or a ZeRO checkpoint of DeepSpeed as one that engine.load takes.

    SOURCE is read without running the code that it names.
    """
    if not trust_pickle:
        raise typer.BadParameter(f"{source} is a pickle: say --trust-pickle if you know where it comes from")
    with _told():
        from zeroweave.checkpoint import deepspeed, torch_save

        if source.is_dir():
            print(deepspeed.convert(source, folder, optimizer))
        else:
            print(torch_save.convert(source, folder, key or "", shard_bytes))


@ckpt.command()
def prune(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="of checkpoints", show_default=False)
    ],
    keep_last: Annotated[
        int, typer.Option(metavar="N", min=1, help="how many of the last ones stay", show_default=False)
    ],
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="those of each so-many-th step stay, too")
    ] = None,
) -> None:
    """Remove checkpoints from a folder. The one that `latest` names stays, and so does what cannot be read."""
    with _told():
        from zeroweave.checkpoint.folder import Folder

        for tag in Folder(folder).prune(keep_last, keep_every):
            print(f"removed {tag}")


if __name__ == "__main__":
    app()
