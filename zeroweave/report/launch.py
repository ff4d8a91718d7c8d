"""Start a script on several ranks, as torchrun does, with what its users otherwise learn the hard way.

`launch` takes torchrun's own arguments and differs from it in eight things:

* restarts get their own TCPStore (`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`); without it gloo recovers from
  `--max-restarts` only sometimes (with `--master-port` the runner gives them one);
* `OMP_NUM_THREADS` is 1 unless the user set it, without a warning;
* on one machine a free port is used, unless the user chose a rendezvous;
* `--nproc` and `-n` are short for `--nproc-per-node`;
* Python scripts run under `zeroweave.report.runner`, which ends the process group on every way out;
* SIGUSR1 is passed on to the ranks, instead of ending the launcher and leaving them behind;
* ranks end with a launcher that was killed (on Linux, by SIGTERM), instead of training on without it;
* when ranks fail, what is shown is the first one's reason: not the launcher's log of the ranks that it ended, nor
  the warnings with which PyTorch's store and gloo tell of connections to processes that are gone (both return with
  TORCH_CPP_LOG_LEVEL=INFO).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

RUNNER = "zeroweave.report.runner"
LAUNCHER: Final = "ZEROWEAVE_LAUNCHER"
"""The number of the launcher's process, in the environment of its ranks."""
_DEADLINE: Final = " within the deadline of "
"""In the errors of ranks that have waited for another one."""
_LEFT: Final = re.compile(r"SystemExit: (\d+)$")
"""What the runner notes of `sys.exit(n)`."""


