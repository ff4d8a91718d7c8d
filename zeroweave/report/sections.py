"""The tables of reports: of a schedule, of its courses, and of what an engine told about its run; the first as text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from zeroweave.comm.ledger import Traffic
from zeroweave.compile.progress import pattern
from zeroweave.config import Config
from zeroweave.engine.samples import About
from zeroweave.engine.stats import Stats
from zeroweave.report.course import Course, Courses, farthest
from zeroweave.report.tables import size, table, tables
from zeroweave.schedule import Reduce, Schedule, Settle, Unshard, Wait
from zeroweave.schedule.cost import Lane

PHASES: Final = {
    "dynamo": "capturing graphs and their guards",
    "aot": "tracing forward and backward",
    "partition": "splitting graphs into forward and backward",
    "wait": "waiting for another rank that compiled the same",
    "lower": "turning graphs into code",
    "schedule": "making schedules",
}
MEMORY: Final = {
    "shards": "shards, in the dtype of the computation",
    "masters": "float32 masters",
    "optimizer": "optimizer state",
    "gradients": "reduced gradients, at most",
    "local_sums": "sums of gradients that were not reduced yet, at most",
    "flats_peak": "gathered parameters, at most",
    "gradient_flats_peak": "gradients of reductions in flight, at most",
    "symmetric": "registered buffers",
    "graphs": "what CUDA graphs hold for their replays",
    "host_shards": "of the shards, in host memory",
    "host_masters": "of the masters, in host memory",
    "host_optimizer": "of the optimizer state, in host memory",
    "allocated": "everything on the device, at most so far",
    "reserved": "what PyTorch has reserved for that, at most so far",
    "foreseen": "everything that a step of the present schedule is expected to need at most",
    "budget": "of that, what flats, gradients in flight and activations may fill",
}
_MOST_EXPOSED: Final = 12


@dataclass(frozen=True)
class Table:
    """Rows under a head. The first column is text, and so are those whose numbers are in `text`."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: frozenset[int] = frozenset()


def ms(seconds: float | None) -> str:
    """Milliseconds; "" for None."""
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


def instructions(shown: Courses, courses: tuple[Course, ...]) -> Table:
    """Every instruction: its number, its text, and for each course its start, its times and the memory after it."""
    head, rows = ["", "instruction"], []
    for course in courses:
        head += [f"{course.name}: start", "takes", "exposed", "memory"]
    for index, instruction in enumerate(shown.schedule.instructions):
        row = [str(index), shown.schedule.describe(instruction)]
        for course in courses:
            row += map(ms, (course.starts[index], course.takes.get(index), course.waits.get(index)))
            row.append(size(course.memory[index]) if course.memory else "")
        rows.append(tuple(row))
    caption = "Every instruction: times in ms, and the memory behind it"
    return Table(caption, tuple(head), tuple(rows), frozenset({1}))


def schedule_lines(shown: Courses) -> Iterator[str]:
    """A schedule with the times of its instructions, in milliseconds: what `zeroweave schedule` prints."""
    schedule, courses = shown.schedule, shown.courses
    yield f"{len(schedule.instructions)} instructions, {len(schedule.collectives())} collectives"
    shown_all, width = instructions(shown, courses), len(str(len(schedule.instructions)))
    kept = [i for i, name in enumerate(shown_all.head) if name != "memory" or any(row[i] for row in shown_all.rows)]
    rows = [[f"{row[0]:>{width}}  {row[1]}", *(row[i] for i in kept[2:])] for row in shown_all.rows]
    yield from tables([shown_all.head[i] for i in kept[1:]], rows)
    yield ""
    if not courses:
        yield "no times: nothing was measured when this schedule was made"
        return
    yield from table(("", *(course.name for course in courses)), list(_totals(shown)))
    yield "times in ms; takes: of the collective for Unshard and Reduce, of computation for the others"
    if courses[0].memory:
        yield "memory: flats, gradients in flight and activations, at most up to the next instruction"
    if len(courses) > 1 and (difference := farthest(*courses[:2])) is not None:
        index, more = difference
        which = "more" if more >= 0 else "less"
        yield f"memory differs most at {index}: {size(abs(more))} {which} {courses[0].name} than {courses[1].name}"
    if len(courses) > 1 and not shown.agreed:
        yield "predicted from the measured steps themselves: the schedule was made before anything was measured"
    if shown.seconds:
        yield "making templates and the schedule took: " + ", ".join(f"{k} {v:.3f} s" for k, v in shown.seconds.items())


