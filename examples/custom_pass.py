"""A compiler pass of ten lines that reduces gradients inside the compiled backward, as ZeRO-2 does.

    torchrun --nproc-per-node 2 examples/custom_pass.py [--lower aot_eager|inductor]

PyTorch traces a model's forward and backward as ever; the pass inserts `reduce_grad` behind every gradient in the
backward, so that its reduction starts while earlier layers still compute. A small model is trained with it, and its
gradients are compared with those of plain data parallelism.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import fx, nn

# Private, but PyTorch's documentation makes a backend from two compilers of graphs with it; there is no other.
from torch._dynamo.backends.common import aot_autograd

from zeroweave import dc

GRAPH = 0
STEPS = 4


def reduce_in_backward(graph: fx.Graph, ds_ids: Mapping[int, int]) -> None:
    """Reduces the gradients in these output slots of a backward, and returns None for them. {slot: ds_id}"""
    output = graph.output_node()
    gradients, done = list(output.args[0]), []
    for slot, ds_id in ds_ids.items():
        gradient, gradients[slot] = gradients[slot], None
        with graph.inserting_before(output if gradient.op == "placeholder" else gradient.next):
            arguments = (gradient, GRAPH, ds_id)
            done.append(graph.call_function(torch.ops.zeroweave.reduce_grad.default, arguments))
    with graph.inserting_before(output):
        graph.call_function(torch.ops.zeroweave.end_backward.default, (done, GRAPH))
    output.args = (tuple(gradients),)


def inductor(graph: fx.GraphModule, inputs: list[Any], is_backward: bool) -> Callable[..., Any]:
    # Private: Inductor's compiler of one graph has no public name. Imported here because that takes seconds.
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    with config.patch(dc.inductor_options()):
        return compile_fx_inner(graph, inputs, is_backward=is_backward)


def backend(lower: str, ids: Mapping[nn.Parameter, int], module: fx.GraphModule, inputs: list[Any]) -> Any:
    """Compiles one graph of Dynamo's. The backward returns a gradient for each of its inputs, in their order."""
    examples = [node.meta["grapharg"].example for node in module.graph.find_nodes(op="placeholder")]
    ds_ids = {slot: ids[p] for slot, p in enumerate(examples) if isinstance(p, nn.Parameter) and p in ids}

    def compile_graph(graph: fx.GraphModule, inputs: list[Any], is_backward: bool) -> Callable[..., Any]:
        if is_backward:
            reduce_in_backward(graph.graph, ds_ids)
            graph.recompile()
        return inductor(graph, inputs, is_backward) if lower == "inductor" else make_boxed_func(graph.forward)

    decompositions = None
    if lower == "inductor":
        from torch._inductor.decomposition import select_decomp_table  # those that Inductor expects; private as well

        decompositions = select_decomp_table()
    forward, backward = (partial(compile_graph, is_backward=is_backward) for is_backward in (False, True))
    return aot_autograd(fw_compiler=forward, bw_compiler=backward, decompositions=decompositions)(module, inputs)


def train(lower: str) -> float:
    """Trains a few steps; returns the largest error of a step's gradients, as a part of what is allowed.

    Allowed is twice what plain data parallelism in fp32 is beside the same in float64, and the last bit of an fp32
    number.
    """
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 7)))
    model, plain, exact = models
    exact.double()
    parameters = list(model.parameters())

    dc.init(dist.group.WORLD, initial_reduce_bucket_size=600)
    for ds_id, p in enumerate(parameters):  # each rank keeps whole gradients here; dc_zero2.py shows partitions
        p.grad = torch.zeros_like(p)
        dc.register_param(ds_id, p.shape, p, grad_buffer=p.grad)
    dc.register_graph_z2(GRAPH, range(len(parameters)))
    compiled = torch.compile(model, backend=partial(backend, lower, {p: i for i, p in enumerate(parameters)}))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]

    worst = 0.0
    for step in range(STEPS):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        dc.start_forward()
        loss = compiled(x).pow(2).mean()
        dc.end_forward()
        dc.start_backward(update=True)
        loss.backward()

        reduced = torch.cat([p.grad.flatten() for p in parameters])
        usual, expected = averaged(plain, x), averaged(exact, x.double())
        allowed = 2 * (usual - expected).norm() + torch.finfo(torch.float32).eps * expected.norm()
        worst = max(worst, float((reduced - expected).norm() / allowed))
        for optimizer in optimizers:
            optimizer.step()
    return worst


def averaged(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """All gradients of plain data parallelism, as one tensor."""
    net.zero_grad()
    net(x).pow(2).mean().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lower", choices=("aot_eager", "inductor"), default="aot_eager")
    lower = parser.parse_args().lower
    dist.init_process_group("gloo")
    try:
        worst = train(lower)
        assert worst <= 1, worst
        if dist.get_rank() == 0:
            print(f"{lower}: gradients as in plain data parallelism in {STEPS} steps, {worst:.2f} of the error allowed")
    finally:
        dc.cleanup()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
