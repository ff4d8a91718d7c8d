"""Why Dynamo ran a region eagerly: it says so in logs at best, while an engine must report it.

What is seen in 2.11 and 2.13, each time from the caller of a compiled region: the call returns as an eager
call would, and no template runs. Past the recompile limit of a code object, its frame *and all frames
called from it* run eagerly for unknown variants (known ones still find their code). A frame that Dynamo
cannot capture at all runs eagerly while the frames called from it are tried on their own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from types import CodeType

from torch import nn

from zeroweave import _torch

UNKNOWN = (
    "Dynamo found nothing to compile: the forward runs no tensor operations that it can see, or compilation is "
    "switched off (TORCHDYNAMO_DISABLE, torch.compiler.set_stance); it trains exactly as it is"
)


def explain(runner: CodeType, module: nn.Module, graph_breaks: Sequence[str]) -> str:
    """Sentences for a user. `runner` is the code object that calls regions like `module`; `graph_breaks` are
    the reasons that Dynamo counted while it first saw one."""
    attempts = [attempt for attempt in reversed(_torch.dynamo_attempts()) if attempt.co_name is not None]
    limit = _torch.dynamo_limit()
    for code in (runner, *_forwards(module)):
        if (variants := _torch.dynamo_entries(code)) >= limit:
            reasons = (a.recompile_reason for a in attempts if _is_attempt(a, code) and a.recompile_reason)
            return _limit(module, variants, next(reasons, None))
    for attempt in attempts:
        if attempt.fail_reason and any(_is_attempt(attempt, code) for code in (runner, *_forwards(module))):
            return _sentence(attempt.fail_reason)
    return _sentence(graph_breaks[-1]) if graph_breaks else UNKNOWN


def _forwards(module: nn.Module) -> Iterator[CodeType]:
    """The code of the forwards in `module`, outermost first, each once."""
    seen = set()
    for child in module.modules():
        code = getattr(inspect.unwrap(type(child).forward), "__code__", None)
        if code is not None and code not in seen:
            seen.add(code)
            yield code


def _is_attempt(attempt: object, code: CodeType) -> bool:
    fields = ("co_name", "co_filename", "co_firstlineno")
    return all(getattr(attempt, field) == getattr(code, field) for field in fields)


def _limit(module: nn.Module, variants: int, reason: str | None) -> str:
    text = (
        f"Dynamo has compiled {variants} variants of {type(module).__name__}, its limit "
        "(torch._dynamo.config.recompile_limit), and runs further ones eagerly."
    )
    if reason:
        # "0/7: module.layer_idx == 7   # source line (HINT: ...)" or "0/3: tensor 'x' size mismatch ..."
        guard = reason.splitlines()[0].split("#")[0].partition(": ")[2].strip()
        text += f" The last one was compiled because this did not hold: {guard}."
        if "layer_idx" in guard:
            text += " Layers read their index to use a key-value cache: pass use_cache=False in training."
    return text + " Make the regions equal in what their forward reads, or raise the limit."


def _sentence(reason: str) -> str:
    """Dynamo's explanation and its first hint, on one line."""
    lines = [re.sub(r" at 0x[0-9a-f]+", "", line).strip() for line in reason.splitlines()]
    explanation = next((line[len("Explanation:") :].strip() for line in lines if line.startswith("Explanation:")), "")
    hint = next((line[len("Hint:") :].strip() for line in lines if line.startswith("Hint:")), "")
    parts = [lines[0], explanation, hint]
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)
