"""What a report says in tables: of a schedule, of its courses, and of what an engine told about its run."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from zeroweave.comm.ledger import Traffic
from zeroweave.compile.announce import pattern
from zeroweave.config import Config
from zeroweave.engine.samples import About
from zeroweave.engine.stats import Stats
from zeroweave.layout import BucketLayout
from zeroweave.report.course import Course, Courses
from zeroweave.report.tables import size
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
    "symmetric": "places in which copy engines gather",
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
    """Rows under a head; the first column is text, and so are those of `text`."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Bucket:
    """A bucket and who is in it; what only the engine knows is "" for a schedule alone.

    share: of the bytes of the largest one. members: names and shapes of its parameters.
    """

    name: str
    size: str
    share: float
    dtype: str
    kind: str
    sharing: str
    collectives: str
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Remark:
    """Something that did not go the ordinary way: what, and why, or what to do."""

    what: str
    why: str


def ms(seconds: float | None) -> str:
    """Milliseconds; "" for nothing."""
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


def instructions(shown: Courses, courses: tuple[Course, ...]) -> Table:
    """Every instruction with its times and the memory: a number, its words, and four columns for each course."""
    schedule = shown.schedule
    head = ["", "instruction"]
    for course in courses:
        head += [f"{course.name}: start", "takes", "exposed", "memory"]
    rows = []
    for index, instruction in enumerate(schedule.instructions):
        row = [str(index), schedule.describe(instruction)]
        for course in courses:
            row += map(ms, (course.starts[index], course.takes.get(index), course.waits.get(index)))
            row.append(size(course.memory[index]) if course.memory else "")
        rows.append(tuple(row))
    return Table("Every instruction: times in ms, and the memory behind it", tuple(head), tuple(rows), frozenset({1}))


def exposed(shown: Courses) -> tuple[Table, str]:
    """Where the computation waits longest, and what is left out, in words."""
    schedule, first = shown.schedule, shown.courses[0]
    issued, after = _issuers(schedule), {each.index: f" behind {each.after}" for each in shown.operations}

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


def _issuers(schedule: Schedule) -> dict[int, int]:
    """For each Wait and Settle, by index, that of the Unshard or Reduce that starts what it waits for."""
    gathers: dict[int, int] = {}
    reductions: dict[int, deque[int]] = {}
    found: dict[int, int] = {}
    for index, instruction in enumerate(schedule.instructions):
        match instruction:
            case Unshard(bucket) if index in schedule.gathers:
                gathers[bucket] = index
            case Wait(bucket) if bucket in gathers:
                found[index] = gathers[bucket]
            case Reduce(bucket):
                reductions.setdefault(bucket, deque()).append(index)
            case Settle(bucket):
                found[index] = reductions[bucket].popleft()
    return found


def collectives(shown: Courses) -> Table:
    """The collectives of a step, by kind, and how long the computation waits for them."""
    schedule, sizes = shown.schedule, shown.schedule.facts.sizes
    kinds = {"all_gather": ("gathers", Wait), "reduce_scatter": ("reductions", Settle)}
    head = ["", "calls", "launches", "bytes of flats"]
    for course in shown.courses:
        head += [f"{course.name}: takes, ms", "exposed, ms"]
    rows = []
    for kind, (name, waits) in kinds.items():
        buckets = [bucket for each, bucket in schedule.collectives() if each == kind]
        issuer = Unshard if kind == "all_gather" else Reduce
        launches = len(buckets) - sum(len(each) - 1 for each in schedule.launches if isinstance(each[0], issuer))
        row = [name, str(len(buckets)), str(launches), size(sum(sizes[bucket] for bucket in buckets))]
        for course in shown.courses:
            lane: Lane = "all_gather" if kind == "all_gather" else "reduce_scatter"
            stands = (s for index, s in course.waits.items() if isinstance(schedule.instructions[index], waits))
            row += [ms(course.busy(lane)), ms(sum(stands))]
        rows.append(tuple(row))
    return Table("Gathers and reductions in one step of the schedule", tuple(head), tuple(rows))


def traffic(stats: Stats) -> Table:
    """What the engine has counted."""
    rows = []
    for kind, total in stats.total.items():
        last = stats.last_step.get(kind, Traffic())
        moved = (last.payload, total.payload, last.wire, total.wire)
        rows.append((kind, str(last.calls), str(total.calls), *map(size, moved)))
    head = ("", "calls: last step", "since the start", "flats: last step", "since the start")
    return Table("What this rank has counted", (*head, "sent: last step", "since the start"), tuple(rows))


