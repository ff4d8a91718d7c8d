"""Times the training of one language model under several implementations, one after the other.

    python -m benchmarks.lm --model qwen3-8b --seq 4096 --micro-batch 1 \
        --impl zeroweave-z3,fsdp2-ce-z3,zeroweave-z2,fsdp2-ce-z2

Every implementation runs in fresh processes, one per GPU (or `--gpus N` processes on the CPU where there is
none), on the same model code, initial weights and data. Prints a table and, with `--out`, writes lm.json,
lm.md, lm.log and the traces there. Exit code 1 when an implementation fails or, with `--check`, when what
must hold does not.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks import launch, peers, report
from benchmarks.cases import CASES, Case
from benchmarks.models import SHAPES
from benchmarks.worker import Spec

DEFAULT = "zeroweave-z3,fsdp2-ce-graphs-z3,fsdp2-ce-z3,zeroweave-z2,fsdp2-ce-graphs-z2,fsdp2-ce-z2"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.lm", description=(__doc__ or "").split("\n", 1)[0])
    p.add_argument("--case", choices=sorted(CASES), help="a named comparison; other options change it")
    p.add_argument("--model", choices=sorted(SHAPES), default="qwen3-8b")
    p.add_argument("--seq", type=int, default=4096, help="tokens of a sequence")
    p.add_argument("--micro-batch", type=int, default=1, help="sequences per GPU and step")
    of = "; ".join(peers.NAMES)
    p.add_argument("--impl", default=DEFAULT, help=f"comma-separated, of: {of}; A|B: B where A fails")
    p.add_argument("--ce-rs", action="store_true", help="beside each fsdp2-ce-zN also fsdp2-ce-rs-zN")
    hf: dict[str, Any] = {"nargs": "?", "const": "causal", "default": "", "choices": ["causal", "masked"]}
    p.add_argument("--hf", help="train transformers' own model of this shape; masked: with the mask it makes", **hf)
    p.add_argument("--gas", type=int, default=1, help="micro-steps of an optimizer step")
    p.add_argument("--loop", choices=["train_step", "plain"], default="train_step", help="how zeroweave is called")
    p.add_argument("--lora", type=int, default=0, metavar="RANK", help="train low-rank layers of a frozen model")
    p.add_argument("--group-size", type=int, default=0, help="ranks of a sharding group (FSDP2: HSDP); default: all")
    p.add_argument("--gpus", type=int, default=None, help="processes; default: all GPUs, or 2 on the CPU")
    p.add_argument("--steps", type=int, default=25)
    p.add_argument("--warm", type=int, default=10, help="first steps that are not counted")
    p.add_argument("--in-a-row", type=int, default=1, help="steps between two waits for the device, once it is warm")
    p.add_argument("--lower", choices=["inductor", "aot_eager", "none"], default="inductor")
    p.add_argument("--compile-embedding", action="store_true", help="FSDP2 and compute: compile the embedding too")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="zeroweave's config, dotted key")
    variant: dict[str, Any] = {"action": "append", "nargs": "+", "default": [], "metavar": ("NAME", "KEY=VALUE")}
    p.add_argument("--variant", help="a setting of zeroweave to compare, run as zeroweave-NAME-zN", **variant)
    p.add_argument("--out", type=Path, default=None, help="folder for lm.json, lm.md, lm.log and traces")
    p.add_argument(
        "--cache", type=Path, default=None, help="folder of compiler caches to keep and share; default: empty ones"
    )
    names: dict[str, Any] = {"nargs": "?", "const": "all", "default": "", "metavar": "NAMES"}
    p.add_argument("--trace", help="write a Chrome trace of one step of rank 0 (needs --out); default: of all", **names)
    p.add_argument("--profile", help="print what that step's trace says; default: for all", **names)
    p.add_argument("--host-profile", help="write where the host's time of a step goes (needs --out)", **names)
    p.add_argument("--timeout", type=float, default=300.0, help="seconds for each implementation")
    p.add_argument("--check", action="store_true", help="exit with 1 when something that must hold does not")
    return p


def chosen(names: str, name: str) -> bool:
    """Is `name` among the comma-separated `names`, which may be "all"?"""
    return names == "all" or name in names.split(",")


def overrides(settings: Sequence[str]) -> dict[str, Any]:
    """`["compile.prefetch=2"]` as the nested config it means; values are JSON, Python literals, or else strings."""
    config: dict[str, Any] = {}
    for setting in settings:
        dotted, found, text = setting.partition("=")
        if not found:
            raise SystemExit(f"--set {setting}: expected KEY=VALUE")
        *path, last = dotted.split(".")
        table = config
        for key in path:
            table = table.setdefault(key, {})
        table[last] = _value(text)
    return config


def _value(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return read(text)
    return text


def implementations(text: str, ce_rs: bool, variants: Mapping[str, Any]) -> list[list[str]]:
    """The names in `text`, each with those to run where it fails.

    With `ce_rs` each copy-engine FSDP2 is followed by the one with symmetric reductions.
    """
    found: list[list[str]] = []
    for word in filter(None, map(str.strip, text.split(","))):
        found.append(word.split("|"))
        if ce_rs and word.startswith("fsdp2-ce-z"):
            found.append([word.replace("-ce-", "-ce-rs-")])
    try:
        for name in chain.from_iterable(found):
            peers.parse(name, variants)
    except ValueError as error:
        raise SystemExit(f"--impl: {error}") from None
    if not found:
        raise SystemExit("--impl names nothing")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    case = CASES.get(parser().parse_args(given).case, report.ANY)
    a = parser().parse_args([*case.arguments.split(), *given])
    case = replace(case, cached=a.cache is not None)
    variants = {name: overrides(settings) for name, *settings in a.variant}
    names = implementations(a.impl, a.ce_rs, variants)
    if not 0 <= a.warm < a.steps:
        raise SystemExit("--warm must be less than --steps")
    if a.in_a_row < 1 or (a.steps - a.warm) % a.in_a_row or (a.in_a_row > 1 and not a.warm):
        raise SystemExit("--in-a-row must divide the steps behind the warm-up, of which the first step is part")
    if (a.trace or a.host_profile) and a.out is None:
        raise SystemExit("--trace and --host-profile need --out")
    world = a.gpus or torch.cuda.device_count() or 2
    if a.group_size and world % a.group_size:
        raise SystemExit(f"--group-size {a.group_size} does not divide {world} ranks")
    out: Path | None = a.out
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    settings = (a.lower, a.compile_embedding, overrides(a.set), variants, a.loop, a.hf, a.gas, a.in_a_row)
    base = Spec("", a.model, a.seq, a.micro_batch, a.steps, a.warm, *settings, lora=a.lora, group_size=a.group_size)

    rows: list[report.Row] = []
    failures: list[str] = []
    with ExitStack() as stack:
        scratch = stack.enter_context(launch.temporary_folder())
        log = stack.enter_context(((out or scratch) / "lm.log").open("w"))
        remaining = deque(names)
        while remaining:
            name, *others = remaining.popleft()
            spec = replace(base, impl=name)
            traced, profiled = chosen(a.trace, name), chosen(a.profile, name)
            if traced or profiled:
                folder = out if traced and out is not None else scratch
                spec = replace(spec, trace=str((folder / f"trace-{name}.json.gz").resolve()))
            if out is not None and chosen(a.host_profile, name):
                spec = replace(spec, host_profile=str((out / f"host-{name}.txt").resolve()))
            began = time.monotonic()
            family = peers.parse(name, variants).family
            cache = a.cache / family if a.cache is not None else None
            try:
                rows.append(report.row(spec, launch.run(spec, world, a.timeout, log, cache)))
                print(report.line(rows[-1]), flush=True)
            except launch.LaunchError as error:
                failures.append(name)
                print(error, flush=True)
                if others:
                    print(f"{name} failed; {others[0]} instead", flush=True)
                    remaining.appendleft(others)
            print(f"{name}: {time.monotonic() - began:.0f} s in all", flush=True)
            if rows and profiled and rows[-1].impl == name:
                print(rows[-1].profile, flush=True)
            if rows and out is not None:  # after each one, so that a later failure costs nothing
                write(out, base, rows, case)
    if not rows:
        return 1
    print(f"\n{report.title(base, rows)}\n{report.plain(rows)}")
    for note in report.notes(rows):
        print(note)
    for text in report.summary(base, rows):
        print(text)
    verdicts = report.verdicts(base, rows, case)
    for holds, text in verdicts:
        print(f"{'holds' if holds else 'FAILS'}: {text}")
    if failures:
        print(f"failed: {', '.join(failures)}")
    return 1 if failures or (a.check and not all(holds for holds, _ in verdicts)) else 0


def write(out: Path, spec: Spec, rows: Sequence[report.Row], case: Case) -> None:
    result = {
        "title": report.title(spec, rows),
        "rows": [r.as_dict() for r in rows],
        "verdicts": [{"holds": holds, "text": text} for holds, text in report.verdicts(spec, rows, case)],
    }
    (out / "lm.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "lm.md").write_text(report.markdown(spec, rows, case))


if __name__ == "__main__":
    sys.exit(main())
