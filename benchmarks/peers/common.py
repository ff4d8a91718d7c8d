"""What the implementations have in common: options, the optimizer, and how a step consists of micro-steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-5
Attention = Literal["", "causal", "masked"]
"""How transformers' models attend: by SDPA's causal flag, or by the mask that they make. "" is our decoder."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to build an implementation.

    `zeroweave` is merged over zeroweave's own config, and over it that of each variant in the implementation's name.
    `loop` is the loop that trains zeroweave. `hf` says that the model is transformers' own, and how it attends. `gas`
    is the number of micro-steps of an optimizer step. `lora` is the rank of low-rank layers, which alone are trained;
    0: everything is. `group_size` is the number of ranks that parameters are sharded over; 0: all.
    """

    lower: Literal["inductor", "aot_eager", "none"] = "inductor"
    compile_embedding: bool = False
    zeroweave: Mapping[str, Any] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loop: Literal["train_step", "plain"] = "train_step"
    hf: Attention = ""
    gas: int = 1
    lora: int = 0
    group_size: int = 0


@dataclass(frozen=True, slots=True)
class Trainer:
    """`step(batches)` is one whole training step of as many micro-steps; `details()` comes last.

    What it returns is the detached mean loss, to be read before the next step. `held()` is the memory that
    replays of CUDA graphs write and no tensor has, in bytes: the graphs' own, and registered buffers. `note` says what
    is not as the implementation's name has it.
    """

    step: Callable[[Sequence[Tensor]], Tensor]
    details: Callable[[], dict[str, Any]] = dict
    close: Callable[[], None] = lambda: None
    held: Callable[[], int] = lambda: 0
    note: str | None = None


def adamw(parameters: Iterable[Tensor], device: torch.device, capturable: bool = False) -> torch.optim.AdamW:
    """PyTorch's AdamW, fused on a GPU. `capturable`: a CUDA graph may have its step."""
    cuda = device.type == "cuda"
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=cuda, capturable=capturable and cuda)


def compile_in_place(modules: Iterable[nn.Module], options: Options) -> None:
    # Every block compiles the same code; a limit of eight would leave some of them eager without a word.
    torch._dynamo.config.recompile_limit = 64
    for module in modules:
        if options.lower != "none":
            module.compile(backend=options.lower)


def mean(losses: Iterable[Tensor], count: int) -> Tensor:
    """The mean of `count` losses, each taken before the next one is made. One loss is itself: that costs no kernel."""
    return reduce(torch.add, (loss if count == 1 else loss / count for loss in losses))
