"""The floor: what a step costs on this GPU if nothing is communicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.models import Shape
from benchmarks.peers.common import LEARNING_RATE, Options, Trainer, compile_in_place, mean
from benchmarks.peers.step_graph import trainer
from benchmarks.peers.subject import Subject

BETA1, BETA2, EPSILON, DECAY = 0.9, 0.999, 1e-8, 1e-2


def build(variants: Sequence[str], shape: Shape, device: torch.device, options: Options) -> Trainer:
    """What a step costs without communication.

    Included: forward and backward of the whole model with real weights (zeros draw less power), and AdamW over 1/N of
    the parameters, in compiled code that passes over the state once: it reads the bfloat16 fragment of each gradient
    where autograd left it, and writes the new bfloat16 weights beside the fp32 masters. With the variant `graphs` all
    that is one CUDA graph, else the host issues it.

    Left out: collectives, the copies in and out of their buffers, waiting for other ranks, and whatever an
    implementation's own Python takes. Gradients of micro-steps add up in bfloat16. Each rank trains its share of the
    weights by its own gradients, so that losses fall, but are nobody else's. Needs memory for the whole model and its
    gradients.
    """
    if options.lora:
        raise ValueError("compute has no --lora: its optimizer trains all parameters")
    subject = Subject(shape, options.hf)
    model = subject.build(device, torch.bfloat16)
    parts = subject.parts(model)
    compile_in_place([*([parts.embedding] if options.compile_embedding else []), *parts.compiled], options)
    groups = [Group.of(parameters, dist.get_rank(), dist.get_world_size()) for parameters in parts.groups()]
    update = adamw if options.lower == "none" else torch.compile(adamw, backend=options.lower, dynamic=False)
    count = torch.zeros((), device=device)

    def micro_step(tokens: Tensor) -> Tensor:
        loss = subject.loss(model(**subject.batch(tokens)))
        torch.autograd.backward(loss if options.gas == 1 else loss / options.gas)
        return loss.detach()

    def step(batches: Sequence[Tensor]) -> Tensor:
        loss = mean(map(micro_step, batches), len(batches))
        count.add_(1)
        for group in groups:
            update(group.weights, group.masters, group.means, group.squares, group.gradients(), count)
        return loss

    return trainer(step, "graphs" in variants, device)


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of one module, this rank's fragment of each, and the state of AdamW for the fragments."""

    parameters: list[nn.Parameter]
    fragments: list[slice]
    weights: list[Tensor]
    masters: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]

    @classmethod
    def of(cls, parameters: list[nn.Parameter], rank: int, world: int) -> Group:
        shares = [p.numel() // world for p in parameters]
        fragments = [slice(rank * share, (rank + 1) * share) for share in shares]
        weights = [p.detach().view(-1)[fragment] for p, fragment in zip(parameters, fragments, strict=True)]
        masters = [weight.float() for weight in weights]
        moments = ([torch.zeros_like(master) for master in masters] for _ in range(2))
        return cls(parameters, fragments, weights, masters, *moments)

    def gradients(self) -> list[Tensor]:
        """The fragments of the gradients, which the parameters let go of."""
        found = []
        for parameter, fragment in zip(self.parameters, self.fragments, strict=True):
            assert parameter.grad is not None
            found.append(parameter.grad.view(-1)[fragment])
            parameter.grad = None
        return found


@torch.no_grad()
def adamw(
    weights: Sequence[Tensor],
    masters: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    gradients: Sequence[Tensor],
    count: Tensor,
) -> None:
    """AdamW as PyTorch's, its `count`th step. Compiled, it passes over each tensor once."""
    rate = LEARNING_RATE / (1 - BETA1**count)
    correction = (1 - BETA2**count).sqrt()
    for weight, master, average, square, gradient in zip(weights, masters, means, squares, gradients, strict=True):
        fresh = gradient.float()
        average.lerp_(fresh, 1 - BETA1)
        square.mul_(BETA2).addcmul_(fresh, fresh, value=1 - BETA2)
        master.mul_(1 - LEARNING_RATE * DECAY).sub_(rate * average / (square.sqrt() / correction + EPSILON))
        weight.copy_(master)
