"""A ZeRO-3 step as one graph of operators, and how to compile a graph and to read what Inductor made of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from zeroweave import dc
from zeroweave._torch.fx import boxed
from zeroweave._torch.inductor import inductor_compile, inductor_decompositions

GRAPH = 0
SHAPES = ((9, 6), (5, 9))
DECAY = 0.1
ops = torch.ops.zeroweave


def step(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and input gradient [n, 6] of x [n, 6] in two layers with weights of `SHAPES`, of which it has partitions.

    The loss is mean(y²) with y = relu(x w0ᵀ) w1ᵀ, plus DECAY / 2 · |w0|². The first weight is gathered again for
    the backward. What is left of it in between (its decay) is elementwise: Inductor would rather compute it later.
    """
    ops.prefetch_params_fused(GRAPH, [first], [0])
    w0 = ops.allgather_param(first, GRAPH, 0)
    w1 = ops.allgather_param(second, GRAPH, 1)
    ops.wait_allgather(w0, GRAPH, 0)
    hidden = torch.relu(x @ w0.t())
    decay, square = DECAY * w0, w0.pow(2).sum()
    halves = w0.view(torch.int16) >> 1  # a view that Inductor takes for a tensor of its own
    ops.release_param(w0, GRAPH, 0)
    ops.wait_allgather(w1, GRAPH, 1)
    y = hidden @ w1.t()
    loss = y.pow(2).mean() + DECAY / 2 * square + 0 * halves.sum()
    again = ops.allgather_param(first, GRAPH, 0)
    dy = 2 * y / y.numel()
    dw1 = dy.t() @ hidden
    done = [ops.reduce_grad(dw1, GRAPH, 1)]
    dhidden = (dy @ w1) * (hidden > 0)
    ops.release_param(w1, GRAPH, 1)
    dw0 = dhidden.t() @ x + decay
    done.append(ops.reduce_grad(dw0, GRAPH, 0))
    ops.wait_allgather(again, GRAPH, 0)
    dx = dhidden @ again
    ops.release_param(again, GRAPH, 0)
    ops.end_backward(done, GRAPH)
    return loss, dx


def reference(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Loss, input gradient and both weights' gradients, by autograd."""
    x, w0, w1 = (tensor.detach().clone().requires_grad_() for tensor in (x, *weights))
    loss = (torch.relu(x @ w0.t()) @ w1.t()).pow(2).mean() + DECAY / 2 * w0.pow(2).sum()
    return loss.detach(), *torch.autograd.grad(loss, (x, w0, w1))


def trace(function: Callable[..., Any], inputs: Sequence[Tensor], lower: str = "aot_eager") -> fx.GraphModule:
    """The graph of a function, with fake values in `meta["val"]`."""
    table = inductor_decompositions() if lower == "inductor" else {}
    return make_fx(function, decomposition_table=table, tracing_mode="fake")(*inputs)


def compiled(function: Callable[..., Any], inputs: Sequence[Tensor], lower: str) -> Callable[[list[Tensor]], Any]:
    graph = trace(function, inputs, lower)
    if lower == "aot_eager":
        return boxed(graph)
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    with config.patch(dc.inductor_options()):
        return inductor_compile(graph, fakes, is_backward=True, is_inference=False)


def with_code(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, list[str]]:
    """What a function returns under Inductor, and the lines of the code that was generated and run for it."""
    result, (code,) = run_and_get_code(lambda: compiled(function, inputs, "inductor")(list(inputs)))
    body = code[code.index("def call(") :].splitlines()
    stop = next(i for i, line in enumerate(body) if line.strip().startswith("return"))
    return result, [line.strip() for line in body[: stop + 1] if not line.strip().startswith(("#", "assert"))]


def uses(lines: Sequence[str], call: int) -> list[str]:
    """What happens, in the order of the lines, to the result of the `call`-th gather: operators, "use", "del"."""
    at = [i for i, line in enumerate(lines) if "allgather_param" in line][call]
    names = {lines[at].split(" = ")[0]}
    found = ["allgather_param"]
    for line in lines[at + 1 :]:
        if not any(re.search(rf"\b{name}\b", line) for name in names):
            continue
        if (alias := re.fullmatch(r"(\w+) = (\w+)", line)) is not None:
            names.add(alias[1])
        elif (operator := re.search(r"zeroweave\.(\w+)", line)) is not None:
            found.append(operator[1])
        elif not line.startswith("del"):
            found.append("use")
            if (view := re.match(r"(\w+) = torch\.ops\.aten\.view", line)) is not None:
                names.add(view[1])
    return found
