"""Pretrained models of transformers, straight from their files into shards.

transformers 5 renames, merges and splits weights as it loads them: the experts of a mixture, for instance, are several
tensors in the files and one in the model. transformers 4 has no such rules. `get_model_conversion_mapping` tells
them. It has no page in transformers' documentation: this is the only module that knows it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, Final

import torch

from zeroweave.engine import Engine
from zeroweave.engine.assembly import OptimizerLike, initialize
from zeroweave.errors import UnsupportedError
from zeroweave.parameters.foreign import names_of
from zeroweave.parameters.weights import FileWeights, refuse_unfit, warn_of_left

_OLDEST: Final = "5.17"
"""The first transformers whose rules are known to be called as they are here; 5.0's have other results."""


def load_pretrained(
    path: str | os.PathLike[str],
    config: Any = None,
    optimizer: OptimizerLike | None = None,
    lr_scheduler: Any = None,
    make: Callable[..., torch.nn.Module] | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Engine:
    """The engine of a model of transformers, of which no rank ever holds more than its shards and one bucket.

    `path`: a folder with `config.json` and safetensors files, such as `save_pretrained` and `Engine.export` write.
    `config`, `lr_scheduler`: as for `initialize`. `optimizer`: a callable from parameters to one, or None for
    evaluation. `make(config, **options)` makes the model, such as `AutoModelForSequenceClassification.from_config`;
    None: `AutoModelForCausalLM.from_config`. `dtype`: of the parameters; None: what the folder's config says.
    Collective.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UnsupportedError(
            "[ZW803] load_pretrained() needs transformers: pip install 'zeroweave[examples]'"
        ) from None
    described = AutoConfig.from_pretrained(path)
    if (wanted := dtype or getattr(described, "dtype", None)) is not None:
        options["dtype"] = wanted
    with torch.device("meta"):
        model = (make or AutoModelForCausalLM.from_config)(described, **options)
    weights = converted(model, path)
    if weights is not None:
        weights.give_buffers()
    return initialize(model, optimizer, config, lr_scheduler, weights=path if weights is None else weights)


class ConvertedWeights:
    """What `zeroweave.initialize` takes as `weights`: fills a parameter with what transformers makes of the files.

    `model`: of transformers. `rules`: its conversions, in the order in which they apply.
    """

    def __init__(self, model: Any, files: FileWeights, rules: list[Any]) -> None:
        self._model, self._files, self._rules = model, files, rules
        self._names = names_of(model)
        self._groups: dict[str, tuple[Any, list[tuple[str, str | None]]]] = {}
        """by the first name that comes of it: what converts, None: nothing, and its tensors with their patterns"""
        self._makes: dict[str, str] = {}
        """a name in the model -> its group"""
        self._made: dict[str, torch.Tensor] = {}
        """what a group has made together with others, and was not asked for yet"""
        self._sort()

    @property
    def differ(self) -> bool:
        """True if the files have other names, or other pieces, than the model."""
        return any(rule is not None or members[0][0] != name for name, (rule, members) in self._groups.items())

    def check(self) -> None:
        """ParameterError, which names them, where parameters are missing. Warns of what is left."""
        missing = [name for name, known in self._names.items() if self._makes.keys().isdisjoint(known)]
        refuse_unfit(self._files.path, missing, [])
        warn_of_left(self._files.path, self._makes.keys(), self._model)

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Writes a parameter's values into `tensor`."""
        value = self._value(next(known for known in reversed(self._names[name]) if known in self._makes))
        if value.shape != tensor.shape:
            refuse_unfit(self._files.path, [], [f"{name}: {list(value.shape)} instead of {list(tensor.shape)}"])
        tensor.copy_(value)

    def give_buffers(self) -> None:
        """Puts the buffers that are in the files into the model."""
        for name, buffer in [*self._model.named_buffers()]:
            if name in self._makes:
                path, _, leaf = name.rpartition(".")
                device = "cpu" if buffer.is_meta else buffer.device
                self._model.get_submodule(path)._buffers[leaf] = self._value(name).to(device, buffer.dtype)

    @torch.no_grad()
    def give_parameters(self) -> None:
        """Writes the values of all parameters into the model, which has memory for them."""
        for name, parameter in self._model.named_parameters():
            self(name, parameter)

    def _sort(self) -> None:
        """Which tensors make what."""
        converters = [rule for rule in self._rules if hasattr(rule, "operations")]
        renamings = [rule for rule in self._rules if not hasattr(rule, "operations")]
        known = self._model.state_dict().keys()
        for key in sorted(self._files.keys(), key=_natural):
            name, pattern = key, None
            found: Any = None
            for rule in renamings:
                name, _ = rule.rename_source_key(name)
            for rule in converters:
                name, pattern = rule.rename_source_key(name)
                if pattern is not None:
                    found = rule
                    break
            if name not in known and key in known:  # a file that is as the model is
                name, pattern, found = key, None, None
            self._groups.setdefault(name, (found, []))[1].append((key, pattern))
            for target in found.target_patterns if found is not None else ():
                self._makes[name.replace(found.target_patterns[0], target)] = name
            self._makes.setdefault(name, name)

    def _value(self, name: str) -> torch.Tensor:
        if name not in self._made:
            rule, members = self._groups[self._makes[name]]
            tensors = self._files.tensors([key for key, _ in members])
            if rule is None:
                return tensors[members[0][0]]
            each = copy.deepcopy(rule)
            for key, pattern in members:
                each.add_tensor(self._makes[name], key, pattern, tensors.pop(key))
            made = each.convert(self._makes[name], model=self._model, config=self._model.config)
            self._made |= {target: value[0] if isinstance(value, list) else value for target, value in made.items()}
        return self._made.pop(name)


def converted(model: Any, path: str | os.PathLike[str]) -> ConvertedWeights | None:
    """The weights in `path` for a model of transformers; None: the files are as the model is.

    ParameterError where they have nothing for a parameter, UnsupportedError where transformers is too old to be asked.
    """
    try:
        from packaging.version import Version
        from transformers import __version__
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # transformers 4
        return None
    weights = ConvertedWeights(model, FileWeights(path), get_model_conversion_mapping(model))
    if not weights.differ:
        return None
    if Version(__version__) < Version(_OLDEST):
        raise UnsupportedError(
            f"[ZW803] the weights in {path} are in another form than the model's, and transformers {__version__} is "
            f"too old to convert them here: pip install 'transformers>={_OLDEST},<6'"
        )
    weights.check()
    return weights


def _natural(key: str) -> list[tuple[int, str]]:
    """By which experts are sorted as they are counted: 2 comes before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
