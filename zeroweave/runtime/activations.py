"""Activations saved for backwards: they are freed before the optimizer allocates, and may live in host memory.

What forward calls save leaves the device, and returns before a backward needs it.

The content of storages moves. The tensors that autograd keeps stay unchanged, with their shapes, strides, versions,
views and overlaps; meanwhile their storage has no bytes. Only storages that autograd alone can read are moved, so that
no other code can write them after they were copied. A storage that the program holds as well waits for the end of
later calls, and stays if the program never drops it.

    on the device ── Offload ──> leaving ── Release ──> away ── Reload ──> arriving ── first use ──> on the device

A storage that is needed before the schedule brings it back (in a departed step, by another graph) comes on demand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from zeroweave._torch.storages import storage_key
from zeroweave.comm.ledger import Gauge
from zeroweave.runtime.copies import CopyStream
from zeroweave.runtime.storages import Group, Home, Saved, count, free_storages, unshared
from zeroweave.runtime.timeline import Timeline
from zeroweave.schedule import Call, Instruction, Needed, Offload, Release, Reload


class Offloading:
    """Moves storages of `threshold` bytes and more between the device of `copies` and host memory.

    A call's activations are what is saved from the end of the call before it up to its own end, including the input
    that a checkpoint around the call saves. `note` is called when a backward first asks for a call's activations.
    """

    def __init__(self, threshold: int, copies: CopyStream, note: Callable[[Needed], object]) -> None:
        self._threshold, self._copies, self._note = threshold, copies, note
        self._homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
        self._fresh: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._groups: dict[tuple[Call, int], Group] = {}
        self._held: weakref.WeakSet[Home] = weakref.WeakSet()
        """storages that are wanted in host memory, and could not be moved so far"""
        # Storages are kept while they are copied: one that is freed could be used again at once.
        self._leaving: dict[Group, tuple[list[tuple[Home, torch.UntypedStorage]], Any]] = {}
        self._arriving: dict[Home, torch.UntypedStorage] = {}
        self.host = Gauge()
        """bytes in host memory"""
        self.away = Gauge()
        """those of them that are not on the device"""
        self.moved = self.moved_before = 0
        """bytes moved out in this window, and in the one before"""
        self.on_demand = 0
        """storages that no schedule had brought back in time"""

    # ------------------------------------------------------------------ what is saved
    def add(self, saved: Saved) -> None:
        """A tensor was saved; it moves if its storage can."""
        tensor = saved.tensor
        if not self._copies.moves(tensor):
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._threshold or not storage.nbytes() or not storage.resizable():
            return
        key = storage_key(tensor)
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = Home(storage.nbytes())
        saved.lies_in(home)
        self._fresh.add(saved)

    def begin_forward(self) -> None:
        """What was saved after the last call of the forward before belongs to no call."""
        self._fresh = weakref.WeakSet()

    def end_call(self, call: Call, number: int) -> None:
        """A forward call is over, the `number`-th of the window's equal ones."""
        if not self._fresh:
            return
        group = self._groups[call, number] = Group(call, number, self._fresh)
        for saved in group.saved:
            saved.belongs_to(group)
        self._fresh = weakref.WeakSet()

    def use(self, saved: Saved) -> None:
        """A backward reads a saved tensor now."""
        if saved.group is not None and not saved.group.needed:
            self._note_needed(saved.group)
        home = saved.home
        if home is None:
            return
        if home.away:
            self.on_demand += 1
            self._bring_back([home], nullcontext())
        home.stays()  # if it is leaving
        if home in self._arriving:
            self._copies.wait(home.mark)
            del self._arriving[home]

    def _note_needed(self, group: Group) -> None:
        nbytes = sum(h.nbytes for h in group.homes() if h.group is group and (h.host is not None or self._is_free(h)))
        group.ask_for()
        if self._groups.get((group.call, group.number)) is group:  # not of an earlier window
            self._note(Needed(group.call, group.number, nbytes))

    @staticmethod
    def _is_free(home: Home) -> bool:
        """True if the storage has been saved for calls only, and no other code can read it."""
        return all(s.group is not None for s in home.saved) and bool(unshared(home.tensors(), held=1))

    # ------------------------------------------------------------------ instructions
    def move(self, instruction: Offload | Release | Reload, timeline: Timeline | None) -> None:
        """Executes an instruction; does nothing for a call that has saved nothing in this window.

        `timeline`: where the times of copies are noted.
        """
        group = self._groups.get((instruction.call, instruction.number))
        if group is None:
            return
        match instruction:
            case Offload():
                group.send_out()
                self._held.update(group.homes())
                homes = [home for home in self._held if home.host is None and self._is_wanted_out(home)]
                homes = [home for home in homes if self._is_free(home)]
                self._leaving[group] = self._copy_out(homes, self._timed(instruction, homes, timeline))
            case Release():
                self._release(group)
            case Reload():
                group.bring_back()
                homes = [home for home in group.homes() if home.away]
                self._bring_back(homes, self._timed(instruction, homes, timeline))

    @staticmethod
    def _timed(instruction: Instruction, homes: list[Home], timeline: Timeline | None) -> AbstractContextManager[None]:
        nbytes = sum(home.nbytes for home in homes)
        return nullcontext() if timeline is None or not homes else timeline.copying(instruction, nbytes)

    @staticmethod
    def _is_wanted_out(home: Home) -> bool:
        """True if all calls that have saved it want it out."""
        return all(s.group is not None and s.group.out for s in home.saved)

    def _copy_out(
        self, homes: list[Home], timing: AbstractContextManager[None]
    ) -> tuple[list[tuple[Home, torch.UntypedStorage]], Any]:
        leaving: list[tuple[Home, torch.UntypedStorage]] = []
        with self._copies.issue(), timing:
            for home in homes:
                self._held.discard(home)
                copy = self._copies.empty(home.nbytes)
                count(copy, self.host)
                home.leaves(copy)
                self._copies.copy(copy, _bytes(home.storage))
                leaving.append((home, home.storage))
        return leaving, self._copies.mark()

    def _release(self, group: Group) -> None:
        leaving, mark = self._leaving.pop(group, ([], None))
        self._copies.wait(mark)
        homes = [home for home, _ in leaving if home.host is not None]
        del leaving  # which holds the storages as well
        for home in homes:
            if self._is_wanted_out(home) and free_storages(home.tensors(), threshold=0, held=1):
                home.gone(self.away)
                self.moved += home.nbytes
            else:  # it was dropped, or other code holds it by now, or it is to come back already
                home.stays()

    def _bring_back(self, homes: list[Home], timing: AbstractContextManager[None]) -> None:
        coming = []
        for home in homes:
            storage = home.storage
            storage.resize_(home.nbytes)
            coming.append((home, storage))
        with self._copies.issue(), timing:
            for home, storage in coming:
                assert home.host is not None
                self._copies.copy(_bytes(storage), home.host)
        mark = self._copies.mark()
        for home, storage in coming:
            home.returns(mark)
            self._arriving[home] = storage

    def arrive(self) -> None:
        """All that is on its way back is there for all work that is issued from now on."""
        for home in self._arriving:
            self._copies.wait(home.mark)
        self._arriving.clear()

    def settle(self) -> None:
        """Ends all copies under way: what is leaving stays."""
        self.arrive()
        for leaving, mark in self._leaving.values():
            self._copies.wait(mark)
            for home, _ in leaving:
                home.stays()
        self._leaving.clear()
        self._held.clear()

    def next_window(self) -> None:
        """A window begins. Activations that graphs of earlier windows keep come back on demand."""
        self.settle()
        self._groups.clear()
        self._fresh = weakref.WeakSet()
        self.moved, self.moved_before = 0, self.moved


