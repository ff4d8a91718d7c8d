"""Operators: their schemas, shapes and errors, and what Inductor makes of their order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch._subclasses.schema_check_mode import SchemaCheckMode

from tests.support.operator_graphs import GRAPH, SHAPES, compiled, ops, reference, step, trace, uses, with_code
from tests.support.reference import Expected, judge
from zeroweave import dc
from zeroweave.dc.functions import OPERATORS
from zeroweave.errors import EngineError, ParameterError

pytestmark = pytest.mark.oldest

TAKEN = torch.library.Library("zeroweave_taken", "DEF")
"""For the process: PyTorch lists operators that are gone among those that it has, and then fails to find them."""
TAKEN.define("end_backward(Tensor x) -> Tensor")


def named(results: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(("loss", "dx", "dw0", "dw1"), results, strict=True))


class Sharded:
    """A world of 1 whose default runtime knows the weights of `step` and buffers for their gradients."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.runtime = dc.init()
        self.weights = [torch.randn(shape) for shape in SHAPES]
        self.shards = [weight.flatten().clone() for weight in self.weights]
        self.buffers = [torch.full_like(shard, float("nan")) for shard in self.shards]
        for i, (shape, shard, buffer) in enumerate(zip(SHAPES, self.shards, self.buffers, strict=True)):
            dc.register_z3_param(i, shape, shard, buffer)
        dc.register_graph_z3(GRAPH, range(2))
        self.inputs = [torch.randn(4, 6), *self.shards]

    def both(self, x: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        """An input and the weights in fp32 and in float64."""
        return [(x, self.weights), (x.double(), [weight.double() for weight in self.weights])]

    @property
    def gathered_bytes(self) -> int:
        return self.runtime.ledger.gauge("flats").now

    def check(self, loss: Tensor, dx: Tensor) -> None:
        """A step's results are autograd's, and nothing is left of what was gathered."""
        got = (loss, dx, *(b.view(shape) for b, shape in zip(self.buffers, SHAPES, strict=True)))
        found = judge(named(got), Expected(*(named(reference(*each)) for each in self.both(self.inputs[0]))))
        assert found[0] <= 1, found
        assert self.gathered_bytes == 0


@pytest.fixture
def sharded() -> Iterator[Sharded]:
    try:
        yield Sharded()
    finally:
        dc.cleanup()


# ---------------------------------------------------------------------- schemas, shapes, errors
def test_operators_with_an_effect_stay_in_graphs_whose_results_nobody_uses(sharded: Sharded) -> None:
    graph = trace(step, sharded.inputs).graph
    before = [node.target for node in graph.nodes if str(node.target).startswith("zeroweave.")]
    graph.eliminate_dead_code()
    after = [node.target for node in graph.nodes if str(node.target).startswith("zeroweave.")]
    assert before == after and len(before) == 13


def test_the_full_shape_is_known_without_values(sharded: Sharded) -> None:
    with FakeTensorMode():
        for shard, shape, i in zip((54, 45), SHAPES, range(2), strict=True):
            gathered = ops.allgather_param(torch.empty(shard, dtype=torch.bfloat16), GRAPH, i)
            assert (tuple(gathered.shape), gathered.dtype) == (shape, torch.bfloat16) and gathered.is_contiguous()
            assert ops.wait_allgather(gathered, GRAPH, i) is None and ops.release_param(gathered, GRAPH, i) is None
        done = ops.reduce_grad(torch.empty(SHAPES[0]), GRAPH, 0)
        assert done.shape == (0,)
        ops.end_backward([done], GRAPH)
        ops.prefetch_params_fused(GRAPH, [torch.empty(54)], [0])
        ops.free_tensors([torch.empty(10**8)])
    assert ops.allgather_param(torch.empty(54, device="meta"), GRAPH, 0).shape == SHAPES[0]
    assert sharded.gathered_bytes == 0, "nothing was gathered"


def test_schemas_and_fake_kernels_tell_the_truth(sharded: Sharded) -> None:
    dc.start_backward(update=True)
    gathers: dict[str, tuple[Any, ...]] = {  # of the registered partition itself, where `opcheck` would copy it
        "prefetch_params_fused": (GRAPH, [sharded.shards[0]], [0]),
        "allgather_param": (sharded.shards[0], GRAPH, 0),
    }
    for name, values in gathers.items():
        for mode in (SchemaCheckMode(), CrossRefFakeMode()):
            with mode:
                getattr(ops, name)(*values)
    arguments: dict[str, tuple[Any, ...]] = {
        "wait_allgather": (ops.allgather_param(sharded.shards[1], GRAPH, 1), GRAPH, 1),
        "reduce_grad": (torch.ones(SHAPES[0]), GRAPH, 0),
        "end_backward": ([torch.empty(0)], GRAPH),
        "free_tensors": ([torch.ones(5)],),
    }
    for name, values in arguments.items():
        torch.library.opcheck(
            getattr(ops, name).default,
            values,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )
    assert {*gathers, *arguments, "release_param"} == {name for name in OPERATORS if not name.startswith("_")}


def test_errors_reach_the_caller_as_they_are(sharded: Sharded) -> None:
    with pytest.raises(EngineError, match="no graph with graph_id 7 is registered"):
        ops.reduce_grad(torch.ones(SHAPES[0]), 7, 0)
    with pytest.raises(EngineError, match="no graph with graph_id 7 is registered"):
        ops.end_backward([], 7)
    with pytest.raises(ParameterError, match="no parameter with ds_id 5"):
        ops.allgather_param(sharded.shards[0], GRAPH, 5)
    with pytest.raises(EngineError, match="is not gathered"):
        ops.release_param(torch.empty(SHAPES[0]), GRAPH, 0)
    with FakeTensorMode(), pytest.raises(EngineError, match="no graph with graph_id 7"):
        ops.allgather_param(torch.empty(54), 7, 0)
    dc.cleanup()
    with pytest.raises(EngineError, match="no graph with graph_id 0 is registered"):
        ops.reduce_grad(torch.ones(SHAPES[0]), GRAPH, 0)


def test_other_namespaces_on_request(sharded: Sharded) -> None:
    assert not hasattr(torch.ops.zeroweave_alias, "reduce_grad")
    dc.install_ops("zeroweave_alias")
    dc.install_ops("zeroweave_alias")
    gathered = torch.ops.zeroweave_alias.allgather_param(sharded.shards[0], GRAPH, 0)
    ops.wait_allgather(gathered, GRAPH, 0)
    assert torch.equal(gathered, sharded.weights[0])
    torch.ops.zeroweave_alias.release_param(gathered, GRAPH, 0)
    assert sharded.gathered_bytes == 0


def test_a_namespace_that_has_such_operators_is_left_alone() -> None:
    with pytest.raises(EngineError, match=r"torch\.ops\.zeroweave_taken has operators of other origin: end_backward"):
        dc.install_ops("zeroweave_taken")
    assert not hasattr(torch.ops.zeroweave_taken, "reduce_grad")


# ---------------------------------------------------------------------- compilers
@pytest.mark.matrix
def test_inductor_knows_the_options() -> None:
    known = config.get_config_copy()
    assert {name for name in dc.inductor_options() if name not in known} == set()


def test_a_step_in_a_graph(sharded: Sharded) -> None:
    run = compiled(step, sharded.inputs, "aot_eager")
    for update in (False, True):  # added up, then
        dc.start_backward(update)
        results = run(list(sharded.inputs))
    for buffer in sharded.buffers:
        buffer /= 2
    sharded.check(*results)


@pytest.mark.matrix
def test_inductor_gathers_waits_uses_and_releases_in_this_order(sharded: Sharded) -> None:
    dc.start_backward(update=True)
    results, lines = with_code(step, sharded.inputs)
    sharded.check(*results)
    for call in range(3):
        first, second, *used, last = uses(lines, call)
        assert (first, second, last) == ("allgather_param", "wait_allgather", "release_param"), lines
        assert used and set(used) == {"use"}, lines
    calls = [line.split("zeroweave.")[1].split(".")[0] for line in lines if "zeroweave." in line]
    assert calls == [
        "prefetch_params_fused",
        *("allgather_param", "allgather_param", "wait_allgather", "release_param", "wait_allgather"),
        *("allgather_param", "reduce_grad", "release_param", "reduce_grad"),
        *("wait_allgather", "release_param", "end_backward"),
    ]


def overwriting(x: Tensor, y: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Two gradients, [9, 6] and [5, 9], whose memory Inductor would write after they were handed over.

    The first by doing `index_put` in place, the second by giving its memory to the next kernel.
    """
    first = x @ y
    done = [ops.reduce_grad(first, GRAPH, 0)]
    put = torch.ops.aten.index_put(first, [torch.arange(2)], rows).exp()
    second = rows[:, :5].t() @ rows.repeat(1, 2)[:, :9]
    done.append(ops.reduce_grad(second, GRAPH, 1))
    return put, torch.relu(second + 1) @ (x @ x.t()), *done


@pytest.mark.matrix
def test_inductor_writes_no_gradient_that_waits_for_its_reduction(sharded: Sharded) -> None:
    x, y, rows = torch.randn(9, 6), torch.randn(6, 6), torch.randn(2, 6)
    run = compiled(overwriting, (x, y, rows), "inductor")
    dc.start_backward(update=True)
    run([x, y, rows])
    dc.end_backward(GRAPH)
    got = {"first": sharded.buffers[0].view(9, 6), "second": sharded.buffers[1].view(5, 9)}
    wanted = (
        {"first": x @ y, "second": rows[:, :5].t() @ rows.repeat(1, 2)[:, :9]}
        for x, y, rows in ((x, y, rows), (x.double(), y.double(), rows.double()))
    )
    found = judge(got, Expected(*wanted))
    assert found[0] <= 1, found
