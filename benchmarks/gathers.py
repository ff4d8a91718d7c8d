"""What gathers cost on the GPUs of this machine, by kernel and by copy engine, alone and beside matmuls, by size.

    python -m benchmarks.gathers

The size from which on buckets are gathered by copy engine, as an engine finds it when it is made (`transport.gathers`
"auto"), and the table of what was measured, gathers alone as well. Exit code 1 where there are no two GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from zeroweave.comm.choose import Choice
from zeroweave.report.gathers import measured

HEAD = ("MiB", *(f"{way}: {what}" for way in ("kernel", "copy engine") for what in ("alone", "beside", "matmuls lose")))


def lines(choice: Choice) -> Iterator[str]:
    """What was chosen, and a Markdown table of milliseconds."""
    yield str(choice)
    yield ""
    for row in (HEAD, ("---",) * len(HEAD), *choice.table()):
        yield f"| {' | '.join(row)} |"


def main() -> int:
    count = torch.cuda.device_count()
    if count < 2:
        print(f"there are {count} GPUs: nothing is gathered between them")
        return 1
    print(*lines(measured(count)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