class Activations:
    """The saved activations, as long as autograd keeps them.

    Those of `threshold` bytes and more can be freed; None: of no size. `offloading` moves them; None: nothing does.
    """

    def __init__(self, threshold: int | None, offloading: Offloading | None = None) -> None:
        self._threshold = threshold
        self.offloading = offloading
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self.freed = 0
        """bytes, over the engine's life"""

    @property
    def moves(self) -> bool:
        """True if some may be freed early, or live in host memory for a time."""
        return self._threshold is not None or self.offloading is not None

    def save(self, tensor: torch.Tensor, version: int) -> Saved:
        """The object that autograd keeps in the place of a tensor at this version."""
        saved = Saved(tensor, version)
        if self._threshold is not None and tensor.untyped_storage().nbytes() >= self._threshold:
            self._saved.add(saved)
        if self.offloading is not None:
            self.offloading.add(saved)
        return saved

    def begin_forward(self) -> None:
        """An outermost forward begins."""
        if self.offloading is not None:
            self.offloading.begin_forward()

    def end_call(self, call: Call, number: int) -> None:
        """A forward call is over, the `number`-th of the window's equal ones."""
        if self.offloading is not None:
            self.offloading.end_call(call, number)

    def use(self, saved: Saved) -> torch.Tensor:
        """The tensor, whose values a backward may read from now on."""
        if self.offloading is not None:
            self.offloading.use(saved)
        return saved.tensor

    def free(self) -> None:
        """Frees what is still kept, except for memory that other code can read; its backward is refused."""
        if self.offloading is not None:
            self.offloading.settle()
        tensors = [saved.take() for saved in self._saved]
        self._saved.clear()
        self.freed += free_storages(tensors, threshold=0)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [bytes]: all of a storage. A write to it is no write to the tensors that view it."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
