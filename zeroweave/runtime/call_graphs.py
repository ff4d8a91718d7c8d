"""CUDA graphs of templates' executions. The user's Python runs in every step: a graph has the kernels of a template.

A **unit** begins with an outermost forward, and ends at the next one at which no tensor of the unit is in use. As a
rule that is a forward with its backward. A **recording** is the sequence of a unit's steps: executions of templates,
each a graph, and memory that was lent. All recordings share one pool of memory. They are made while nothing in the pool
is alive, and replayed in the same order with the same lifetimes. So what a replay overwrites is dead, as it was in the
recording.

    PLAIN      templates run without graphs
    RECORDING  each template is captured, and launched at once
    REPLAYING  the unit has followed a recording so far; where it departs, the rest of it is PLAIN

A unit is recorded when its signature has been seen before, and all that it runs has run then: code that runs for the
first time may compile and measure kernels. Memory in the pool is lost to everything else. So recordings are kept only
while the device has room for the pool and a unit without graphs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Final
from weakref import ref

import torch
from torch import Tensor

from zeroweave.runtime.graph_check import GraphCheck
from zeroweave.runtime.graph_recording import (
    UNKNOWN,
    Block,
    Capture,
    Copied,
    Execution,
    Loan,
    Recording,
    Run,
    View,
    constant,
    distinct,
    part_of,
    same,
    stamp,
)

RECORDINGS: Final = 24
"""So many are kept; the least recently used one is dropped for a further one."""
MISSES: Final = 3
"""A recording is dropped when so many units in a row have departed from it."""


class Mode(Enum):
    PLAIN = "plain"
    RECORDING = "recording"
    REPLAYING = "replaying"


class CallGraphs:
    """The graphs of one engine. `device`: what templates compute on; other tensors are constants of a graph.

    `tell(reason)` is told why a template has no graph, once for each reason. `checks`: each new graph is compared with
    its code.
    """

    def __init__(
        self, device: torch.device, capture: Capture, tell: Callable[[str], None], checks: bool = False
    ) -> None:
        self._device, self._capture, self._tell, self._checks = device, capture, tell, checks
        self._recordings: OrderedDict[Hashable, Recording] = OrderedDict()
        self._seen: OrderedDict[Hashable, dict[int, Run]] = OrderedDict()
        """code that has run plainly in units of each signature, by identity"""
        self._refused: dict[int, tuple[Run, str]] = {}
        """code that cannot be captured, by identity, and why"""
        self._fresh = True
        """False from a failed capture on, until the pool is another one"""
        self._mode = Mode.PLAIN
        self._unit: Recording | None = None
        self._signature: Hashable = None
        self._warm: dict[int, Run] = {}
        """of the unit's signature, see `_seen`"""
        self._next = 0
        self._living: list[Block] = []
        """blocks of a recording that is made, which were alive at its last step"""
        self._overdue: list[Block] = []
        """blocks that are alive, and were not in the recording"""
        self._sources: dict[int, tuple[Tensor, int | None, Block]] = {}
        """arguments that a recording copies, by identity: with their versions, and where to"""
        self._copied: dict[int, tuple[ref[Tensor], int | None]] = {}
        """what a replay has copied to these addresses, with its version: other calls may have saved it from there"""
        self._closed = False
        self.launched = self.plain = 0
        """executions so far, with a graph and without"""
        self.difference = 0.0
        """the largest difference that a comparison has found"""
        self.why: Counter[str] = Counter()
        """why units departed from their recordings, and why templates have no graph; how often"""

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs use in addition to tensors."""
        return self._capture.nbytes

    # ------------------------------------------------------------------ units
    def begin(self, signature: Hashable, settled: bool) -> None:
        """An outermost forward begins. `settled`: parameters have the addresses of the next steps."""
        if self._unit is not None and any(block.alive for block in self._unit.blocks):
            return  # the unit continues
        self._end()
        if not self._fresh:
            self._renew()
        records = settled and signature in self._seen
        self._signature, self._warm = signature, self._seen.setdefault(signature, {})
        if len(self._seen) > 4 * RECORDINGS:
            self._seen.popitem(last=False)
        if (known := self._recordings.get(signature)) is not None:
            self._recordings.move_to_end(signature)
            self._mode, self._unit = Mode.REPLAYING, known
            return
        if not (records or self._recordings):
            return
        if not self._capture.has_room():
            self._note("the device has no room for a call's memory twice")
            if self._recordings:
                self._renew()
        elif records:
            self._mode, self._unit = Mode.RECORDING, Recording()
            self._capture.make_room()

    def _renew(self) -> None:
        """Drops all recordings with their memory."""
        self._recordings.clear()
        self._capture.clear()
        self._fresh = True

    def _end(self) -> None:
        unit, mode = self._unit, self._mode
        if unit is not None and mode is Mode.RECORDING and unit.steps:
            self._recordings[self._signature] = unit
            if len(self._recordings) > RECORDINGS:
                self._recordings.popitem(last=False)
        elif unit is not None and mode is Mode.REPLAYING:
            unit.followed()
        self._mode, self._unit, self._next = Mode.PLAIN, None, 0
        self._living, self._overdue = [], []
        self._sources.clear()
        self._copied.clear()

    def abort(self) -> None:
        """The unit ends with an exception: the rest of it is plain, and a recording is not kept."""
        self._mode = Mode.PLAIN
        self._sources.clear()

    def close(self) -> None:
        """No graph is left. Does nothing the second time."""
        if self._closed:
            return
        self._closed = True
        self._end()
        self._recordings.clear()
        self._seen.clear()
        self._warm, self._refused = {}, {}
        self._capture.close()

    def _note(self, why: str) -> None:
        if why not in self.why:
            self._tell(why)
        self.why[why] += 1

    def _depart(self, reason: str) -> None:
        """The rest of the unit is plain."""
        assert self._unit is not None
        self._mode = Mode.PLAIN
        self.why[reason] += 1
        if self._unit.missed() >= MISSES:
            self._recordings.pop(self._signature, None)

    def _step(self) -> Execution | Loan | None:
        """The recording's next step; None after the last, or if a block is alive that was dead then."""
        assert self._unit is not None
        if self._next == len(self._unit.steps):
            return None
        step = self._unit.steps[self._next]
        self._next += 1
        self._overdue = [block for block in (*self._overdue, *step.dead) if block.alive]
        return None if self._overdue else step

    def _died(self) -> list[Block]:
        """The blocks that have died since the last step of the recording being made."""
        dead = [block for block in self._living if not block.alive]
        if dead:
            self._living = [block for block in self._living if block not in dead]
        return dead

    def _hand_out(self, block: Block) -> None:
        assert self._unit is not None
        self._unit.blocks.append(block)
        self._unit.at[block.address] = block
        self._living.append(block)

    def own(self, tensor: Tensor) -> Tensor:
        """The tensor, or a copy if graphs write its memory: the program may keep it."""
        if self._unit is None or tensor.device.type != self._device.type or not tensor.numel():
            return tensor
        return tensor.clone() if tensor.untyped_storage().data_ptr() in self._unit.at else tensor

    # ------------------------------------------------------------------ memory of gradient flats
    def lend(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Memory [numel] for what templates write, at the address that they know; None: anywhere."""
        if self._mode is Mode.RECORDING:
            assert self._unit is not None
            dead = self._died()
            made = self._capture.empty(numel, dtype)
            block = Block(made.untyped_storage())
            self._unit.steps.append(Loan(block.pattern(View.of(made)), dead))
            self._hand_out(block)
            return made
        if self._mode is Mode.REPLAYING:
            step = self._step()
            if isinstance(step, Loan) and step.pattern.numel() == numel and step.pattern.dtype == dtype:
                return step.pattern.data
            self._depart(self._reason())
        return None

    def _reason(self) -> str:
        return "tensors of an earlier call are still referenced" if self._overdue else "the calls are others"

    # ------------------------------------------------------------------ executions
    def execute(self, run: Run, args: list[Any], bound: Callable[[], Collection[int]]) -> Any:
        """`run(args)`, as a graph if there is one. `bound()`: the parameters among them, and what `run` writes."""
        if self._mode is Mode.REPLAYING:
            step = self._step()
            if not isinstance(step, Execution) or step.run is not run:
                self._depart(self._reason())
            elif step.graph is not None:
                if (why := self._mismatch(step, args)) is None:
                    return self._launch(step, args)
                self._depart(why)
        elif self._mode is Mode.RECORDING:
            if id(run) in self._warm:
                return self._record(run, args, bound())
            self._mode = Mode.PLAIN  # the next unit is recorded
        self.plain += 1
        self._warm[id(run)] = run
        return run(args)

    def _mismatch(self, step: Execution, args: Sequence[Any]) -> str | None:
        """Why the graph is not one of these arguments; None if it is."""
        for i, value in step.constants:
            if not same(constant(args[i]), value):
                return "a number among the arguments has another value"
        for i, address in step.bound:
            if args[i].data_ptr() != address:
                return "parameters or activations lie at other addresses"
        for copied in step.copied:
            arg, view = args[copied.index], copied.view
            if arg.shape != view.size or arg.stride() != view.stride or arg.dtype != view.dtype:
                return "an argument has another shape"
            known = self._copied.get(copied.block.address)
            if known is not None and (known[1] != stamp(arg) or known[0]() is not arg):
                return "calls that had one argument in common have several"
        return None

    def _launch(self, step: Execution, args: list[Any]) -> list[Any]:
        assert step.graph is not None
        if step.copied:
            with torch.no_grad():
                for copied in step.copied:
                    arg, address = args[copied.index], copied.block.address
                    if address not in self._copied or self._copied[address][1] is None:
                        copied.static.copy_(part_of(arg, copied.part))
                        self._copied[address] = ref(arg), stamp(arg)
        step.graph.replay()
        self.launched += 1
        for i, pattern in step.filled:
            args[i].set_(pattern)
        outputs = step.outputs.copy()
        for i, pattern in step.new:
            outputs[i] = pattern.data
        for i, argument, view in step.given:
            arg = args[argument]
            outputs[i] = arg if view is None else view.of_argument(arg)
        args.clear()
        return outputs

    def _record(self, run: Run, args: list[Any], bound: Collection[int]) -> Any:
        assert self._unit is not None
        step = Execution(run, self._died())
        self._unit.steps.append(step)
        given: list[Any] = list(args)
        empty: list[int] = []
        statics: dict[int, Block] = {}
        if id(run) in self._refused:
            return self._without_graph(run, args, self._refused[id(run)][1])
        why = None
        for i, arg in enumerate(args):
            if not isinstance(arg, Tensor) or arg.device.type != self._device.type:
                value = constant(arg)
                why = why or (f"it has an argument of {type(arg).__name__}" if value is UNKNOWN else None)
                step.constants.append((i, value))
            elif arg.numel() and not arg.untyped_storage().nbytes():
                empty.append(i)
            elif i in bound or arg.untyped_storage().data_ptr() in self._unit.at:
                step.bound.append((i, arg.data_ptr()))
            elif (part := distinct(arg)) is None:
                why = why or "elements of an argument share memory"
            else:
                block = statics[i] = self._static(arg)
                given[i] = block.pattern(View.of(arg)).data
                step.copied.append(Copied(i, View.of(arg), block, block.owned(part), part))
        for copied in step.copied:
            copied.static.copy_(part_of(args[copied.index], copied.part).detach())
        check = GraphCheck(given, self._device) if self._checks else None
        if why is None:
            try:
                step.graph, outputs = self._capture.capture(run, list(given))
            except Exception as error:  # anything that the code cannot do inside a capture
                why = f"it cannot be captured: {error}"
                if not isinstance(error, torch.OutOfMemoryError):
                    self._refused[id(run)] = run, why
                self._mode, self._fresh = Mode.PLAIN, False
                for i in empty:
                    args[i].untyped_storage().resize_(0)
        if step.graph is None:
            assert why is not None
            return self._without_graph(run, args, why)
        step.graph.replay()
        self.launched += 1
        if check is not None:
            self.difference = max(self.difference, check.difference(run, [*outputs, *given]))
        for i in empty:
            if (storage := given[i].untyped_storage()).nbytes():  # else the code does not use it
                self._hand_out(block := Block(storage))
                step.filled.append((i, block.pattern(View.of(given[i]))))
        outputs = list(outputs)
        made: dict[int, Block] = {}
        for i, output in enumerate(outputs):
            self._note_output(step, i, output, given, statics, made)
        args.clear()
        return outputs

    def _without_graph(self, run: Run, args: list[Any], why: str) -> Any:
        self._note(why)
        self.plain += 1
        return run(args)

    def _static(self, arg: Tensor) -> Block:
        """Where an argument is copied to. One tensor that several calls have is copied once."""
        known = self._sources.get(id(arg))
        if known is not None and known[1] == stamp(arg):
            return known[2]
        assert self._unit is not None
        span = 1 + sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
        span = int(arg.storage_offset()) + span if arg.numel() else 0
        memory = torch.empty(span, dtype=arg.dtype, device=arg.device)
        block = Block(memory.untyped_storage(), owner=memory)
        self._sources[id(arg)] = arg, stamp(arg), block
        self._hand_out(block)
        return block

    def _note_output(
        self,
        step: Execution,
        index: int,
        output: Any,
        given: Sequence[Any],
        statics: dict[int, Block],
        made: dict[int, Block],
    ) -> None:
        """Notes how a replay makes this output. `statics`: of copied arguments; `made`: what is new, by address."""
        if not isinstance(output, Tensor) or output.device.type != self._device.type or not output.numel():
            step.outputs.append(output)
            return
        step.outputs.append(None)
        view, storage = View.of(output), output.untyped_storage()
        block = made.get(storage.data_ptr())
        for i, arg in enumerate(given):
            if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == storage._cdata:
                block = statics.get(i)
                if block is None:
                    within = replace(view, offset=view.offset - int(arg.storage_offset()))
                    step.given.append((index, i, None if arg is output else within))
                    return
                break
        if block is None:
            block = made[storage.data_ptr()] = Block(storage)
            self._hand_out(block)
        step.new.append((index, block.pattern(view)))
