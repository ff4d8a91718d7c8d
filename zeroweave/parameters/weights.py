"""Where a model's first values come from: itself, safetensors files, the program, or its modules' own initialisation.

A model on the meta device has shapes and no values, and so costs no memory. Its values are made or read bucket by
bucket on their way into the shards, so that no rank ever holds the whole model.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from zeroweave.errors import ParameterError, listed
from zeroweave.notices import warn
from zeroweave.parameters.foreign import names_of, own_parameters

WeightsLike: TypeAlias = str | os.PathLike[str] | Callable[[str, torch.Tensor], Any]
"""A safetensors file, a folder of them, or a function that fills the tensor of a parameter's name."""

_T = TypeVar("_T")
_GIVE: Final = "give zeroweave.initialize `weights`: a safetensors file or folder, or a function that fills a tensor"
INDEX: Final = "model.safetensors.index.json"
"""Which file has which tensor, where there are several."""


class MadeWeights:
    """Whole values, which one rank makes and sends to the others.

    `fill(name, tensor)` writes a parameter's values into a tensor on the CPU; None: the modules do it themselves, as
    `reset_parameters` (PyTorch) and `_init_weights` (transformers) have it, where they have no values.
    """

    def __init__(self, model: nn.Module, fill: Callable[[str, torch.Tensor], Any] | None = None) -> None:
        self._model, self._fill = model, fill
        self._named = own_parameters(model)
        self._owners = {
            id(parameter): module for module in model.modules() for parameter in module._parameters.values()
        }
        self._made: dict[int, torch.Tensor] = {}
        """by `id` of the parameter: what a module has made together with others, and was not asked for yet"""

    def check(self) -> None:
        """ParameterError where a parameter could not be given values."""
        if self._fill is not None:
            return
        without = [name for name, parameter in self._named.items() if parameter.is_meta]
        helpless = [name for name in without if self._reset_of(self._owners[id(self._named[name])]) is None]
        if helpless:
            raise ParameterError(
                f"[ZW207] {', '.join(map(repr, helpless))}: on the meta device, in modules without reset_parameters(); "
                f"{_GIVE}"
            )

    def whole(self, name: str) -> torch.Tensor:
        """A parameter's values, in its shape."""
        parameter = self._named[name]
        if self._fill is not None:
            value = _unset(parameter)
            self._fill(name, value)
        elif not parameter.is_meta:
            return parameter
        else:
            if id(parameter) not in self._made:
                self._reset(self._owners[id(parameter)])
            value = self._made.pop(id(parameter))
        if value.is_floating_point() and value.isnan().any():
            who = "the function `weights`" if self._fill is not None else type(self._owners[id(parameter)]).__name__
            raise ParameterError(f"[ZW207] {who} has left values of {name!r} unset; {_GIVE}")
        return value

    def _reset(self, module: nn.Module) -> None:
        """Makes a copy of the module, with its own memory, initialise itself."""
        named = (p for p in module._parameters.values() if p is not None)
        own = {id(p): nn.Parameter(_unset(p), requires_grad=p.requires_grad) for p in named}
        known = {**own, **{id(child): child for child in module.children()}}  # what the copy does not copy
        reset = self._reset_of(copy.deepcopy(module, known))
        assert reset is not None  # `check`
        reset()
        self._made.update((key, made.detach()) for key, made in own.items())

    def _reset_of(self, module: nn.Module) -> Callable[[], Any] | None:
        """What initialises a module's own parameters."""
        init = getattr(self._model, "_init_weights", None)
        if callable(init):
            return lambda: init(module)
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        return reset if callable(reset) else None


