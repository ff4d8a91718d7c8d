"""Why Dynamo ran a region eagerly: it says so in logs at best, while an engine must report it.

What is seen in 2.11 and 2.13, each time from the caller of a compiled region: the call returns as an eager
call would, and no template runs. Past the recompile limit of a code object, its frame *and all frames
called from it* run eagerly for unknown variants (known ones still find their code). A frame that Dynamo
cannot capture at all runs eagerly while the frames called from it are tried on their own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType

from torch import nn

from zeroweave._torch.dynamo import dynamo_attempts, dynamo_entries

SHOWN = 4  # values of one guard that a report lists

UNKNOWN = (
    "Dynamo found nothing to compile: the forward runs no tensor operations that it can see, or compilation is "
    "switched off (TORCHDYNAMO_DISABLE, torch.compiler.set_stance); it trains exactly as it is"
)


def explain(runner: CodeType, module: nn.Module, graph_breaks: Sequence[str], limit: int) -> str:
    """Sentences for a user. `runner` is the code object that calls regions like `module`; `graph_breaks` are
    the reasons that Dynamo counted while it first saw one; `limit` is `compile.recompile_limit`."""
    attempts = [attempt for attempt in dynamo_attempts() if attempt.co_name is not None]
    for code in (runner, *_forwards(module)):
        if (variants := dynamo_entries(code)) >= limit:
            return _limit(module, variants, [a.recompile_reason for a in attempts if _is_attempt(a, code)])
    for attempt in reversed(attempts):
        if attempt.fail_reason and any(_is_attempt(attempt, code) for code in (runner, *_forwards(module))):
            return _sentence(attempt.fail_reason)
    return _sentence(graph_breaks[-1]) if graph_breaks else UNKNOWN


def recompiled(frames: int) -> list[str]:
    """How the last `frames` frames that Dynamo compiled differ from earlier ones; nothing for new code."""
    reasons = (attempt.recompile_reason for attempt in dynamo_attempts()[-frames:])
    return differences(reason for reason in reasons if reason)


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


def _limit(module: nn.Module, variants: int, reasons: Sequence[str | None]) -> str:
    text = (
        f"Dynamo has compiled {variants} variants of {type(module).__name__}, as many as compile.recompile_limit "
        "allows, and runs further ones eagerly."
    )
    if differing := differences(reason for reason in reasons if reason):
        text += f" What differs between the copies: {'; '.join(differing)}."
        if any("layer_idx" in difference for difference in differing):
            text += " Layers read their index to use a key-value cache: pass use_cache=False in training."
    return text + " Make the regions equal in what their forward reads, or raise the limit."


def differences(reasons: Iterable[str]) -> list[str]:
    """What the guards that failed compare, each once: `module.layer_idx (0, 1, 2)`, `tensor 'x' size mismatch …`.

    Each reason is Dynamo's for one recompilation: "0/7: module.layer_idx == 7   # source line (HINT: ...)".
    """
    values: dict[str, dict[str, None]] = {}  # an ordered set of values for each expression
    for reason in reasons:
        guard = reason.splitlines()[0].split("#")[0].partition(": ")[2].strip().rstrip(".")
        if guard.startswith("BACKEND_MATCH"):
            guard = "the engine that compiled them"  # frames below a graph break share their code with all engines
        expression, _, value = guard.partition(" == ")
        if guard:
            values.setdefault(expression, {})[value] = None
    return [_with_values(expression, [v for v in found if v]) for expression, found in values.items()]


def _with_values(expression: str, values: Sequence[str]) -> str:
    shown = [*values[:SHOWN], "…"] if len(values) > SHOWN else values
    return f"{expression} ({', '.join(shown)})" if values else expression


def _sentence(reason: str) -> str:
    """Dynamo's explanation and its first hint, on one line."""
    lines = [re.sub(r" at 0x[0-9a-f]+", "", line).strip() for line in reason.splitlines()]
    explanation = next((line[len("Explanation:") :].strip() for line in lines if line.startswith("Explanation:")), "")
    hint = next((line[len("Hint:") :].strip() for line in lines if line.startswith("Hint:")), "")
    parts = [lines[0], explanation, hint]
    return " ".join(part if part.endswith(".") else f"{part}." for part in parts if part)
