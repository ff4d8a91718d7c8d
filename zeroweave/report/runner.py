"""The program of each rank under `zeroweave run`: a user's script, and an orderly way out after it.

A process that leaves with a live gloo group often aborts on the way out, which turns a finished run into a
failed one and hides a failed run's own exit code. So, when the script is over:

* finished, or left by `sys.exit`: its variables are dropped (they may hold the group), then the group is
  destroyed;
* failed: the traceback is printed, without the lines of this runner, and the process leaves with its exit
  code by `os._exit` after all other exit handlers. Destroying the group here could wait forever for a peer.

Before the script, ranks that were started again get their own store (`own_store`), and each has itself ended
with its launcher (`end_with_launcher`).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import runpy
import signal
import sys
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record

from zeroweave.errors import ZeroweaveError
from zeroweave.report.launch import LAUNCHER

_START_SECONDS = 900
"""How long a rank waits for rank 0 when it was started again; a static rendezvous waits as long for a launcher."""
_PACKAGE = os.path.join(Path(__file__).parents[1], "")
_PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_launcher(environment: Mapping[str, str]) -> None:
    """Has Linux send SIGTERM to this process when its launcher's is gone, however that has ended.

    A launcher that is killed, or runs out of memory, ends no rank. Its ranks would train on, and save at the same time
    as those of a job that was started again. Linux sends the signal when the thread that has started this process
    has ended. That is the launcher's first one, which lasts as long as the launcher does. A launcher that hangs ends no
    rank.
    """
    launcher = environment.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    try:
        os.kill(int(launcher), 0)
    except ProcessLookupError:  # it was gone before that
        os.kill(os.getpid(), signal.SIGTERM)


def own_store(environment: MutableMapping[str, str]) -> dist.TCPStore | None:  # type: ignore[name-defined]
    """Has ranks that were started again meet at a new store; rank 0 keeps it alive by what is returned.

    Under a static rendezvous (`--node-rank`, `--master-port`) all starts of a job share the store of the first
    launcher, with the keys that the last start has left there. A rank that reads them before its peer has written
    new ones connects to a process that is gone. So rank 0 opens a store at its own port, and says there at which.
    """
    start = int(environment.get("TORCHELASTIC_RESTART_COUNT") or 0)
    if not start or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    store, address = dist.TCPStore, environment["MASTER_ADDR"]  # type: ignore[attr-defined]
    patience = timedelta(seconds=_START_SECONDS)
    shared = store(address, int(environment["MASTER_PORT"]), is_master=False, timeout=patience)
    key, opened = f"zeroweave/start/{start}/port", None
    if environment["RANK"] == "0":  # init_process_group finds the server that this process has at its port
        opened = store(address, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        shared.set(key, str(opened.port))
    environment["MASTER_PORT"] = shared.get(key).decode()
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return opened


def run_script(arguments: list[str]) -> None:
    """Run `SCRIPT args` or `-m MODULE args` as `__main__`, with the sys.argv and sys.path that python gives it."""
    as_module = arguments[0] == "-m"
    target, *rest = arguments[1:] if as_module else arguments
    sys.argv = [target, *rest]
    if as_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(target))
        runpy.run_path(target, run_name="__main__")


def own_frames(error: BaseException) -> TracebackType | None:
    """The error's traceback without the leading frames of this runner; all of it where nothing else is in it.

    The text of one of zeroweave's errors says what happened, so its traceback ends at the script's last line.
    """
    runner = {__file__, runpy.__file__, "<frozen runpy>", record.__code__.co_filename}
    start = error.__traceback__
    while start is not None and start.tb_frame.f_code.co_filename in runner:
        start = start.tb_next
    if isinstance(error, ZeroweaveError):
        last, trace = None, start
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
                last = trace
            trace = trace.tb_next
        if last is not None:
            last.tb_next = None
    return start or error.__traceback__


def is_interrupted(error: BaseException | None) -> bool:
    """True if Ctrl-C ended the script. What came after it may have failed, and raised another error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def main() -> int:
    code, opened = 0, None

    def leave() -> None:
        if code and dist.is_initialized():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    atexit.register(leave)  # first, so that it acts after all other handlers
    try:
        end_with_launcher(os.environ)
        opened = own_store(os.environ)
        record(run_script)(sys.argv[1:])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        if code and "TORCHELASTIC_ERROR_FILE" in os.environ:  # a rank that misses this one may be gone before it
            get_error_handler().record_exception(SystemExit(code))
    except BaseException as error:
        code = 130 if is_interrupted(error) else 1
        shown = error.with_traceback(own_frames(error))
        sys.last_value = shown  # as the interpreter does: what acts at exit learns how the script ended
        sys.excepthook(type(shown), shown, shown.__traceback__)
    gc.collect()
    if code == 0 and dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()
    del opened  # its server was this process's until here
    return code


if __name__ == "__main__":
    sys.exit(main())
