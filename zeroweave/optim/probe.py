"""Is an optimizer element-wise? Copies of it are tried out: one on small whole tensors, others on fragments of these.

    whole    its groups hold stand-ins, which have as many dimensions as the user's parameters and are no larger
    ranks    one copy for each of three: its groups hold that rank's fragments of the same stand-ins, as the engine's do

After each of some steps the fragments have to be what lies at their place in the stand-ins. A copy is made without the
constructor, which nobody knows here: its attributes are copied, with stand-ins for parameters wherever these occur.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from zeroweave._torch.optimizers import step_unheard, without_hooks
from zeroweave.optim.modes import modes_of
from zeroweave.optim.options import set_options
from zeroweave.optim.states import is_cut, uncuttable
from zeroweave.ranks.start import local_gpu

_CAPS: Final[Mapping[int, tuple[int, ...]]] = {1: (521,), 2: (131, 129)}
"""Most elements of each dimension: above the sizes from which optimizers treat parameters as large."""
_CAP: Final = (17, 7, 5, 3)
"""of three dimensions and more; the rest has 2"""
_CUTS: Final = ((0.37, 0.71), (0.0, 1.0), (0.0, 0.53), (0.61, 1.0))
"""Where parameters are cut between three ranks, in turn: fragments may be empty."""
_SCALES: Final = (1.0, 1.0, 0.03, 30.0, 1.0, 1.0, 1e3, 1e-3, 1.0, 0.3, 3.0, 1.0)
"""Of the gradients of each step."""
_LR: Final = 0.01
_INSTEAD: Final = "use AdamW, Adam or SGD"
_WHOLE: Final = "zeroweave.WholeMatrices(optimizer) if it updates each parameter by itself"


class _Attempt(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    relative: float
    """How far fragments may be off: of the mean and of the element's own change since the beginning."""
    rounding: float
    """and of the value"""


class _CannotProbe(Exception):
    """A copy cannot be made, or does not run."""


@dataclass(frozen=True)
class _StandIn:
    """Stands for `users` of one group: parameters of the model that are alike."""

    users: Sequence[torch.Tensor]
    start: torch.Tensor
    """[shape] the values before the first step"""
    gradients: Sequence[torch.Tensor | None]
    """[shape] of each step"""
    cuts: tuple[int, int]

    def fragment(self, rank: int) -> slice:
        return slice((0, *self.cuts)[rank], (*self.cuts, self.start.numel())[rank])


_Group = tuple[int, dict[str, Any], list[_StandIn]]
"""A group's index, the group, and what stands for its parameters."""


def probe(optimizer: torch.optim.Optimizer) -> list[str]:
    """Why `optimizer` cannot run on fragments, in words; nothing if it can.

    Nothing of the program changes: not the optimizer, its groups, state and hooks, nor random numbers. Local, and the
    same on all ranks. What it cannot see: thresholds far above the sizes that it tries, what begins after its steps,
    options that change later, hooks. No hook is called, but those for all optimizers if a step calls an inherited one.
    """
    cpu = torch.device("cpu")
    attempts = [_Attempt(cpu, torch.float64, 1e-6, 1e-12), _Attempt(cpu, torch.float32, 1e-3, 1e-5)]
    if torch.cuda.is_available():  # there are optimizers that only have kernels for it
        attempts += [attempt._replace(device=local_gpu()) for attempt in attempts]
    reasons = []
    for attempt in attempts:
        try:
            with _aside(attempt.device):
                return _try_out(optimizer, attempt)
        except _CannotProbe as error:
            reasons.append(str(error))
    return [f"it cannot be found out whether it is element-wise: {reasons[0]}; {_INSTEAD}"]