def buckets(schedule: Schedule, about: About | None) -> list[Bucket]:
    """The buckets, in their order."""
    calls = Counter(schedule.collectives())
    layouts = {} if about is None else {layout.id: layout for layout in about.buckets}
    largest = max(schedule.facts.sizes.values(), default=0) or 1
    found = []
    for facts in schedule.facts.buckets:
        layout = layouts.get(facts.id)
        traits = ["trained" if facts.trainable else "frozen"]
        if facts.id in schedule.stays:
            traits.append("stays gathered")
        elif facts.id in schedule.facts.kept_by_stage:
            traits.append("stays gathered until the optimizer step")
        if facts.id in schedule.places:
            place = schedule.places[facts.id]
            traits.append(f"gathered by copy engine, in {f'place {place}' if place >= 0 else 'a place of its own'}")
        issued = calls["all_gather", facts.id], calls["reduce_scatter", facts.id]
        found.append(
            Bucket(
                name=facts.name,
                size=size(facts.nbytes),
                share=facts.nbytes / largest,
                dtype="" if layout is None else layout.dtype,
                kind=", ".join(traits),
                sharing="" if layout is None else _sharing(layout),
                collectives=f"{issued[0]} + {issued[1]}",
                members=() if layout is None else tuple((slot.name, _shape(slot.shape)) for slot in layout.slots),
            )
        )
    return found


def _sharing(layout: BucketLayout) -> str:
    ranks = "1 rank" if layout.world == 1 else f"{layout.world} ranks"
    return ranks if layout.groups == 1 else f"{layout.groups} groups of {ranks}"


def _shape(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "one value"


def compilation(seconds: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """Phases with what they are, and their seconds."""
    return [(name, PHASES.get(name, ""), took) for name, took in seconds.items()]


def compiled(stats: Stats) -> Table:
    """What compilation has come to."""
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


def remarks(about: About) -> Iterator[Remark]:
    """What runs eagerly, uncaptured or besides the schedule, and why."""
    stats, compile_ = about.stats, about.config["compile"]
    if not compile_["enabled"]:
        yield Remark(f"All {stats.regions} regions run eagerly", "compile.enabled is false.")
    reasons: dict[str, list[str]] = {}
    for region, reason in stats.eager_regions.items():
        reasons.setdefault(reason, []).append(region)
    for reason, names in reasons.items():
        yield Remark(f"{_regions(len(names))} eagerly: {pattern(names)}", reason)
    if stats.eager_modules:
        outside = ", ".join(repr(name) if name else "the model itself" for name in stats.eager_modules)
        yield Remark(
            f"Modules outside of all regions run eagerly: {outside}",
            "They have parameters of their own and belong to no region that is compiled as one; compile.regions can "
            "name them.",
        )
    if not compile_["cuda_graphs"]:
        yield Remark("No call is launched as a CUDA graph", "compile.cuda_graphs is false.")
    for reason, count in stats.ungraphed_calls.items():
        yield Remark(f"Not launched as a graph: {count} calls", reason)
    if stats.departures:
        why = "A step that computes something else than the schedule says goes on on demand, and is recorded anew."
        yield Remark(f"Steps that departed from their schedule: {stats.departures}", why)
    if stats.on_demand_unshards:
        why = "The schedule should have ordered them; values that are read between calls are gathered so."
        yield Remark(f"Gathers on demand: {stats.on_demand_unshards}", why)
    if stats.on_demand_reloads:
        why = "A backward asked for activations before its schedule had brought them back."
        yield Remark(f"Activations brought back on demand: {stats.on_demand_reloads}", why)


def _regions(count: int) -> str:
    return "1 region runs" if count == 1 else f"{count} regions run"


def memory(stats: Stats) -> Table:
    """Bytes of this rank's model state, and of everything; what is not there is left out."""
    found = (*asdict(stats.memory).items(), *asdict(stats.device).items())
    rows = tuple((MEMORY[name], size(count)) for name, count in found if count)
    return Table("Model state of this rank, and everything on its device", ("", "bytes"), rows)


def settings(config: Mapping[str, Any]) -> Table:
    """Each key of the config; those that are not as by default come first."""
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
