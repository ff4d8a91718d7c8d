"""A sampler with one position for all ranks, so that a run that stopped continues with any number of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.utils.data import DataLoader, Sampler

from zeroweave.errors import CheckpointError, ConfigError, EngineError, first_problem

Batch = TypeVar("Batch")


class _State(BaseModel):
    """A position."""

    model_config = ConfigDict(strict=True, extra="forbid")

    epoch: int
    position: Annotated[int, Field(ge=0)]
    seed: int
    samples: Annotated[int, Field(ge=0)]
    order: str | None


class GlobalBatchSampler(Sampler[list[int]]):
    """This rank's batches of indices into a dataset that all ranks go through together.

    Each epoch is an order of all samples, equal on all ranks. The next `batch_size * world` of them are a global
    batch, of which each rank has `batch_size` neighbours. The position is that of the first sample that the training
    loop has not been given, so it means the same for any number of ranks. It moves in `counted`, not here: a
    DataLoader with workers takes batches from its sampler long before the loop sees them.

    `dataset`: the dataset, or its length. `rank`, `world`: by default those of the process group, or of the environment
    before there is one. `shuffle`: the order follows from `seed` and the epoch, else it is the dataset's.

    At the end of an epoch less than a global batch may be left. With `drop_last` it is left out, otherwise the ranks
    share it equally; where that does not come out even, the first samples of the epoch are given once more.

    To be used as `DataLoader(dataset, batch_sampler=sampler)`, or as `DataLoader(dataset, sampler=sampler,
    batch_size=None)` for datasets that take a list of indices.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        rank: int | None = None,
        world: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        own = _own_place()
        self.rank, self.world = own[0] if rank is None else rank, own[1] if world is None else world
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {batch_size}")
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"there is no rank {self.rank} among {self.world} ranks")
        self._samples = dataset if isinstance(dataset, int) else len(dataset)
        self._batch, self._all = batch_size, batch_size * self.world
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._epoch = self._position = 0
        self._known: tuple[tuple[int, int], torch.Tensor, str | None] | None = None
        """a seed and an epoch, the order of that, and the hash of it if it is shuffled"""
        self._loop: object | None = None
        """identifies the loop that is under way"""
        self._uncounted = False
        """true if batches were handed out outside of `counted`"""

    @property
    def epoch(self) -> int:
        """That of the next sample."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of the epoch all ranks together have been given."""
        return self._position

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        rest = 0 if self._drop_last else self._all - 1
        return (self._samples + rest) // self._all

    def set_epoch(self, epoch: int) -> None:
        """Moves to the start of another epoch; in the present one it stays where it is.

        Not needed where loops are `counted`, whose end is the start of the next epoch.
        """
        if epoch != self._epoch:
            self._epoch, self._position, self._loop = epoch, 0, None

    def __iter__(self) -> Iterator[list[int]]:
        """The batches from the position to the end of the epoch."""
        self._uncounted = self._uncounted or self._loop is None
        order, places = self._order(self._seed, self._epoch)[0], [self._position, *self._ends(self._position)]
        return (self._cut(order, begin, end) for begin, end in pairwise(places))

    def counted(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of a loader that takes its indices from here. The position moves as the loop is given them.

        From the position to the end of the epoch; then the next epoch begins. Where the loop is left earlier, the next
        one continues after the last batch. What comes out of `loader` must be one item for each batch, in order.

        A DataLoader draws a seed for its workers from PyTorch's random numbers when it begins. Here it gets one that
        follows from the sampler's seed and the position, so that a resumed run draws no number more than another.
        """
        self._refuse(loader)
        loop = self._loop = object()
        try:
            ends = self._ends(self._position)
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(_mixed(f"workers/{self._position}", self._seed, self._epoch))
                batches = iter(loader)
            for batch in batches:
                if self._loop is not loop:
                    raise EngineError("[ZW609] the sampler was moved while a loop went through it: begin a new loop")
                if (end := next(ends, None)) is None:
                    raise EngineError(
                        "[ZW609] the loader gives more batches than its sampler: does it use another one?"
                    )
                self._position = end
                yield batch
            if self._loop is loop:
                if next(ends, None) is not None:
                    raise EngineError(
                        "[ZW609] the loader gives fewer batches than its sampler: does it use another one?"
                    )
                self._epoch, self._position = self._epoch + 1, 0
        finally:
            if self._loop is loop:
                self._loop = None

    # ------------------------------------------------------------------ checkpoints
    def state_dict(self) -> dict[str, Any]:
        """The position, for `engine.save(…, data=sampler)`. EngineError where batches were handed out uncounted."""
        if self._uncounted:
            raise EngineError(
                "[ZW609] a loader took batches from this sampler, and nobody counted which of them the loop was given: "
                "write `for batch in sampler.counted(loader)`"
            )
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self._seed,
            "samples": self._samples,
            "order": self._order(self._seed, self._epoch)[1],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position of a run with any number of ranks, and continues with its seed.

        With another global batch size the samples come in the same order, none twice and none left out, and are cut
        into other batches. CheckpointError, which changes nothing, where the state is of other data.
        """
        try:
            _State.model_validate(state)
        except ValidationError as error:
            problem = first_problem(error)
            raise CheckpointError(f"[ZW609] this is no position of a {type(self).__name__}: {problem}") from None
        if state["samples"] != self._samples:
            raise CheckpointError(
                f"[ZW609] the position is one in a dataset of {state['samples']} samples, and this one has "
                f"{self._samples}"
            )
        if state["position"] > self._samples:
            raise CheckpointError(
                f"[ZW609] the position {state['position']} lies behind the last of {self._samples} samples"
            )
        if (state["order"] is not None) != self._shuffle:
            raise CheckpointError(f"[ZW609] the position is one of a sampler with shuffle={not self._shuffle}")
        if self._order(state["seed"], state["epoch"])[1] != state["order"]:
            raise CheckpointError(
                f"[ZW609] the samples of epoch {state['epoch']} cannot be brought into the order that they had: it was "
                "made by another version of PyTorch"
            )
        self._epoch, self._position, self._seed = state["epoch"], state["position"], state["seed"]
        self._loop, self._uncounted = None, False

    # ------------------------------------------------------------------ inside
    def _ends(self, position: int) -> Iterator[int]:
        """The positions after each of the global batches to come."""
        yield from range(position + self._all, self._samples + 1, self._all)
        if (self._samples - position) % self._all and not self._drop_last:
            yield self._samples

    def _cut(self, order: torch.Tensor, begin: int, end: int) -> list[int]:
        """This rank's of the samples at these places."""
        mine = -(-(end - begin) // self.world)
        places = torch.arange(begin + self.rank * mine, begin + (self.rank + 1) * mine, device="cpu")
        surplus = places >= end
        places[surplus] = (places[surplus] - end) % self._samples
        indices: list[int] = order[places].tolist()
        return indices

    def _order(self, seed: int, epoch: int) -> tuple[torch.Tensor, str | None]:
        """All indices in the order of an epoch, and the hash of them if they are shuffled."""
        if self._known is None or self._known[0] != (seed, epoch):
            order, digest = torch.arange(self._samples, device="cpu"), None
            if self._shuffle:
                generator = torch.Generator().manual_seed(_mixed("order", seed, epoch))
                order = torch.randperm(self._samples, generator=generator, device="cpu")
                digest = xxhash.xxh3_128_hexdigest(order.numpy().data)
            self._known = (seed, epoch), order, digest
        return self._known[1:]

    def _refuse(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, DataLoader):
            return
        if self is not (loader.sampler if loader.batch_size is None else None) and self is not loader.batch_sampler:
            raise EngineError(
                "[ZW609] the DataLoader does not take its batches from this sampler: DataLoader(dataset, "
                "batch_sampler=sampler)"
            )
        if not loader.in_order:
            raise EngineError(
                "[ZW609] a DataLoader with in_order=False gives batches in an order that no position tells"
            )


def _mixed(what: str, seed: int, epoch: int) -> int:
    """A seed that no other epoch, no other seed and nothing else has in common with it."""
    return xxhash.xxh3_64_intdigest(f"{what}/{seed}/{epoch}".encode())


def _own_place() -> tuple[int, int]:
    """Rank and world."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
