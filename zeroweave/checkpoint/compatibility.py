"""Compares a checkpoint with an engine: its model, its optimizer and its scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, Final
from urllib.parse import unquote

import torch
from pydantic import Field, ValidationError

from zeroweave.checkpoint import plain
from zeroweave.checkpoint.manifest import DTYPES, NAME, Count, Manifest, Strict
from zeroweave.checkpoint.reader import Reader, told_by
from zeroweave.errors import CheckpointError, first_problem
from zeroweave.ranks.control import Control

_OWN_BUFFER: Final = re.compile(r"rank/\d+/buffer/(.*)")
_CLIENT: Final = "client"
_OWN_DATA: Final = re.compile(r"rank/\d+/data")
_SHOWN: Final = 20
"""Names that an error tells of each kind."""


class Run(Strict):
    micro_steps: Count
    skipped_steps: Count


class LossScale(Strict):
    value: Annotated[float, Field(gt=0)]
    good_steps: Count
    patience: Count


class Group(Strict):
    """Of an optimizer: its parameters, by name, and its options."""

    params: list[str]
    options: dict[str, Any]


class Optimizer(Strict):
    kind: str
    """its class"""
    groups: list[Group]


class Scheduler(Strict):
    """Of learning rates."""

    kind: str
    state: dict[Any, Any]


class Facts(Strict):
    """What all ranks share besides tensors. A manifest has it under the same names."""

    run: Run
    loss_scale: LossScale
    client: dict[Any, Any]
    optimizer: Optimizer | None = None
    lr_scheduler: Scheduler | None = None


@dataclass(frozen=True)
class Wanted:
    """What an engine has: the shapes of its parameters and of its buffers, by NAME, and its optimizer, if any.

    `optimizer`: the name of its class, and of each group the names of its parameters. `lr_scheduler`: of its class.
    `extra`: the NAMEs of extra state. `refused`: what, in words, it cannot have
    of the options of its groups. `dtypes`: of `param/NAME` and `buffer/NAME`. `clashes`: what of a state the scheduler
    cannot have.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    optimizer: tuple[str, Sequence[Sequence[str]]] | None = None
    lr_scheduler: str | None = None
    extra: Set[str] = frozenset()
    refused: Callable[[Sequence[Mapping[str, Any]]], Sequence[str]] = lambda groups: ()
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    clashes: Callable[[Mapping[Any, Any]], Sequence[str]] = lambda state: ()


