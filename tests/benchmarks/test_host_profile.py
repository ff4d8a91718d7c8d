"""Where the host's time goes. On the CPU backwards run in the calling thread, so one table has everything."""

from __future__ import annotations

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


def test_what_is_called_in_the_backward_thread_is_called_once() -> None:
    calls: list[int] = []
    host_profile.in_backward_thread(lambda: calls.append(1), CPU)
    assert calls == [1]
