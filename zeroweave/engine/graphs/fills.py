"""Small fills of a captured graph: kernels, where libraries asked for memset nodes.

cuBLAS and cuDNN clear a counter of four bytes in front of most of their kernels. A memset node between two kernels of a
graph costs an H200 8.8 us, an edge between two kernels 0.5 us (docs/performance.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import torch

_MOST_WORDS: Final = 1024
"""As many as threads of one block: each writes one."""
_KERNEL: Final = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 at, .param .u32 word)
{
    .reg .b32 %word, %thread;
    .reg .b64 %at, %offset;
    ld.param.u64 %at, [at];
    ld.param.u32 %word, [word];
    cvta.to.global.u64 %at, %at;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %offset, %thread, 4;
    add.s64 %at, %at, %offset;
    st.global.u32 [%at], %word;
    ret;
}
"""
_REPEATED: Final = {1: 0x01010101, 2: 0x00010001, 4: 1}
"""What makes a word of four bytes of an element, by the element's bytes."""


class NoFills(Exception):
    """Memset nodes cannot be changed here. Says why."""


class _Fill(NamedTuple):
    """A memset node that a kernel can do, and the nodes around it."""

    node: Any
    at: int
    word: int
    words: int
    before: list[Any]
    behind: list[Any]


class Fills:
    """Changes the small memset nodes of graphs into kernel nodes, on one device."""

    def __init__(self, driver: Any) -> None:
        """`driver`: cuda.bindings.driver. For the device that is current. RuntimeError where it refuses the kernel."""
        self._driver = driver
        # Names of its calls that take edges with data: those of CUDA 12, which has others without, and of 13.
        self._before = getattr(driver, "cuGraphNodeGetDependencies_v2", driver.cuGraphNodeGetDependencies)
        self._behind = getattr(driver, "cuGraphNodeGetDependentNodes_v2", driver.cuGraphNodeGetDependentNodes)
        self._join = getattr(driver, "cuGraphAddDependencies_v2", driver.cuGraphAddDependencies)
        (module,) = self._asked(driver.cuModuleLoadData(_KERNEL))  # stays loaded as long as the process
        (self._kernel,) = self._asked(driver.cuModuleGetFunction(module, b"fill"))

    @classmethod
    def on(cls, device: torch.device) -> Fills:
        """NoFills without the bindings of CUDA's driver, and where the driver does not take the kernel."""
        try:
            from cuda.bindings import driver
        except ImportError:
            raise NoFills("the bindings of CUDA's driver (cuda-bindings) are missing") from None
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # its context is current then
            try:
                return cls(driver)
            except RuntimeError as error:
                raise NoFills(str(error)) from None

    @classmethod
    def if_possible(cls, device: torch.device) -> Fills | None:
        """None where `on` raises NoFills: graphs stay as they are captured then."""
        with suppress(NoFills):
            return cls.on(device)
        return None

    def replace(self, graph: int) -> int:
        """In a graph that is not instantiated yet, by its handle. How many nodes were changed.

        The kernel writes the same bytes, behind the same nodes and before the same. What the driver does not tell
        all of stays as it is.

        Raises:
            RuntimeError: the driver refuses a change. The graph may be changed in part, and is not to be used.
        """
        driver = self._driver
        handle = driver.CUgraph(graph)
        made: dict[int, Any] = {}
        """by the memset that was there"""
        fills = self._fills_of(handle)
        for fill in fills:
            params = driver.CUDA_KERNEL_NODE_PARAMS()
            params.func = self._kernel
            params.gridDimX = params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1
            params.blockDimX = fill.words
            params.kernelParams = ((fill.at, fill.word), (ctypes.c_uint64, ctypes.c_uint32))
            before, behind = ([made.get(int(each), each) for each in side] for side in (fill.before, fill.behind))
            (kernel,) = self._asked(driver.cuGraphAddKernelNode(handle, before, len(before), params))
            if behind:
                plain = [driver.CUgraphEdgeData() for _ in behind]
                self._asked(self._join(handle, [kernel] * len(behind), behind, plain, len(behind)))
            self._asked(driver.cuGraphDestroyNode(fill.node))
            made[int(fill.node)] = kernel
        return len(fills)

    def _fills_of(self, graph: Any) -> list[_Fill]:
        """What can be changed. Changes nothing."""
        driver, kinds = self._driver, self._driver.CUgraphNodeType
        lasting = kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC, kinds.CU_GRAPH_NODE_TYPE_MEM_FREE
        found = []
        try:
            _, count = self._asked(driver.cuGraphGetNodes(graph))
            nodes, _ = self._asked(driver.cuGraphGetNodes(graph, count))
            for node in nodes:
                (kind,) = self._asked(driver.cuGraphNodeGetType(node))
                if kind in lasting:
                    return []  # no node can be taken out of such a graph
                if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET and (fill := self._fill_of(node)) is not None:
                    found.append(fill)
        except RuntimeError:  # of the driver, or of bindings that know a call which the driver does not have
            return []
        return found

    def _fill_of(self, node: Any) -> _Fill | None:
        (asked,) = self._asked(self._driver.cuGraphMemsetNodeGetParams(node))
        size, at = asked.elementSize, int(asked.dst)
        words, rest = divmod(asked.width * size, 4)
        if asked.height != 1 or rest or at % 4 or not 0 < words <= _MOST_WORDS:
            return None
        try:
            before, behind = self._around(self._before, node), self._around(self._behind, node)
        except RuntimeError:  # as where edges are none that it tells of
            return None
        word = (asked.value & (1 << 8 * size) - 1) * _REPEATED[size]
        return None if before is None or behind is None else _Fill(node, at, word, words, before, behind)

    def _around(self, ask: Callable[..., Any], node: Any) -> list[Any] | None:
        """The nodes at the other ends of the edges on one side. None if an edge is no plain one: it stays as it is."""
        *_, count = self._asked(ask(node))
        if not count:
            return []
        nodes, edges, _ = self._asked(ask(node, count))
        return None if any(edge.type or edge.from_port or edge.to_port for edge in edges) else list(nodes)

    def _asked(self, answer: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the driver has answered behind its error code."""
        code, *values = answer
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"small fills of a graph: CUDA's driver answers {code.name}")
        return tuple(values)
