"""The table of docs/stages.md: which settings of each stage fit on a GPU of 80 GB, as `zeroweave plan` finds them.

    python tools/stage_table.py 1B 7B          prints the rows of these sizes
    python tools/stage_table.py --write        puts the rows of all sizes into the page: a hundred plans of about 15 s

A cell is the first of SETTINGS that fits. Each needs less memory than the one before it, and more ranks need less
memory of each: from one number of ranks to the next the search goes on where it was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from zeroweave.plan.hardware import GPUS, Efficiency, Hardware
from zeroweave.plan.model import source_of
from zeroweave.plan.plan import make

PAGE: Final = Path(__file__).parents[1] / "docs" / "stages.md"
BEGIN, END = "<!-- tools/stage_table.py -->\n", "<!-- end -->"
WORLDS: Final = (1, 2, 4, 8, 16, 64)
TOKENS: Final = 4096


def _decoder(kind: str, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, words: int) -> dict[str, Any]:
    """A config.json of transformers."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": words}
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    return {"model_type": kind, "max_position_embeddings": TOKENS, "dtype": "bfloat16", **sizes, **attention}


MODELS: Final = {
    "1B": _decoder("llama", 2048, 8192, 16, 32, 8, 128256) | {"head_dim": 64, "tie_word_embeddings": True},
    "7B": _decoder("qwen2", 3584, 18944, 28, 28, 4, 152064) | {"tie_word_embeddings": False},
    "14B": _decoder("qwen3", 5120, 17408, 40, 40, 8, 151936) | {"tie_word_embeddings": False},
    "32B": _decoder("qwen3", 5120, 25600, 64, 64, 8, 151936) | {"tie_word_embeddings": False},
    "70B": _decoder("llama", 8192, 28672, 80, 64, 8, 128256) | {"tie_word_embeddings": False},
}
"""The shapes of Llama-3.2-1B, Qwen2.5-7B, Qwen3-14B, Qwen3-32B and Llama-3.3-70B."""

BASE: Final[dict[str, Any]] = {"precision": {"params": "bfloat16"}, "gradient_clipping": 1.0}
RECOMPUTED: Final = {**BASE, "compile": {"activation_budget": 0.0}}
COMPACT: Final = {**RECOMPUTED, "precision": {"params": "bfloat16", "optimizer": "compact"}}
SETTINGS: Final = {
    "": BASE,
    "R": RECOMPUTED,
    "RO": {**RECOMPUTED, "offload": {"optimizer": "all"}},
    "ROP": {**RECOMPUTED, "offload": {"optimizer": "all", "params": True}},
}
"""By the letters of the page."""


def least(folder: Path, stage: int, world: int, settings: dict[str, Any]) -> tuple[float, bool]:
    """The GiB of the plan that takes least, and whether it fits."""
    hardware = Hardware(GPUS["h100"], Efficiency())
    rows = make(source_of(str(folder), 1, TOKENS), (stage,), (world,), settings, hardware).rows
    row = min(rows, key=lambda each: each.peak)
    return row.peak / 2**30, row.fits


def cells(folder: Path, stage: int) -> Iterator[str]:
    """For each of WORLDS, from the largest: GiB and letters."""
    letters = [each for each in SETTINGS if stage == 3 or "P" not in each]
    at = 0
    for world in reversed(WORLDS):
        while at < len(letters):
            peak, fits = least(folder, stage, world, SETTINGS[letters[at]])
            if fits:
                break
            at += 1
        if at == len(letters):
            yield "–"
            continue
        approximate = "O" in letters[at] and least(folder, stage, world, COMPACT)[1]
        yield f"{peak:.0f} {letters[at]}".strip() + "/RC" * approximate


def rows(size: str) -> Iterator[str]:
    """The lines of one model."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[size]))
        for stage, name in ((2, "1, 2"), (3, "3")):
            found = [*cells(Path(folder), stage)]
            yield f"| {size} | {name} | {' | '.join(reversed(found))} |\n"


def table(page: str) -> str:
    """What lies between the marks of a page."""
    return page[page.index(BEGIN) + len(BEGIN) : page.index(END)]


if __name__ == "__main__":
    head = f"| model | stage | {' | '.join(map(str, WORLDS))} |\n|{'---|' * (len(WORLDS) + 2)}\n"
    lines: list[str] = []
    for size in [each for each in sys.argv[1:] if each in MODELS] or MODELS:
        for line in rows(size):
            print(line, end="", flush=True)
            lines.append(line)
    if "--write" in sys.argv:
        text = PAGE.read_text()
        PAGE.write_text(text.replace(table(text), head + "".join(lines)))