def _totals(shown: Courses) -> Iterator[tuple[str, ...]]:
    yield "step", *(ms(course.seconds) for course in shown.courses)
    yield "exposed communication", *(ms(course.exposed) for course in shown.courses)
    yield "critical path", *("" if course.name == "measured" else ms(shown.longest) for course in shown.courses)
    peaks = [size(course.peak) if course.memory else "not known" for course in shown.courses]
    yield "peak of flats, gradients in flight, activations", *peaks


def exposed(shown: Courses) -> tuple[Table, str]:
    """Where the computation waits longest, and a sentence about the rest."""
    schedule, first = shown.schedule, shown.courses[0]
    issued, after = schedule.producers, {each.index: f" behind {each.after}" for each in shown.operations}

    def cause(index: int) -> str:
        """What it waits for there."""
        if (at := issued.get(index)) is None:
            return "a copy of activations"
        collective = schedule.instructions[at]
        assert isinstance(collective, Unshard | Reduce)
        return size(schedule.facts.sizes[collective.bucket]) + after.get(at, "")

    found = sorted(
        {index for course in shown.courses for index in course.waits},
        key=lambda index: (-max(course.waits.get(index, 0.0) for course in shown.courses), index),
    )
    rows = [
        (
            f"{index} {schedule.describe(schedule.instructions[index])}",
            *(ms(course.waits.get(index, 0.0)) for course in shown.courses),
            cause(index),
        )
        for index in found[:_MOST_EXPOSED]
    ]
    head = ("instruction", *(f"{course.name}, ms" for course in shown.courses), "for")
    rest, left = found[_MOST_EXPOSED:], sum(first.waits.get(index, 0.0) for index in found[_MOST_EXPOSED:])
    more = f"{len(rest)} more instructions wait, {ms(left)} ms together ({first.name})." if rest else ""
    return Table("Where the computation waits longest", head, tuple(rows), frozenset({len(head) - 1})), more


def collectives(shown: Courses) -> Table:
    """The collectives of a step, by kind, and how long the computation waits for them."""
    schedule, sizes = shown.schedule, shown.schedule.facts.sizes
    kinds: list[tuple[str, Lane, type]] = [("gathers", "all_gather", Wait), ("reductions", "reduce_scatter", Settle)]
    head, rows = ["", "calls", "bytes of flats"], []
    for course in shown.courses:
        head += [f"{course.name}: takes, ms", "exposed, ms"]
    for name, kind, waiter in kinds:
        buckets = [bucket for each, bucket in schedule.collectives() if each == kind]
        row = [name, str(len(buckets)), size(sum(sizes[bucket] for bucket in buckets))]
        for course in shown.courses:
            waits = (s for index, s in course.waits.items() if isinstance(schedule.instructions[index], waiter))
            row += [ms(course.busy(kind)), ms(sum(waits))]
        rows.append(tuple(row))
    return Table("Gathers and reductions in one step of the schedule", tuple(head), tuple(rows))


def traffic(stats: Stats) -> Table:
    """The collectives that the engine has counted."""
    start = "since the start"
    head = ("", "calls: last step", start, "flats: last step", start, "sent: last step", start)
    pairs = [(kind, stats.last_step.get(kind, Traffic()), total) for kind, total in stats.total.items()]
    rows = tuple(
        (kind, str(a.calls), str(b.calls), *map(size, (a.payload, b.payload, a.wire, b.wire))) for kind, a, b in pairs
    )
    return Table("What this rank has counted", head, rows)


