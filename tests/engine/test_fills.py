"""Small memset nodes of a graph become kernels between the same nodes: by a stand-in for CUDA's driver."""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from zeroweave.engine.graphs.fills import Fills, NoFills

Result = Enum("Result", "CUDA_SUCCESS CUDA_ERROR_INVALID_VALUE")
Type = Enum("Type", [f"CU_GRAPH_NODE_TYPE_{kind}" for kind in ("KERNEL", "MEMSET", "MEM_ALLOC", "MEM_FREE")])


@dataclass
class Edge:
    """What the driver keeps of an edge; zero for a plain one."""

    type: int = 0
    from_port: int = 0
    to_port: int = 0


@dataclass(eq=False)
class Node:
    name: str
    params: Any = None
    before: dict[Node, Edge] = field(default_factory=dict)
    behind: dict[Node, Edge] = field(default_factory=dict)

    def __int__(self) -> int:
        return id(self)


class Driver:
    """One graph, with the calls of CUDA 13 that are needed."""

    CUresult, CUgraphNodeType, CUgraphEdgeData = Result, Type, Edge
    CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def __init__(self, *names: str) -> None:
        """A chain of kernels and memsets. A memset is "at:bytes of an element:elements:value", then rows if several."""
        self.nodes: list[Node] = []
        self.refuses = ""
        """the name of a call that fails"""
        for name in names:
            node = Node(name)
            if ":" in name:
                at, size, width, value, *height = (int(part, 0) for part in name.split(":"))
                node.params = SimpleNamespace(
                    dst=at, elementSize=size, width=width, value=value, height=height[0] if height else 1
                )
            if self.nodes:
                self.join(self.nodes[-1], node, Edge())
            self.nodes.append(node)

    def join(self, a: Node, b: Node, edge: Edge) -> None:
        a.behind[b] = b.before[a] = edge

    def answer(self, call: str, *values: Any) -> tuple[Any, ...]:
        return (Result.CUDA_ERROR_INVALID_VALUE if call == self.refuses else Result.CUDA_SUCCESS, *values)

    def cuModuleLoadData(self, image: bytes) -> Any:
        assert b".entry fill(" in image
        return self.answer("cuModuleLoadData", "module")

    def cuModuleGetFunction(self, module: str, name: bytes) -> Any:
        return self.answer("cuModuleGetFunction", (module, name))

    def CUgraph(self, handle: int) -> str:
        return f"graph {handle}"

    def cuGraphGetNodes(self, graph: str, count: int = 0) -> Any:
        assert graph == "graph 17"
        return self.answer("cuGraphGetNodes", self.nodes[:count], len(self.nodes))

    def cuGraphNodeGetType(self, node: Node) -> Any:
        kind = "MEMSET" if ":" in node.name else node.name if node.name.startswith("MEM_") else "KERNEL"
        return self.answer("cuGraphNodeGetType", Type[f"CU_GRAPH_NODE_TYPE_{kind}"])

    def cuGraphMemsetNodeGetParams(self, node: Node) -> Any:
        return self.answer("cuGraphMemsetNodeGetParams", node.params)

    def _neighbours(self, edges: dict[Node, Edge], count: int) -> Any:
        return self.answer("neighbours", list(edges)[:count], list(edges.values())[:count], len(edges))

    def cuGraphNodeGetDependencies(self, node: Node, count: int = 0) -> Any:
        return self._neighbours(node.before, count)

    def cuGraphNodeGetDependentNodes(self, node: Node, count: int = 0) -> Any:
        return self._neighbours(node.behind, count)

    def cuGraphAddKernelNode(self, graph: str, before: list[Node], count: int, params: Any) -> Any:
        assert count == len(before) and graph == "graph 17"
        made = Node("fill", params)
        for node in before:
            self.join(node, made, Edge())
        self.nodes.append(made)
        return self.answer("cuGraphAddKernelNode", made)

    def cuGraphAddDependencies(self, graph: str, a: list[Node], b: list[Node], edges: list[Edge], count: int) -> Any:
        assert len(a) == len(b) == len(edges) == count > 0
        for one, other, edge in zip(a, b, edges, strict=True):
            self.join(one, other, edge)
        return self.answer("cuGraphAddDependencies")

    def cuGraphDestroyNode(self, node: Node) -> Any:
        for other in node.before:
            del other.behind[node]
        for other in node.behind:
            del other.before[node]
        self.nodes.remove(node)
        return self.answer("cuGraphDestroyNode")

    @property
    def edges(self) -> set[tuple[str, str]]:
        return {(node.name, other.name) for node in self.nodes for other in node.behind}


def fills_of(driver: Driver) -> list[tuple[int, int, int]]:
    """Of each kernel: where, which word, how many."""
    found = []
    for node in driver.nodes:
        if node.name == "fill":
            p = node.params
            assert p.func == ("module", b"fill") and p.kernelParams[1] == (ctypes.c_uint64, ctypes.c_uint32)
            assert (p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimY, p.blockDimZ) == (1, 1, 1, 1, 1)
            found.append((*p.kernelParams[0], p.blockDimX))
    return found


@pytest.mark.parametrize(
    ("memset", "wanted"),
    [
        ("0x1000:4:1:0", (0x1000, 0, 1)),
        ("0x1000:4:1024:0xDEADBEEF", (0x1000, 0xDEADBEEF, 1024)),
        ("0x1004:2:6:0xBEEF", (0x1004, 0xBEEFBEEF, 3)),
        ("0x1008:1:8:0xAB", (0x1008, 0xABABABAB, 2)),
        ("0x1008:1:8:0xFFFFFFFF", (0x1008, 0xFFFFFFFF, 2)),  # -1, of which a byte counts
        ("0x1008:2:2:0xFFFF1234", (0x1008, 0x12341234, 1)),
    ],
)
def test_a_kernel_writes_the_same_words(memset: str, wanted: tuple[int, int, int]) -> None:
    driver = Driver("a", memset, "b")
    assert Fills(driver).replace(17) == 1
    assert fills_of(driver) == [wanted]
    assert driver.edges == {("a", "fill"), ("fill", "b")} and len(driver.nodes) == 3


