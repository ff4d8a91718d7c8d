"""Where the host's time goes. On the CPU backwards run in the calling thread, so one table has everything."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import torch

from benchmarks import host_profile

CPU = torch.device("cpu")


def test_one_step_is_profiled() -> None:
    leaf = torch.ones(2, requires_grad=True)
    calls = []

    def step() -> None:
        calls.append(1)
        leaf.exp().sum().backward()

    text = host_profile.profile(step, CPU)
    assert len(calls) == 1
    assert "run_backward" in text and "exp" in text
    assert "the thread that runs backwards" not in text


def test_a_function_of_c_counts_for_the_code_that_calls_it() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    torch.nn.functional.relu(torch.ones(2))  # a Python function of PyTorch's, around one of C
    profiler.disable()
    stats = pstats.Stats(profiler)
    found = host_profile.owners(stats)
    assert found["PyTorch"][1] >= 2, "relu, and what it calls"
    assert sum(calls for _, calls in found.values()) == stats.total_calls  # type: ignore[attr-defined]
    assert abs(sum(seconds for seconds, _ in found.values()) - stats.total_tt) < 1e-6  # type: ignore[attr-defined]
    here = Path(host_profile.__file__).parent.parent
    for file, owner in {
        here / "zeroweave" / "engine" / "engine.py": "zeroweave",
        here / "benchmarks" / "lm.py": "all else",
        Path("cache/zeroweave-z3/inductor/xa/cx.py"): "compiled code and its launches",
        Path("/x/site-packages/torch/_inductor/utils.py"): "compiled code and its launches",
        Path("/x/site-packages/triton/runtime/jit.py"): "compiled code and its launches",
        Path("/x/site-packages/torch/_dynamo/eval_frame.py"): "PyTorch",
    }.items():
        assert host_profile.owner_of(str(file)) == owner


def test_what_is_called_in_the_backward_thread_is_called_once() -> None:
    calls: list[int] = []
    host_profile.in_backward_thread(lambda: calls.append(1), CPU)
    assert calls == [1]