class FileWeights:
    """Values in safetensors files, of which each rank reads what it needs.

    `path`: a file, or a folder with an index or a single file, as Hugging Face has them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._files = _files_of(Path(path))
        """a tensor's name -> its file"""
        self.path = path
        self._keys: dict[str, str] = {}
        """a parameter's canonical name -> the one that the files have"""

    def check(self, model: nn.Module) -> None:
        """ParameterError, which names them, where parameters are missing, or of other shapes. Warns of what is left."""
        names = names_of(model)
        self._keys = {name: key for name, known in names.items() for key in reversed(known) if key in self._files}
        shapes = self._read(self._keys.values(), lambda file, key: tuple(file.get_slice(key).get_shape()))
        missing = [name for name in names if name not in self._keys]
        wrong = [
            f"{name}: {list(shape)} instead of {list(parameter.shape)}"
            for name, parameter in model.named_parameters()
            if name in self._keys and (shape := shapes[self._keys[name]]) != tuple(parameter.shape)
        ]
        refuse_unfit(self.path, missing, wrong)
        warn_of_left(self.path, self._files.keys(), model)

    def part(self, name: str, start: int, numel: int) -> torch.Tensor:
        """Elements `start` to `start + numel` of a flattened parameter, which `check` has found."""
        key = self._keys[name]
        # Opened again for each: a mapped file counts as this process's memory as long as it is open.
        with _opened(self._files[key]) as file:
            lazy = file.get_slice(key)
            shape = lazy.get_shape()
            if len(shape) < 1:
                return file.get_tensor(key).reshape(-1)
            row = math.prod(shape[1:])
            first = start // row
            rows = lazy[first : -(-(start + numel) // row)]
            return rows.reshape(-1).narrow(0, start - first * row, numel)

    def keys(self) -> Iterable[str]:
        """The names of the tensors in the files."""
        return self._files.keys()

    def tensors(self, keys: Iterable[str]) -> dict[str, torch.Tensor]:
        """Of these names, those tensors that are there, whole."""
        return self._read(keys, lambda file, key: file.get_tensor(key))

    def _read(self, keys: Iterable[str], what: Callable[[Any, str], _T]) -> dict[str, _T]:
        """`what(file, key)` of those of these tensors that are there. Each file is opened once."""
        members: dict[Path, list[str]] = {}
        for key in keys:
            if key in self._files:
                members.setdefault(self._files[key], []).append(key)
        found: dict[str, _T] = {}
        for path, there in members.items():
            with _opened(path) as file:
                found |= {key: what(file, key) for key in there}
        return found


def refuse_unfit(path: str | os.PathLike[str], missing: Sequence[str], wrong: Sequence[str]) -> None:
    """ParameterError where parameters are `missing` in the files of `path`, or have `wrong` shapes there."""
    problems = {"missing": missing, "of another shape": wrong}
    if told := "; ".join(f"{what}: {', '.join(which)}" for what, which in problems.items() if which):
        raise ParameterError(f"[ZW206] the weights in {path} do not fit the model: {told}")


def warn_of_left(path: str | os.PathLike[str], names: Iterable[str], model: nn.Module) -> None:
    """Warns of `names` in the files of `path` that the model does not have."""
    known = {key for keys in names_of(model).values() for key in keys} | {name for name, _ in model.named_buffers()}
    if left := sorted(set(names) - known):
        warn(f"the model has no parameters for these weights in {path}: {listed(left)}")


def _unset(parameter: torch.Tensor) -> torch.Tensor:
    """Memory of a parameter's shape, in which unwritten elements stand out."""
    value = math.nan if parameter.is_floating_point() else 0
    return torch.full(parameter.shape, value, dtype=parameter.dtype, device="cpu")


Weights: TypeAlias = MadeWeights | FileWeights


def weights_of(model: nn.Module, given: WeightsLike | None) -> Weights:
    """The values that a model is to begin with. ParameterError where some of its parameters would have none."""
    if given is None or (callable(given) and not isinstance(given, os.PathLike)):
        made = MadeWeights(model, given)
        made.check()
        return made
    files = FileWeights(given)
    files.check(model)
    return files


class Buffers:
    """Values for the buffers of `model` that are on the meta device: those in the files, else those of a new module.

    A module that is made of a config alone, as rotary embeddings are, is made once more. Plain attributes that are
    tensors on the meta device come with it. ParameterError for a buffer that is nowhere.
    """

    def __init__(self, model: nn.Module, weights: Weights) -> None:
        self._values: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        """the table of buffers or of attributes, the name in it, and the value"""
        lost = []
        for path, module in model.named_modules():
            names = [name for name, b in module._buffers.items() if b is not None and b.is_meta]
            made = _made_again(module) if names else None
            for name in names:
                whole = f"{path}.{name}" if path else name
                value = weights.tensors([whole]).get(whole) if isinstance(weights, FileWeights) else None
                value = value if value is not None or made is None else made._buffers.get(name)
                if value is None or value.shape != module._buffers[name].shape:
                    lost.append(whole)
                else:
                    self._values.append((module._buffers, name, value))
            for name, value in vars(made).items() if made is not None else ():
                if isinstance(value, torch.Tensor) and getattr(vars(module).get(name), "is_meta", False):
                    self._values.append((vars(module), name, value))
        if lost:
            raise ParameterError(
                f"[ZW207] {', '.join(map(repr, lost))}: buffers on the meta device whose values nobody knows; register "
                "them again with values before zeroweave.initialize"
            )

    def give(self) -> None:
        """Puts them into the model."""
        for table, name, value in self._values:
            table[name] = value


def _made_again(module: nn.Module) -> nn.Module | None:
    config = getattr(module, "config", None)
    if config is None or any(True for _ in module.parameters()):
        return None
    try:
        with torch.device("cpu"):
            return type(module)(config)
    except Exception:  # it takes something else; the buffer is told
        return None


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, whose tensors come in host memory with any default device of PyTorch."""
    try:
        file = safe_open(path, "pt")
    except (OSError, SafetensorError) as error:
        raise ParameterError(f"[ZW206] {path} cannot be read: {error}") from None
    with torch.device("cpu"), file:
        yield file


def _files_of(path: Path) -> dict[str, Path]:
    if path.is_dir():
        if (index := path / INDEX).is_file():
            try:
                placed: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
                return {name: path / Path(file).name for name, file in placed.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ParameterError(f"[ZW206] {index} is no index of safetensors files: {error}") from None
        found = sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            what = "several safetensors files" if found else "no safetensors file"
            raise ParameterError(f"[ZW206] the folder {path} has {what} and no {INDEX}")
        path = found[0]
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), path)