def buckets(schedule: Schedule, about: About | None) -> list[dict[str, Any]]:
    """The buckets, in their order, as the template has them. What only the engine knows is missing without `about`.

    share: of the bytes of the largest bucket. members: names and shapes of its parameters.
    """
    calls = Counter(schedule.collectives())
    layouts = {} if about is None else {layout.id: layout for layout in about.buckets}
    largest = max(schedule.facts.sizes.values(), default=0) or 1
    found = []
    for facts in schedule.facts.buckets:
        traits = ["trained" if facts.trainable else "frozen"]
        if facts.id in schedule.stays:
            traits.append("stays gathered")
        elif facts.id in schedule.facts.kept_by_stage:
            traits.append("stays gathered until the optimizer step")
        if facts.id in schedule.registered_buffers:
            way = "by copy engine, " if schedule.by_copy_engine("all_gather", facts.id) else ""
            traits.append(f"gathered {way}in registered buffer {schedule.registered_buffers[facts.id]}")
        issued = calls["all_gather", facts.id], calls["reduce_scatter", facts.id]
        bucket: dict[str, Any] = {
            "name": facts.name,
            "size": size(facts.nbytes),
            "share": facts.nbytes / largest,
            "kind": ", ".join(traits),
            "collectives": f"{issued[0]} + {issued[1]}",
        }
        if (layout := layouts.get(facts.id)) is not None:
            ranks = "1 rank" if layout.world == 1 else f"{layout.world} ranks"
            bucket["dtype"] = layout.dtype
            bucket["sharing"] = ranks if layout.groups == 1 else f"{layout.groups} groups of {ranks}"
            bucket["members"] = [(s.name, " × ".join(map(str, s.shape)) or "one value") for s in layout.slots]
        found.append(bucket)
    return found


def compiled(stats: Stats) -> Table:
    """The counts of compilation."""
    rows = (
        ("regions of the model", str(stats.regions)),
        ("graphs captured by Dynamo", str(stats.graphs)),
        ("templates", str(stats.templates)),
        ("of them found in Inductor's cache", str(stats.found_templates)),
        ("calls that ran compiled", str(stats.compiled_calls)),
        ("calls that ran eagerly", str(stats.eager_calls)),
        ("launched as CUDA graphs", str(stats.graphed_calls)),
    )
    return Table("What was compiled", ("", ""), rows)


def remarks(about: About) -> Iterator[tuple[str, str]]:
    """What runs eagerly, without a graph or off the schedule, and why or what to do."""
    stats, compile_ = about.stats, about.config["compile"]
    if not compile_["enabled"]:
        yield f"All {stats.regions} regions run eagerly", "compile.enabled is false."
    reasons: dict[str, list[str]] = {}
    for region, reason in stats.eager_regions.items():
        reasons.setdefault(reason, []).append(region)
    for reason, names in reasons.items():
        run = "1 region runs" if len(names) == 1 else f"{len(names)} regions run"
        yield f"{run} eagerly: {pattern(names)}", reason
    if stats.eager_modules:
        outside = ", ".join(repr(name) if name else "the model itself" for name in stats.eager_modules)
        why = "They have parameters of their own and belong to no compiled region; compile.regions can name them."
        yield f"Modules outside of all regions run eagerly: {outside}", why
    if not compile_["cuda_graphs"]:
        yield "No call is launched as a CUDA graph", "compile.cuda_graphs is false."
    for reason, count in stats.ungraphed_calls.items():
        yield f"Not launched as a graph: {count} calls", reason
    if stats.departures:
        why = "A step that computes something else than the schedule says goes on on demand, and is recorded anew."
        yield f"Steps that departed from their schedule: {stats.departures}", why
    if stats.on_demand_unshards:
        why = "The schedule should have ordered them; values that are read between calls are gathered so."
        yield f"Gathers on demand: {stats.on_demand_unshards}", why
    if stats.on_demand_reloads:
        why = "A backward asked for activations before its schedule had brought them back."
        yield f"Activations brought back on demand: {stats.on_demand_reloads}", why


def memory(stats: Stats) -> Table:
    """Bytes of this rank's model state and of everything on its device, without the rows that are 0."""
    found = (*asdict(stats.memory).items(), *asdict(stats.device).items())
    rows = tuple((MEMORY[name], size(count)) for name, count in found if count)
    return Table("Model state of this rank, and everything on its device", ("", "bytes"), rows)


def settings(config: Mapping[str, Any]) -> Table:
    """Each key of the config. Those with another value than the default come first."""
    defaults = dict(_flat(Config().model_dump(mode="json")))
    rows = [(key, _value(value), _value(defaults.get(key))) for key, value in _flat(config)]
    changed = [(*row[:2], f"default: {row[2]}") for row in rows if row[1] != row[2]]
    same = [(*row[:2], "") for row in rows if row[1] == row[2]]
    return Table("Config", ("key", "value", ""), (*changed, *same), frozenset({1, 2}))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