def launch(arguments: Sequence[str]) -> int:
    """Run `[torchrun options] SCRIPT [script arguments]` and return the exit code to leave with.

    0 if all ranks left with 0; else that of the rank that failed first (128 + n where signal n ended it),
    with one line on stderr that names the rank and the reason. 128 + n, too, where signal n has ended the launcher,
    and with it the ranks. Wrong options end the process with torchrun's usage and code 2.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[LAUNCHER] = str(os.getpid())
    if os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":
        launcher = logging.getLogger("torch.distributed.elastic")
        launcher.propagate = False
        launcher.addHandler(logging.NullHandler())  # or Python prints what no handler takes
    options = under_runner(parse(arguments), list(arguments))
    with tempfile.TemporaryDirectory(prefix="zeroweave_") as own:
        if options.log_dir is None and options.redirects == options.tee == "0":
            # Nothing is left of it; else torchrun keeps logs for the user.
            options = argparse.Namespace(**{**vars(options), "log_dir": own})
        try:
            with passing_on(signal.SIGUSR1):
                torchrun.run(options)
        except ChildFailedError as error:
            rank, code, reason = cause(error, Path(own))
            print(f"zeroweave: rank {rank} failed with {exit_reason(code)}{reason}", file=sys.stderr)
            return code if code > 0 else 128 - code
        except RendezvousConnectionError:
            where = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
            print(f"zeroweave: the rendezvous at {where} does not answer: its node may be gone", file=sys.stderr)
            return 1
        except (SignalException, KeyboardInterrupt) as stop:
            number = getattr(stop, "sigval", signal.SIGINT)
            print(f"zeroweave: ended by {number.name}", file=sys.stderr)
            return 128 + number
    return 0


@contextmanager
def passing_on(number: signal.Signals) -> Iterator[None]:
    """A signal to this process goes to the processes that it has started."""

    def send(*_: object) -> None:
        for children in Path("/proc/self/task").glob("*/children"):
            for child in children.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), number)

    before = signal.signal(number, send)
    try:
        yield
    finally:
        signal.signal(number, before)


def cause(error: ChildFailedError, logs: Path) -> tuple[int, int, str]:
    """The rank that failed first, its exit code, and ": reason" or "".

    torchrun asks which process was gone first. A rank that missed another one, or that the alarm has ended without its
    own reason, may be gone before the one that it is about. That one has noted its exception in `logs`, where all
    of this machine's ranks do. A rank that others have waited for until the deadline was ended by torchrun.
    """
    rank, failure = error.get_first_failure()
    starts = {note: int(note.parts[-3].removeprefix("attempt_")) for note in logs.glob("*/attempt_*/*/error.json")}
    last = [note for note, start in starts.items() if start == max(starts.values())]
    noted = []
    for note in sorted(last, key=lambda note: note.stat().st_mtime_ns):
        told, noting = json.loads(note.read_text())["message"], rank - failure.local_rank + int(note.parent.name)
        if (left := _LEFT.match(str(told.get("message", "") if isinstance(told, dict) else told))) is not None:
            noted.append((noting, int(left[1]), ""))
        elif reason := first_line(told):
            noted.append((noting, _code(1, reason), reason))
    late = [each for each in noted if _DEADLINE in each[2]]
    for of, each in sorted(error.failures.items(), key=lambda item: item[1].timestamp):
        reason = first_line(each.message)
        if _is_own(each.exitcode, reason) and not (late and each.exitcode == -signal.SIGKILL and not reason):
            return of, _code(each.exitcode, reason), reason
    own = [each for each in noted if not each[2] or _is_own(1, each[2])]
    reason = first_line(failure.message)
    return (own or late or [(rank, _code(failure.exitcode, reason), reason)])[0]


def _code(code: int, reason: str) -> int:
    """The code with which a rank leaves after the exception that it has noted, if it has.

    torchrun may have ended it on its way out, because another rank was gone first. Its process may abort there.
    """
    if not reason:
        return code
    return 130 if reason.startswith(": KeyboardInterrupt") else 1


def _is_own(code: int, reason: str) -> bool:
    """True if a rank's end says something about itself, and not only that another one is missing."""
    if reason:
        return not reason.startswith((": RankFailure", ": AgreementError"))
    return code not in (1, -signal.SIGTERM)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """torchrun's options of these arguments, with the short names of `--nproc-per-node`.

    What follows the script is the script's. argparse would look there for abbreviations of torchrun's options, too.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.add_argument(
        "-n", "--nproc", dest="nproc_per_node", default=argparse.SUPPRESS, help="short for --nproc-per-node"
    )
    for end in range(1, len(arguments)):
        with suppress(SystemExit), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            options = parser.parse_args(arguments[:end])  # no error: it has come to the script
            return argparse.Namespace(**vars(options) | {"training_script_args": list(arguments[end:])})
    return parser.parse_args(arguments)


def under_runner(options: argparse.Namespace, arguments: list[str]) -> argparse.Namespace:
    """torchrun's parsed options, changed so that the script runs under the runner and one machine uses a free port."""
    own = arguments[: len(arguments) - len(options.training_script_args)]
    if not options.no_python:
        script = ["-m", options.training_script] if options.module else [options.training_script]
        vars(options).update(
            training_script=RUNNER, module=True, training_script_args=[*script, *options.training_script_args]
        )
    # A master port that the user names asks for a plain static rendezvous.
    ported = any(argument.split("=")[0] in ("--master-port", "--master_port") for argument in own)
    chosen = options.rdzv_endpoint or options.rdzv_backend != "static" or ported
    if not chosen and options.nnodes in ("1", "1:1"):
        options.standalone = True
    return options


def exit_reason(code: int) -> str:
    """ "exit code 3", or "signal 9" for the negative codes of a process that a signal ended."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"


def first_line(message: object) -> str:
    """The reason in an elastic failure's message (text, or a worker's error file), as ": reason"."""
    if isinstance(message, dict):
        message = message.get("message", "")
    lines = str(message).strip().splitlines()
    known = lines and not lines[0].startswith(("Signal ", "To enable traceback", "SystemExit: "))
    if not known:
        return ""
    # PyTorch's compiler names the backend in the first line, and what failed in the second.
    return f": {' '.join(lines[: 2 if lines[0].endswith(':') else 1])}"


def on_ranks(module: str, ranks: int, seconds: float) -> tuple[str, str]:
    """What a module prints on `ranks` ranks of this machine, on both streams.

    RuntimeError where they take more than `seconds`.
    """
    script = ["--standalone", "--nproc-per-node", str(ranks), "-m", module]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    try:
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *script],
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result after {seconds:g} s") from None
    return done.stdout, done.stderr


def answer_of(mark: str, output: str, errors: str) -> Any:
    """The JSON after `mark` in the output. RuntimeError with the ranks' last error if it is missing."""
    for line in output.splitlines():
        if line.startswith(mark):
            return json.loads(line.removeprefix(mark))
    lines = [line.strip() for line in errors.splitlines() if "rror:" in line]
    raise RuntimeError(lines[-1] if lines else "the ranks told nothing")