def try_out(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    options: Mapping[str, Any],
    state: Mapping[str, Any],
    dtype: torch.dtype,
) -> str:
    """Why a step of a copy fails for a fragment of this group with such options and such a state; "" if it does not.

    Where a copy fails without them, too, the reason is another one: "". The copy's step runs here, so `optimizer` must
    be of a class whose step changes nothing else.
    """

    def failure(options: Mapping[str, Any], state: Mapping[str, Any]) -> str:
        part = nn.Parameter(torch.ones(4, dtype=dtype, device="cpu"))
        part.grad = torch.ones_like(part)
        with _aside(part.device):
            try:
                held = defaultdict(dict, {part: copy.deepcopy(dict(state))} if state else {})
                memo = {id(group["params"]): [part], id(optimizer.state): held}
                twin = _copied(optimizer, [dict(group)], memo)
                set_options(twin.param_groups[0], options)
                twin.param_groups[0].update({"capturable": False} if "capturable" in group else {})
                step_unheard(twin)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return ""

    return "" if failure({}, {}) else failure(options, state)


def kept_of_wholes(optimizer: torch.optim.Optimizer) -> list[str]:
    """What `optimizer` keeps of whole parameters that cannot be cut into fragments, in words, as some steps show.

    Nothing where a copy of it cannot be tried out. Changes as little as `probe`, and is local as that.
    """
    attempt = _Attempt(torch.device("cpu"), torch.float32, 0.0, 0.0)
    try:
        with _aside(attempt.device):
            whole = _Copy(optimizer, _groups(optimizer, attempt), attempt, None)
            for step in range(3):
                whole.step(step)
    except _CannotProbe:
        return []
    return uncuttable(whole.state, {id(p): "a parameter" for held in whole.held for p in held})


def _try_out(optimizer: torch.optim.Optimizer, attempt: _Attempt) -> list[str]:
    groups = _groups(optimizer, attempt)
    whole = _Copy(optimizer, groups, attempt, None)
    ranks = [_Copy(optimizer, groups, attempt, rank) for rank in range(3)]
    before = _random_state(attempt.device)
    for step in range(len(_SCALES)):
        whole.step(step)
        if _random_state(attempt.device) != before:
            return [f"it draws random numbers, and would draw others for the part that a rank holds; {_INSTEAD}"]
        for number, one in enumerate(ranks):
            try:
                one.step(step)
            except _CannotProbe as error:
                return [
                    f"it does not run on parts of parameters, which is what a rank holds: {error}; {_INSTEAD}, or "
                    f"{_WHOLE}"
                ]
            if (found := _differing(groups, whole, one, number, attempt)) is not None:
                return [
                    "it is not element-wise: a step on a part of a parameter differs from that part of a step on the "
                    f"whole (found with {found}), and parts are what a rank holds; {_INSTEAD}, or {_WHOLE}"
                ]
    for (index, _, stand_ins), wholes in zip(groups, whole.held, strict=True):
        if not all(torch.isfinite(p).all() for p in wholes):
            raise _CannotProbe(f"its steps on small tensors in place of param_groups[{index}] give no finite numbers")
        if all(torch.equal(p, s.start) for p, s in zip(wholes, stand_ins, strict=True)):
            raise _CannotProbe(
                f"{len(_SCALES)} steps on small tensors in place of the parameters of param_groups[{index}] change "
                "nothing (leave out of it what is not to be trained)"
            )
    return []


def _differing(groups: Sequence[_Group], whole: _Copy, one: _Copy, rank: int, attempt: _Attempt) -> str | None:
    """A stand-in of which the rank's fragment is not what lies at its place in the whole, in words."""
    for (index, _, stand_ins), wholes, fragments in zip(groups, whole.held, one.held, strict=True):
        for stand_in, parameter, fragment in zip(stand_ins, wholes, fragments, strict=True):
            place = stand_in.fragment(rank)
            expected, start = parameter.detach().reshape(-1)[place], stand_in.start.reshape(-1)[place]
            if not _close(fragment.detach(), expected, start, attempt):
                return f"a tensor {list(parameter.shape)} in place of a parameter of param_groups[{index}]"
    return None


def _close(fragment: torch.Tensor, expected: torch.Tensor, start: torch.Tensor, attempt: _Attempt) -> bool:
    if torch.equal(fragment, expected):
        return True
    moved = (expected - start).abs()
    bound = attempt.relative * (moved + moved.mean()) + attempt.rounding * (expected.abs() + start.abs())
    return bool((((fragment - expected).abs() <= bound) | (fragment.isnan() & expected.isnan())).all())


