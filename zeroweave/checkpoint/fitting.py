"""Is a checkpoint one of this engine's model and optimizer, and what of it is whose?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroweave.checkpoint import plain
from zeroweave.checkpoint.manifest import Manifest
from zeroweave.errors import CheckpointError


@dataclass(frozen=True)
class Wanted:
    """What an engine has: the shapes of its parameters and of its buffers, by NAME, and its optimizer, if any.

    `optimizer`: the name of its class, and of each group the names of its parameters.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    optimizer: tuple[str, Sequence[Sequence[str]]] | None


class Fitting:
    """What of a checkpoint is an engine's. `cut`, `scalars`: of the optimizer's state, by NAME of `engine.checkpoints`.

    Not `strict`: what is missing stays as it is, and what is left over stays unread.
    """

    def __init__(self, manifest: Manifest, wanted: Wanted, strict: bool) -> None:
        self._manifest, self._wanted, self._strict = manifest, wanted, strict
        self.has_optimizer = "optimizer" in manifest.values
        self.cut: dict[str, list[str]] = {}
        for name in manifest.tensors:
            if name.startswith("state/"):
                of, _, key = name.removeprefix("state/").rpartition("/")
                self.cut.setdefault(of, []).append(key)
        self.scalars: dict[str, dict[str, Any]] = {}
        for name, value in manifest.values.items():
            if name.startswith("scalar/"):
                of, _, key = name.removeprefix("scalar/").rpartition("/")
                self.scalars.setdefault(of, {})[key] = value

    def check(self) -> None:
        """CheckpointError where the checkpoint is of another model or optimizer."""
        found = self._manifest.tensors
        wanted = {f"param/{name}": shape for name, shape in self._wanted.parameters.items()}
        wanted |= {f"buffer/{name}": shape for name, shape in self._wanted.buffers.items()}
        known = self.cut.keys() & self._wanted.parameters.keys()
        states = {f"state/{name}/{key}": self._wanted.parameters[name] for name in known for key in self.cut[name]}
        wrong = [
            f"{name}: {list(found[name].shape)} instead of {list(shape)}"
            for name, shape in (wanted | states).items()
            if name in found and found[name].shape != shape
        ]
        problems = {"of another shape": wrong}
        if self._strict:
            present = {name for name in found if name.startswith(("param/", "buffer/"))}
            problems |= {"missing": sorted(wanted.keys() - present), "unexpected": sorted(present - wanted.keys())}
        told = [f"{what}: {', '.join(names)}" for what, names in problems.items() if names]
        told += self._optimizers()
        if told:
            raise CheckpointError(
                f"the checkpoint {self._manifest.tag!r} does not fit the engine, nothing was loaded: {'; '.join(told)}"
                + ("" if wrong or not self._strict else " (strict=False takes what there is)")
            )

    def _optimizers(self) -> Iterator[str]:
        if self._wanted.optimizer is None:
            return
        if not self.has_optimizer:
            if self._strict:
                yield "it has no optimizer's state"
            return
        saved, (kind, groups) = self._manifest.values["optimizer"], self._wanted.optimizer
        if saved["class"] != kind:
            yield f"its optimizer is {saved['class']}, not {kind}"
        there = [sorted(group["params"]) for group in saved["groups"]]
        if there != [sorted(names) for names in groups]:
            yield f"its optimizer has {len(there)} groups of parameters, which are not the engine's {len(groups)}"

    def data(self, rank: int, world: int) -> Any:
        """The position of that rank's loader. CheckpointError where there is none."""
        values, tag = self._manifest.values, self._manifest.tag
        if "data" not in values:
            raise CheckpointError(f"the checkpoint {tag!r} holds no position of data: save(…, data=…) writes one")
        if world != self._manifest.world and any(name.endswith("/data") for name in values):
            raise CheckpointError(
                f"the checkpoint {tag!r} holds a position of data for each of {self._manifest.world} ranks, and there "
                f"are {world} now; zeroweave.data has a sampler with one position for all"
            )
        return plain.decode(values.get(f"rank/{rank}/data", values["data"]))
