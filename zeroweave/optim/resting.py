"""`optimizer.state` of an optimizer that is sharded: it has what is held of fragments, and refuses whole parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from zeroweave.errors import ParameterError


class RestingState(defaultdict[Any, Any]):
    """The state of one optimizer. A sharded parameter is in it once anything is; ParameterError where it is read."""

    def __init__(self, default: Any = None, values: Any = (), names: Mapping[int, str] | None = None) -> None:
        """`names`: of the sharded parameters, by `id`; a copy has none."""
        super().__init__(default, values)
        self.names = names or {}

    def _known(self, key: Any) -> Any:
        if (name := self.names.get(id(key))) is not None:
            raise ParameterError(
                f"[ZW303] the optimizer's state of {name!r} is sharded, and optimizer.state has that of fragments: "
                f"read it by engine.full({name!r}, key), write it by engine.set_full({name!r}, value, key) or "
                "engine.set_local(…)"
            )
        return key

    def __missing__(self, key: Any) -> Any:
        return super().__missing__(self._known(key))

    def __contains__(self, key: Any) -> bool:
        return super().__contains__(key) or (id(key) in self.names and len(self) > 0)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._known(key), value)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(self._known(key), default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return super().setdefault(self._known(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        return super().pop(self._known(key), *default)