# ---------------------------------------------------------------------- what it is tried out on
def _groups(optimizer: torch.optim.Optimizer, attempt: _Attempt) -> list[_Group]:
    """One of each kind of groups, with stand-ins for what it holds. Options that are numbers count as zero or not."""
    generator = torch.Generator().manual_seed(0)
    groups: dict[Any, _Group] = {}
    turn = 0
    for index, group in enumerate(optimizer.param_groups):
        alike: dict[Any, list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.numel():
                alike[parameter.ndim, tuple(sorted(vars(parameter)))].append(parameter)
        options = [(key, _kind(value)) for key, value in group.items() if key not in ("params", "param_names")]
        kind = tuple(sorted(alike)), tuple(options)
        if not alike or kind in groups:
            continue
        stand_ins = []
        for users in alike.values():
            for shape in _shapes(users):
                stand_ins.append(_stand_in(users, shape, turn, generator, attempt))
                turn += 1
        groups[kind] = index, group, stand_ins
    return list(groups.values())


def _kind(value: Any) -> Any:
    if isinstance(value, bool | str | None):
        return value
    if isinstance(value, int | float):
        return value == 0
    if isinstance(value, list | tuple):
        return tuple(map(_kind, value))
    return type(value)


def _shapes(users: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Of a large one and of a small one; two at least, so that one is cut and one is not."""
    users = sorted(users, key=torch.Tensor.numel)
    shapes = []
    for user in (users[-1], users[0]):
        caps = _CAPS.get(user.ndim, (*_CAP, *[2] * user.ndim))
        shapes.append(tuple(min(size, cap) for size, cap in zip(user.shape, caps, strict=False)))
    return shapes


def _stand_in(
    users: Sequence[torch.Tensor], shape: tuple[int, ...], turn: int, generator: torch.Generator, attempt: _Attempt
) -> _StandIn:
    """Gradients grow a thousandfold along the tensor, so that whoever looks beyond a fragment sees something else."""

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    start = draw()
    growth = torch.logspace(-1.5, 1.5, start.numel(), dtype=torch.float64, device="cpu").view(shape)
    gradients = [
        None if turn % 3 == 2 and step % 4 == 0 else (draw() * growth * scale).to(attempt.device, attempt.dtype)
        for step, scale in enumerate(_SCALES)
    ]
    first, second = (round(start.numel() * cut) for cut in _CUTS[turn % len(_CUTS)])
    return _StandIn(users, start.to(attempt.device, attempt.dtype), gradients, (first, second))


# ---------------------------------------------------------------------- copies
class _Copy:
    """A copy of an optimizer over stand-ins; or, with a `rank`, over that rank's fragments of them.

    `held`: by group, what its groups hold. References to parameters elsewhere are then to tensors that never change,
    as to parameters at rest. Attributes of parameters are those of whole ones only, as in the engine.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[_Group], attempt: _Attempt, rank: int | None
    ) -> None:
        self._groups, self._rank = groups, rank
        self.held: list[list[nn.Parameter]] = []
        memo: dict[int, Any] = {}
        state: dict[Any, Any] = defaultdict(dict)
        with torch.no_grad():
            for _, group, stand_ins in groups:
                self.held.append([])
                for number, one in enumerate(stand_ins):
                    user = one.users[min(number, len(one.users) - 1)]
                    whole = nn.Parameter(one.start.clone())
                    vars(whole).update(vars(user))
                    part = whole if rank is None else nn.Parameter(one.start.reshape(-1)[one.fragment(rank)].clone())
                    memo.update((id(each), whole) for each in one.users if number == 0 or each is user)
                    self.held[-1].append(part)
                    if part.numel() and (held := optimizer.state.get(user)):
                        state[part] = _state(optimizer, user, held, part)
                memo[id(group["params"])] = self.held[-1]
        for each in (p for group in optimizer.param_groups for p in group["params"]):
            if id(each) not in memo:
                memo[id(each)] = nn.Parameter(torch.zeros([1] * each.ndim, device="cpu"))  # nothing large is copied
        memo[id(optimizer.state)] = state
        self._optimizer = _copied(optimizer, [group for _, group, _ in groups], memo)
        for group in self._optimizer.param_groups:
            if isinstance(lr := group.get("lr"), torch.Tensor):
                group["lr"] = torch.full_like(lr, _LR)
            elif lr is not None:
                group["lr"] = _LR  # one of 0, as schedulers begin with, would hide everything
            if "capturable" in group:
                group["capturable"] = attempt.device.type != "cpu" and group["capturable"]

    @property
    def state(self) -> Mapping[Any, Any]:
        return self._optimizer.state

    def step(self, number: int) -> None:
        """One step. _CannotProbe if it fails."""
        for (_, _, stand_ins), held in zip(self._groups, self.held, strict=True):
            for one, parameter in zip(stand_ins, held, strict=True):
                gradient = one.gradients[number]
                if gradient is not None and self._rank is not None:
                    gradient = gradient.reshape(-1)[one.fragment(self._rank)]
                parameter.grad = None if gradient is None or not parameter.numel() else gradient.clone()
        try:
            self._enter("train")
            step_unheard(self._optimizer)
            self._enter("eval")
        except Exception as error:
            raise _CannotProbe(f"a step of a copy of it fails ({type(error).__name__}: {error})") from error

    def _enter(self, mode: str) -> None:
        if mode in modes_of(self._optimizer):
            getattr(self._optimizer, mode)()


def _state(
    optimizer: torch.optim.Optimizer, user: torch.Tensor, held: Mapping[str, Any], part: torch.Tensor
) -> dict[str, Any]:
    """State like that of `user`, for another shape."""
    state: dict[str, Any] = {}
    for key, value in held.items():
        if is_cut(user, key, value, optimizer.state.items()):
            like = value.reshape(-1)[:64].double().mean().nan_to_num()
            dtype = part.dtype if value.dtype == user.dtype else value.dtype
            state[key] = torch.full_like(part, float(like), dtype=dtype, requires_grad=False)
        else:
            state[key] = copy.deepcopy(value)
    return state


def _copied(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]] | None, memo: dict[int, Any]
) -> torch.optim.Optimizer:
    """A copy without hooks, by way of `memo`, with these `groups` (None: all). Optimizers inside it are copied, too."""
    twin = memo[id(optimizer)] = type(optimizer).__new__(type(optimizer))
    if groups is not None:
        copies = memo[id(optimizer.param_groups)] = []
        for group in groups:
            copies.append({})
            memo[id(group)] = copies[-1]
        for group, copied in zip(groups, copies, strict=True):
            copied.update({key: _deep(value, memo, f"param_groups' {key!r}") for key, value in group.items()})
    attributes = {}
    for name, value in without_hooks(optimizer).items():
        if isinstance(value, torch.optim.Optimizer) and id(value) not in memo:
            attributes[name] = _copied(value, None, memo)
        else:
            attributes[name] = _deep(value, memo, f"attribute {name!r}")
    torch.optim.Optimizer.__setstate__(twin, attributes)
    return twin


def _deep(value: Any, memo: dict[int, Any], name: str) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise _CannotProbe(f"its {name} cannot be copied ({type(error).__name__}: {error})") from error


# ---------------------------------------------------------------------- aside
@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """Inside, random numbers and warnings are nobody's, and what is compiled runs as it is written."""
    with ExitStack() as scopes:
        if device.type == "cuda":
            scopes.enter_context(torch.cuda.device(device))
        scopes.callback(random.setstate, random.getstate())
        scopes.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else ()))
        scopes.enter_context(warnings.catch_warnings(action="ignore"))
        scopes.enter_context(torch.compiler.set_stance("force_eager"))
        scopes.enter_context(torch.enable_grad())
        yield


def _random_state(device: torch.device) -> list[Any]:
    on_device = [torch.cuda.get_rng_state(device).tolist()] if device.type == "cuda" else []
    return [random.getstate(), torch.get_rng_state().tolist(), *on_device]