class Compatibility:
    """What of a checkpoint is an engine's.

    `cut`, `scalars`: of the optimizer's state, by NAME of `engine.checkpoints`.

    Not `strict`: what is missing stays as it is, and what is left over stays unread. CheckpointError where the
    manifest has values that no engine has written.
    """

    def __init__(self, manifest: Manifest, wanted: Wanted, strict: bool) -> None:
        self._manifest, self._wanted, self._strict = manifest, wanted, strict
        self.values = {name: plain.decode(value) for name, value in manifest.values.items() if name != _CLIENT}
        known = {name: self.values[name] for name in Facts.model_fields if name in self.values}
        if _CLIENT in manifest.values:  # that it can be read; `client` reads it
            known[_CLIENT] = plain.decode(
                manifest.values[_CLIENT], lambda name: torch.empty(0, dtype=self._client(name), device="cpu")
            )
        try:
            self.facts = Facts.model_validate(known)
        except ValidationError as error:
            raise CheckpointError(f"{NAME} holds values of no engine: {first_problem(error)}") from None
        self.cut: dict[str, list[str]] = {}
        for of, key, _ in _of_parameters("state", manifest.tensors):
            self.cut.setdefault(of, []).append(key)
        self.scalars: dict[str, dict[str, Any]] = {}
        for of, key, name in _of_parameters("scalar", self.values):
            self.scalars.setdefault(of, {})[key] = self.values[name]

    def client(self, reader: Reader) -> dict[str, Any]:
        """What the program has handed in, its tensors in host memory. OSError where a file has gone."""

        def take(name: str) -> torch.Tensor:
            self._client(name)
            return reader.whole(name)

        return plain.decode(self._manifest.values[_CLIENT], take)

    def _client(self, name: str) -> torch.dtype:
        """The dtype of a tensor of the program's. LookupError where there is no such tensor."""
        if not name.startswith(f"{_CLIENT}/"):
            raise LookupError(f"{name!r} is no tensor of the program's")
        return DTYPES[self._manifest.tensors[name].dtype]

    def check(self, control: Control) -> None:
        """CheckpointError on all ranks where the checkpoint is of another model, optimizer or scheduler. Collective."""
        firm, lax = self._firm(control), self._lax(control.rank)
        ranks = control.all_gather_object((firm, lax), "what does not fit")
        told = [told_by([theirs[kind] for theirs in ranks]) for kind in (0, 1)]
        if any(told):
            raise CheckpointError(
                f"[ZW603] the checkpoint {self._manifest.tag!r} does not fit the engine, nothing was loaded: "
                + "; ".join([*told[0], *told[1]])
                + ("" if told[0] or not self._strict else " (strict=False takes what there is)")
            )

    def buffer(self, name: str, rank: int) -> str:
        """The tensor that is a buffer of that rank, if there is one."""
        own = f"rank/{rank}/buffer/{name}"
        return own if own in self._manifest.tensors else f"buffer/{name}"

    def extra(self, rank: int) -> dict[str, Any]:
        """The extra state of a rank's modules, by NAME: its own, where that is not rank 0's."""
        return dict(self.values.get(f"rank/{rank}/extra", self.values.get("extra", {})))

    def _firm(self, control: Control) -> list[str]:
        """What does not fit in any case."""
        found = self._manifest.tensors
        wanted = {f"param/{name}": shape for name, shape in self._wanted.parameters.items()}
        wanted |= {self.buffer(name, control.rank): shape for name, shape in self._wanted.buffers.items()}
        known = {of: shape for of, shape in self._wanted.parameters.items() if of in self.cut}
        wanted |= {f"state/{of}/{quoted(key)}": shape for of, shape in known.items() for key in self.cut[of]}
        wrong = [
            f"{name}: {list(found[name].shape)} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in found and found[name].shape != shape
        ]
        problems = [f"of another shape: {_some(wrong)}"] if wrong else []
        kinds = [
            name
            for name, dtype in self._wanted.dtypes.items()
            if name in found and _kind(found[name].dtype) != _kind(dtype)
        ]
        problems += [f"of another kind of dtype: {_some(kinds)}"] if kinds else []
        if control.world != self._manifest.world:
            problems += self._of_ranks()
        if self._wanted.optimizer is None:
            return problems
        optimizer, scheduler = self.facts.optimizer, self.facts.lr_scheduler
        options = [] if optimizer is None else [group.options for group in optimizer.groups]
        problems += (f"its optimizer's {option}" for option in self._wanted.refused(options))
        if scheduler is not None and (clashes := self._wanted.clashes(scheduler.state)):
            problems.append(f"its lr_scheduler cannot have {_some(clashes)}")
        return problems

    def _of_ranks(self) -> Iterator[str]:
        found = self._manifest.tensors
        owned = [match for match in map(_OWN_BUFFER.fullmatch, found) if match and match[1] in self._wanted.buffers]
        first = {name: found.get(f"buffer/{name}") for name in self._wanted.buffers}
        others = {match[1] for match in owned if (of := first[match[1]]) and found[match[0]].shape != of.shape}
        if differ := sorted(others):
            ranks = f"{self._manifest.world} ranks"
            yield f"buffers of another shape on each rank, which only {ranks} can load: {_some(differ)}"

    def _lax(self, rank: int) -> list[str]:
        """What does not fit unless what is missing, or left over, may be."""
        told: list[str] = []
        if self._strict:
            found = self._manifest.tensors.keys() | {f"extra/{name}" for name in self.extra(rank)}
            named = ("param", self._wanted.parameters), ("extra", self._wanted.extra)
            others = {f"{kind}/{name}" for kind, names in named for name in names}
            wanted = others | {self.buffer(name, rank) for name in self._wanted.buffers}
            known = others | {f"buffer/{name}" for name in self._wanted.buffers}
            present = {name for name in found if name.startswith(("param/", "buffer/", "extra/"))}
            problems = {"missing": sorted(wanted - found), "unexpected": sorted(present - known)}
            told += [f"{what}: {_some(names)}" for what, names in problems.items() if names]
        if self._wanted.optimizer is not None:
            told += self._optimizer(*self._wanted.optimizer)
            saved, wanted_kind = self.facts.lr_scheduler, self._wanted.lr_scheduler
            kind = None if saved is None else saved.kind
            if self._strict and kind != wanted_kind:
                told.append(f"its lr_scheduler is {kind or 'none'}, not {wanted_kind or 'none'}")
        return told

    def _optimizer(self, kind: str, groups: Sequence[Sequence[str]]) -> Iterator[str]:
        if (saved := self.facts.optimizer) is None:
            if self._strict:
                yield "it has no optimizer's state"
            return
        if saved.kind != kind:
            yield f"its optimizer is {saved.kind}, not {kind}"
        if len(saved.groups) != len(groups):
            yield f"its optimizer has {len(saved.groups)} groups of parameters, not {len(groups)}"
            return
        theirs, ours = [set(group.params) for group in saved.groups], [set(names) for names in groups]
        shared = set().union(*theirs) & set().union(*ours)
        for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            if other := sorted(a ^ b if self._strict else (a ^ b) & shared):
                yield f"group {index} of its optimizer differs in {_some(other)}"

    def data(self, rank: int, world: int) -> Any:
        """The position of that rank's loader. CheckpointError if the checkpoint has none."""
        values, tag = self.values, self._manifest.tag
        if "data" not in values:
            raise CheckpointError(
                f"[ZW609] the checkpoint {tag!r} holds no position of data: save(…, data=…) writes one"
            )
        if world != self._manifest.world and any(map(_OWN_DATA.fullmatch, values)):
            raise CheckpointError(
                f"[ZW609] the checkpoint {tag!r} holds a position of data for each of {self._manifest.world} ranks, "
                f"and there are {world} now; zeroweave.data has a sampler with one position for all"
            )
        return values.get(f"rank/{rank}/data", values["data"])


def _of_parameters(kind: str, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """The names of a kind, as NAME, KEY and whole."""
    for name in names:
        first, _, rest = name.partition("/")
        if first == kind:
            of, _, key = rest.rpartition("/")
            yield of, unquote(key), name


def quoted(key: str) -> str:
    """A key of an optimizer's state, as names of checkpoints have it: without a slash."""
    return key.replace("%", "%25").replace("/", "%2F")


def _kind(dtype: torch.dtype | str) -> tuple[bool, bool]:
    of = DTYPES[dtype] if isinstance(dtype, str) else dtype
    return of.is_floating_point, of.is_complex


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
