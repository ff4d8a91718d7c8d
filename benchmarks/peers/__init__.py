"""The implementations: each builds the model its own way and gives a function that trains it one step.

| name | what it is |
|---|---|
| `zeroweave-z1`, `-z2`, `-z3` | zeroweave at that stage |
| `zeroweave-graphs-z3`, … | the same with the settings of a variant: `graphs`, or one of the command line's |
| `fsdp2-z3` | FSDP2 that reshards after the forward |
| `fsdp2-z2` | FSDP2 that does not: the parameters stay gathered until the backward is over |
| `fsdp2-ce-z3`, `-ce-z2` | the same, gathering by NCCL's copy engines |
| `fsdp2-ce-rs-z3`, `-ce-rs-z2` | with the buffers of reductions in symmetric memory as well |
| `fsdp2-ce-graphs-z3`, `-z2` | `fsdp2-ce` with forward, backward and optimizer as one CUDA graph |
| `fsdp2-graphs-z3`, `-z2` | the same with gathers by NCCL's kernels, where copy engines cannot be captured |
| `compute` | a floor: no communication, the whole model on each GPU, the optimizer over 1/N of it |
| `compute-graphs` | the same as one CUDA graph: the floor where the host is the limit |

All keep bfloat16 parameters in the computation, fp32 masters, bfloat16 reductions and AdamW.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.models import Shape
from benchmarks.peers import compute, fsdp2, zeroweave
from benchmarks.peers.common import Options, Trainer

__all__ = ["NAMES", "Name", "Options", "Trainer", "environment", "fsdp2_of", "make", "parse", "peers_of"]

NAMES = (
    "zeroweave[-VARIANT…]-z3, -z2, -z1",
    "fsdp2-z3, -z2",
    "fsdp2-ce-z3, -z2",
    "fsdp2-ce-rs-z3, -z2",
    "fsdp2-ce-graphs-z3, -z2",
    "fsdp2-graphs-z3, -z2",
    "compute",
    "compute-graphs",
)
PEERS = {
    "ce-graphs": ("ce", "graphs"),
    "graphs": ("graphs",),
    "ce-rs": ("ce", "rs"),
    "ce": ("ce",),
    "": (),
}
"""FSDP2's settings, by the word in a name."""
SPELLED = re.compile(r"(zeroweave|fsdp2)((?:-\w+)*)-z([123])")


@dataclass(frozen=True, slots=True)
class Name:
    """What the name of an implementation says: `zeroweave-graphs-z3` is zeroweave, stage 3, with ("graphs",)."""

    family: str
    stage: int
    variants: tuple[str, ...] = ()


def parse(name: str, variants: Mapping[str, object] | None = None) -> Name:
    """What `name` says; `variants` are those of zeroweave beside `graphs`. ValueError for a name that says nothing."""
    if name in ("compute", "compute-graphs"):
        return Name("compute", 0, tuple(name.split("-")[1:]))
    found = SPELLED.fullmatch(name)
    if found is not None:
        family, words, stage = found[1], found[2].removeprefix("-"), int(found[3])
        if family == "zeroweave":
            chosen = tuple(filter(None, words.split("-")))
            if set(chosen) <= {*zeroweave.BUILT_IN, *(variants or {})}:
                return Name(family, stage, chosen)
        elif words in PEERS and stage > 1:
            return Name(family, stage, PEERS[words])
    raise ValueError(f"unknown {name}; there are {'; '.join(NAMES)}")


def peers_of(impl: str) -> tuple[str, ...]:
    """The implementations that zeroweave is compared with at this stage; none for the others."""
    if not impl.startswith("zeroweave-"):
        return ()
    stage = "z3" if impl.endswith("z3") else "z2"
    return fsdp2_of(stage)


def fsdp2_of(stage: str) -> tuple[str, ...]:
    """All settings of FSDP2 at stage "z3" or "z2"."""
    return tuple("-".join(filter(None, ("fsdp2", words, stage))) for words in PEERS)


def environment(name: str) -> Mapping[str, str]:
    """The variables that the processes of implementation `name` need, and no others."""
    return fsdp2.COPY_ENGINE_VARIABLES if name.startswith("fsdp2-ce-") else {}


def make(name: str, shape: Shape, device: torch.device, options: Options) -> Trainer:
    """Builds implementation `name`; the default process group exists already."""
    said = parse(name, options.variants)
    if said.family == "zeroweave":
        return zeroweave.build(said.stage, said.variants, shape, device, options)
    if said.family == "fsdp2":
        return fsdp2.build(said.stage == 3, said.variants, shape, device, options)
    return compute.build(said.variants, shape, device, options)
