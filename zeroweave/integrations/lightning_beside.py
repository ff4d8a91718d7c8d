"""What Fabric's strategy and the Trainer's share: checkpoints next to Lightning's, precisions, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from zeroweave.engine import Engine
from zeroweave.errors import CheckpointError, UnsupportedError

AUTOCASTS: Final = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
"""What precisions of Lightning are for an engine; the others cast the model before."""
_PRECISIONS: Final = (*AUTOCASTS, "32-true", "bf16-true", "16-true", "64-true")
_REST, _ENGINE, _TAG = "lightning.ckpt", "zeroweave", "zeroweave_tag"


def precision_of(plugin: Any) -> str:
    """The precision of a plugin of Lightning. UnsupportedError for those that replace layers."""
    name = getattr(plugin, "precision", None)
    if name not in _PRECISIONS or type(plugin).__module__.split(".")[0] != "lightning":
        raise UnsupportedError(
            f"the precision plugin {type(plugin).__name__} with an engine: use one of {', '.join(_PRECISIONS)}"
        )
    return str(name)


def refuse_options(options: Mapping[str, Any]) -> None:
    """UnsupportedError for `options` that mean something to DistributedDataParallel alone."""
    if options:
        raise UnsupportedError(
            f"{', '.join(options)}: of DistributedDataParallel, which is not used here; leave it out"
        )


def save_beside(
    engine: Engine, path: str | Path, rest: Mapping[str, Any], write: Callable[[dict[str, Any], Path], None]
) -> None:
    """Makes the folder `path` of an engine's checkpoint and, on rank 0, a file of the `rest`, by `write`. Collective.

    The file is last and says which checkpoint belongs to it, so that a run that ends meanwhile leaves the earlier two
    together. CheckpointError where `path` is a file.
    """
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(
            f"[ZW604] {folder} is a file, and a sharded checkpoint a folder: remove it, or save elsewhere"
        )
    tag = engine.save(folder / _ENGINE)
    if engine.rank == 0:
        write({**rest, _TAG: tag}, folder / _REST)
        for earlier in (each for each in (folder / _ENGINE).iterdir() if each.is_dir()):
            if earlier.name != tag and not earlier.name.startswith("."):
                shutil.rmtree(earlier)


def load_beside(
    engine: Engine, path: str | Path, read: Callable[[Path], dict[str, Any]], strict: bool = True
) -> dict[str, Any]:
    """What `save_beside` had as the rest, read by `read`, when the engine has loaded its part. Collective."""
    rest = read(Path(path) / _REST)
    engine.load(Path(path) / _ENGINE, rest.pop(_TAG), strict=strict)
    return rest


def is_beside(path: str | Path) -> bool:
    """True if `save_beside` has made it."""
    return (Path(path) / _REST).is_file()