@pytest.mark.parametrize(
    "memset",
    [
        "0x1000:4:1025:0",  # more than a block
        "0x1000:1:3:0",  # no whole words
        "0x1000:2:3:0",
        "0x1002:2:2:0",  # not where words lie
        "0x1000:4:2:0:2",  # of several rows
        "0x1000:4:0:0",
    ],
)
def test_others_stay(memset: str) -> None:
    driver = Driver("a", memset, "b")
    assert Fills(driver).replace(17) == 0
    assert driver.edges == {("a", memset), (memset, "b")}


@pytest.mark.parametrize("edge", [Edge(type=1), Edge(from_port=1), Edge(to_port=1)])
@pytest.mark.parametrize("at", ["before", "behind"])
def test_one_with_an_edge_of_another_kind_stays(at: str, edge: Edge) -> None:
    driver = Driver("a", "0x1000:4:1:0", "b")
    a, memset, b = driver.nodes
    driver.join(*((a, memset) if at == "before" else (memset, b)), edge)
    assert Fills(driver).replace(17) == 0 and len(driver.nodes) == 3


@pytest.mark.parametrize("backwards", [False, True])
def test_all_edges_are_those_of_the_memset(backwards: bool) -> None:
    """Several on either side, memsets one behind the other, one at the graph's beginning and one at its end."""
    driver = Driver("0x10:4:1:1", "a", "0x20:4:1:2", "0x30:4:1:3", "b", "0x40:4:1:4")
    by_name = {node.name: node for node in driver.nodes}
    left, right = Node("left"), Node("right")
    driver.nodes += [left, right]
    driver.join(left, by_name["0x20:4:1:2"], Edge())
    driver.join(by_name["0x30:4:1:3"], right, Edge())
    before = driver.edges
    if backwards:
        driver.nodes.reverse()
    assert Fills(driver).replace(17) == 4

    def named(node: Node) -> str:
        words = {1: "0x10:4:1:1", 2: "0x20:4:1:2", 3: "0x30:4:1:3", 4: "0x40:4:1:4"}
        return words[node.params.kernelParams[0][1]] if node.name == "fill" else node.name

    assert {(named(node), named(other)) for node in driver.nodes for other in node.behind} == before
    assert all(node.before == {} for node in driver.nodes if named(node) == "0x10:4:1:1")


def test_cuda_12_has_other_names_for_calls_with_data() -> None:
    class Older(Driver):
        def _none(self, *args: Any) -> Any:
            raise AssertionError("loses what edges have")

        cuGraphNodeGetDependencies_v2 = Driver.cuGraphNodeGetDependencies
        cuGraphNodeGetDependentNodes_v2 = Driver.cuGraphNodeGetDependentNodes
        cuGraphAddDependencies_v2 = Driver.cuGraphAddDependencies
        cuGraphNodeGetDependencies = cuGraphNodeGetDependentNodes = cuGraphAddDependencies = _none

    driver = Older("a", "0x1000:4:1:0", "b")
    assert Fills(driver).replace(17) == 1 and driver.edges == {("a", "fill"), ("fill", "b")}


@pytest.mark.parametrize("call", ["cuGraphAddKernelNode", "cuGraphAddDependencies", "cuGraphDestroyNode"])
def test_a_change_that_the_driver_refuses_is_an_error(call: str) -> None:
    driver = Driver("a", "0x1000:4:1:0", "b")
    fills = Fills(driver)
    driver.refuses = call
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        fills.replace(17)


@pytest.mark.parametrize("call", ["cuGraphGetNodes", "cuGraphNodeGetType", "cuGraphMemsetNodeGetParams", "neighbours"])
def test_a_graph_that_the_driver_does_not_tell_of_stays(call: str) -> None:
    driver = Driver("a", "0x1000:4:1:0", "b")
    fills = Fills(driver)
    driver.refuses = call
    assert fills.replace(17) == 0 and driver.edges == {("a", "0x1000:4:1:0"), ("0x1000:4:1:0", "b")}


@pytest.mark.parametrize("other", ["MEM_ALLOC", "MEM_FREE"])
def test_a_graph_that_allocates_stays(other: str) -> None:
    """The driver takes no node out of it."""
    driver = Driver("a", "0x1000:4:1:0", other)
    assert Fills(driver).replace(17) == 0 and len(driver.nodes) == 3


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in the place of cuda.bindings."""
    made = ModuleType("cuda.bindings")
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", made)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return made


@pytest.mark.parametrize("refuses", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_driver_that_does_not_take_the_kernel_has_no_fills(bindings: ModuleType, refuses: str) -> None:
    driver = Driver()
    bindings.driver = driver  # type: ignore[attr-defined]
    assert isinstance(Fills.on(torch.device("cuda", 0)), Fills)
    driver.refuses = refuses
    with pytest.raises(NoFills, match="CUDA_ERROR_INVALID_VALUE"):
        Fills.on(torch.device("cuda", 0))


def test_without_bindings_there_are_no_fills(bindings: ModuleType) -> None:
    with pytest.raises(NoFills, match="cuda-bindings"):
        Fills.on(torch.device("cuda", 0))
