"""The engine's methods that read and write values: of one parameter, or of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch
from torch import nn

from zeroweave.config import Config
from zeroweave.eager.access import Shown
from zeroweave.engine import state_dict as state
from zeroweave.engine import written
from zeroweave.engine.calls import Calls
from zeroweave.engine.guard import Agreements, Guard
from zeroweave.engine.parts import Opened, Parts
from zeroweave.engine.window import Windows
from zeroweave.errors import AgreementError, EngineError, RankFailure
from zeroweave.layout import Fragment
from zeroweave.optim.scaler import Scaler
from zeroweave.optim.step import ShardedOptimizer
from zeroweave.runtime.bucket import Bucket
from zeroweave.runtime.runtime import Runtime


class Accessors(Windows):
    """A part of `Engine`.

    `what` names a value of a parameter: "param", the value itself; "grad", the gradient that `step()` would use; or a
    key of the optimizer's state, such as "exp_avg". All ranks call these methods, in the same order. The name of an
    expert that not all ranks share means this rank's own; "all ranks" are then those that have the same.
    """

    config: Config
    module: nn.Module
    world: int
    _parts: Parts
    _runtime: Runtime
    _guard: Guard
    _agreements: Agreements
    _scaler: Scaler
    _calls: Calls
    _opened: Opened
    _shown: Shown

    # ------------------------------------------------------------------ one parameter
    def full(self, parameter: nn.Parameter | str, what: str = "param") -> torch.Tensor | None:
        """A copy of the whole value, in the parameter's shape, on the engine's device.

        "param" is the float32 master where there is one, "grad" is float32 at least. Values that the optimizer holds
        for a parameter as a whole, such as its step counter, come as they are. None for a gradient that no rank
        has. Costs one gather of the parameter's bucket. EngineError for a parameter that is not the model's and
        for state that the optimizer does not hold.
        """
        with self._guard("full"):
            bucket, slot = self._find(parameter, "full()", what)
            self._guard.meet()
            missing = False
            if what == "param":
                shard = bucket.values()
            elif what == "grad":
                gradient, missing = self._gradient(bucket, slot)
                if gradient is None:
                    return None
                shard = gradient
            else:
                found = self._state(bucket, slot, what)
                if found.whole is not None:
                    return found.whole
                assert found.dtype is not None
                shard = torch.zeros(bucket.shard.numel(), dtype=found.dtype, device=bucket.device)
                if found.mine is not None:
                    bucket.fragment(shard, slot).copy_(found.mine)
            full = state.gather_like(self._runtime, bucket, shard)[slot]  # another group may have what this one misses
            return None if missing else full.clone()

    def set_full(self, parameter: nn.Parameter | str, value: torch.Tensor, what: str = "param") -> None:
        """Replaces a whole value; `value` has the parameter's shape, any dtype, and is the same on all ranks.

        Each rank keeps its part. Parameters change between two optimizer steps' windows only, gradients between the
        boundary's backward and `step()`, optimizer state once the optimizer holds it.
        """
        with self._guard("set_full"):
            bucket, slot = self._find(parameter, "set_full()", what)
            self._guard.meet()
            place = bucket.layout.slots[slot]
            part = None
            self._refuse_other_values(value, bucket, place.name)
            if tuple(value.shape) == place.shape:
                fragment = bucket.layout.fragment(slot, bucket.rank)
                part = value.detach().reshape(-1)[fragment.offset : fragment.offset + fragment.numel]
            self._set(bucket, slot, what, value.detach(), part, place.shape)

    def _refuse_other_values(self, value: torch.Tensor, bucket: Bucket, name: str) -> None:
        """EngineError on all ranks unless all have the same `value` for this parameter. Collective."""
        if self.world == 1:
            return
        mine = written.digest(value.to(bucket.shard.dtype))
        label, groups = f"set_full() of {name!r}", bucket.layout.groups
        if refused := written.differing([(name, groups)], [mine], [True], label, self._parts.control):
            raise EngineError(refused)

    def fragment(self, parameter: nn.Parameter | str) -> Fragment:
        """Which elements of a parameter lie on this rank: `numel` from `offset` on, of the flattened parameter."""
        bucket, slot = self._find(parameter, "fragment()")
        return bucket.layout.fragment(slot, bucket.rank)

    def local(self, parameter: nn.Parameter | str, what: str = "param") -> torch.Tensor | None:
        """A copy of this rank's fragment [numel of the fragment] of what `full` gives."""
        with self._guard("local"):
            bucket, slot = self._find(parameter, "local()", what)
            if what == "param":
                return bucket.fragment(bucket.values(), slot).clone()
            if what == "grad":
                gradient, missing = self._gradient(bucket, slot)
                return None if gradient is None or missing else bucket.fragment(gradient, slot).clone()
            found = self._state(bucket, slot, what)
            if found.whole is not None:
                return found.whole
            if found.mine is None:
                return torch.zeros(0, dtype=found.dtype, device=bucket.device)
            return found.mine.to(bucket.device, copy=True)

    def set_local(self, parameter: nn.Parameter | str, value: torch.Tensor, what: str = "param") -> None:
        """Replaces this rank's fragment; `value` is [numel of the fragment]. Else as `set_full`."""
        with self._guard("set_local"):
            bucket, slot = self._find(parameter, "set_local()", what)
            shape = (bucket.layout.fragment(slot, bucket.rank).numel,)
            part = value.detach() if tuple(value.shape) == shape else None
            self._set(bucket, slot, what, value.detach(), part, shape)

    def _find(self, parameter: nn.Parameter | str, method: str, what: str = "param") -> tuple[Bucket, int]:
        self._refuse_inside(method)
        name = state.name_of(parameter, self.module, self._parts.places)
        bucket_id, slot = self._runtime.directory.places[name]
        bucket = self._runtime.buckets[bucket_id]
        if what != "param" and not bucket.layout.trainable:
            raise EngineError(f"{method}: {name!r} is frozen and has no {what!r}")
        return bucket, slot

    def _gradient(self, bucket: Bucket, slot: int) -> tuple[torch.Tensor | None, bool]:
        """This rank's shard of the gradients of a bucket, and whether no rank has one for the slot. Collective.

        The shard is None where nothing was reduced, then on all ranks.
        """
        self._reduce_rest("reading a gradient")
        self._runtime.gradients.reductions.settle_all()
        missing = state.absent_gradients(self._runtime, self._parts.control)[bucket.id]
        return self._scaler.look(bucket.id), slot in missing

    def _state(self, bucket: Bucket, slot: int, key: str) -> state.Held:
        """What the ranks' optimizers hold of a slot under a key. Collective."""
        optimizer: ShardedOptimizer | None = self._parts.optimizer
        if optimizer is None:
            raise EngineError("the engine has no optimizer, so parameters have no optimizer state")
        held = optimizer.state_of(bucket.id, slot)
        numel = bucket.layout.fragment(slot, bucket.rank).numel
        name = bucket.layout.slots[slot].name
        return state.agree_on_state(name, key, held, numel, self._parts.control, bucket.layout.groups)

    @torch.no_grad()
    def _set(
        self,
        bucket: Bucket,
        slot: int,
        what: str,
        value: torch.Tensor,
        part: torch.Tensor | None,
        shape: tuple[int, ...],
    ) -> None:
        """`part`: what of `value` belongs to this rank; None where its shape is not `shape`."""
        name = bucket.layout.slots[slot].name
        found = None if what in ("param", "grad") else self._state(bucket, slot, what)
        if found is not None and found.whole is not None:
            part, shape = (value, ()) if value.numel() == 1 else (None, ())
        if part is None:
            raise EngineError(f"{what!r} of {name!r} has the shape {list(shape)}, and not {list(value.shape)}")
        if what == "param":
            with self._rewriting(f"writing {name!r}"):
                values = bucket.values()
                bucket.fragment(values, slot).copy_(part)
                bucket.put(values)
                bucket.renew()
        elif what == "grad":
            if not self._parts.status.gradients_pending:
                raise EngineError(f"there is no gradient of {name!r} to be replaced: call it after the backward")
            self._reduce_rest("replacing a gradient")
            self._runtime.gradients.reductions.settle_all()
            self._scaler.write(bucket.id, slot, part)
        else:
            assert found is not None and self._parts.optimizer is not None
            self._parts.optimizer.set_state(bucket.id, slot, what, part)

    # ------------------------------------------------------------------ all of them
    @contextmanager
    def full_parameters(self) -> Iterator[dict[str, nn.Parameter]]:
        """Everything unsharded: inside, the module's parameters are full and may be read and written.

        Yields them by name. What is written is kept at the end: each rank stores its own part of what it finds, so all
        ranks must write the same, bit by bit. Where they do not, EngineError names the parameters, and nothing is kept;
        nor is it when an exception leaves the block. Collective; not inside a forward or backward.
        """
        buckets, control, label = list(self._runtime.buckets.values()), self._parts.control, "full_parameters()"
        with self._guard("full_parameters"):
            if self._runtime.in_session or self._runtime.in_backward:
                raise EngineError("full_parameters() inside a forward or backward: enter it between them")
            self._refuse_inside("full_parameters()")
            self._guard.meet()
            self._opened.close()
            self._opened.open()
            before = written.versions(buckets)
        self._runtime.writable = True
        try:
            yield self._shown.views
            self._runtime.writable = False
            with self._guard("the end of full_parameters", clean=False):
                refused = written.keep(buckets, before, control, label)
            if refused:
                raise EngineError(refused)  # on all ranks, or those that did not raise by themselves
        except Exception:
            if self._runtime.writable and not self._guard.lost:
                with suppress(RankFailure, AgreementError):
                    written.gives_up(label, control)
            raise
        finally:
            self._runtime.writable = False
            written.forget(buckets)
            self._opened.close()
            if self.config.gather_after_step and not self._guard.lost:
                self._opened.open()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All parameters and persistent buffers, full, on the CPU of rank 0, in the model's original dtypes.

        Experts that not all ranks share are there several times: "name@i" is that of the rank at place i of its group.
        Parameters come from the float32 masters. `{}` on the other ranks. Collective.
        """
        with self._guard("state_dict"):
            self._refuse_inside("state_dict()")
            self._guard.meet()
            return state.state_dict(self.module, self._runtime, self._parts)

    def stream_state_dict(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and tensors of `state_dict`, one after the other, for models larger than the host's memory.

        One bucket is full at a time, on the device. All ranks iterate (`for name, tensor in
        engine.stream_state_dict(): …`) and do nothing else with the engine meanwhile; only rank 0 is given anything.
        """
        with self._guard("stream_state_dict"):
            self._refuse_inside("stream_state_dict()")
            self._guard.meet()
        items = state.stream(self.module, self._runtime, self._parts)
        try:
            while True:
                with self._guard("stream_state_dict"):
                    self._refuse_inside("stream_state_dict()")
                    item = next(items, None)
                if item is None:
                    return
                yield item
        finally:
            items.close()

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Takes rank 0's full `state_dict` on all ranks; every parameter and persistent buffer must be there.

        It may be any mapping, such as one that reads tensors from a file when they are asked for: they are, twice, and
        none is kept. Collective; the other ranks' argument is ignored.
        """
        with self._guard("load_state_dict"):
            self._refuse_inside("load_state_dict()")
            self._guard.meet()
            with self._rewriting("load_state_dict()"):
                state.load_state_dict(state_dict, self.module, self._runtime, self._parts)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The reduced gradients that `step()` would use, full, float32, on the CPU of every rank.

        None where no rank had a gradient. To be called between the boundary's backward and `step()`. Collective.
        """
        with self._guard("gradients"):
            self._refuse_inside("gradients()")
            self._guard.meet()
            self._reduce_rest("gradients()")
            return state.full_gradients(self._runtime, self._parts.control, self._scaler.look)

    # ------------------------------------------------------------------ inside
    @contextmanager
    def _rewriting(self, what: str) -> Iterator[None]:
        """Inside, the values of parameters change: between two windows, with nothing gathered."""
        if self._parts.status.gradients_pending:
            raise EngineError(f"{what} while gradients wait: call it after step() or zero_grad()")
        with self._opened.closed():
            self._abort()  # nothing stays gathered with the old values
            yield
            self._rewrite_views()

    def _refuse_inside(self, what: str, profiling: bool = True) -> None:
        if profiling and self._parts.transport.skips:
            raise EngineError(f"{what} inside `with engine.profiling():`, where values mean nothing: leave it first")
        if self._runtime.writable:
            raise EngineError(f"{what} inside `with engine.full_parameters():`, which keeps writes: leave it first")

    def _rewrite_views(self) -> None:
        """Views that user code keeps show new values. Collective."""
        viewed = self._agreements.union("which parameters are viewed", self._runtime.viewed())
        self._runtime.rewrite_views(viewed)

    def _abort(self) -> None:
        raise NotImplementedError
