"""What the doctor says of variables, threads, shared memory and versions: once right and once wrong each."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroweave.report.doctor import (
    ROOM,
    VARIABLES,
    Check,
    _quota,
    libraries,
    shared_memory,
    threads,
    variables,
)


def of(environ: dict[str, str], gpus: int = 2, infiniband: bool = True) -> list[Check]:
    return [*variables(environ, gpus, infiniband)]


def test_an_environment_without_anything_wrong() -> None:
    fine = {"NCCL_P2P_DISABLE": "0", "NCCL_DEBUG": "WARN", "NCCL_CUMEM_ENABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    fine |= {"NCCL_IB_DISABLE": "0", "NCCL_ALGO": ""}
    for environ in ({}, fine):
        (check,) = of(environ)
        assert (check.name, check.state) == ("settings", "ok")


WRONG = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_P2P_LEVEL": "LOC",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "LL",
    "NCCL_DEBUG": "TRACE",
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "true",
}


DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "doctor.md").read_text()


def test_every_variable_has_a_wrong_value_here_and_a_row_in_the_document() -> None:
    assert WRONG.keys() == VARIABLES.keys()
    assert all(f"`{name}`" in DOCUMENT for name in WRONG)


@pytest.mark.parametrize("name", WRONG)
def test_a_variable_that_slows_training_down(name: str) -> None:
    (check,) = of({name: WRONG[name]})
    assert (check.name, check.state, check.cure) == (name, "slow", f"unset {name}")
    assert check.detail.startswith(f"{WRONG[name]}: ")
    needed = VARIABLES[name][0]
    for gpus in range(3):
        assert (of({name: WRONG[name]}, gpus)[0].state == "slow") is (gpus >= needed)


def test_infiniband_that_is_not_used() -> None:
    (check,) = of({"NCCL_IB_DISABLE": "1"})
    assert (check.name, check.state, check.cure) == ("NCCL_IB_DISABLE", "slow", "unset NCCL_IB_DISABLE")
    assert of({"NCCL_IB_DISABLE": "1"}, infiniband=False)[0].state == "ok"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_grow_under_graphs(name: str) -> None:
    grows = {name: "max_split_size_mb:99, expandable_segments:True"}
    (check,) = of(grows)
    assert (check.name, check.state, check.cure) == ("expandable_segments", "limited", "export NCCL_GRAPH_REGISTER=0")
    for fine in (grows | {"NCCL_GRAPH_REGISTER": "0"}, {name: "expandable_segments:False"}):
        assert of(fine)[0].state == "ok"
    assert of(grows, gpus=1)[0].state == "ok"


@pytest.mark.parametrize(
    ("environ", "cores", "quota", "ranks", "says", "cure"),
    [
        ({}, 8, None, 2, "", ""),
        ({"OMP_NUM_THREADS": "4"}, 8, None, 2, "", ""),
        ({"OMP_NUM_THREADS": "1"}, 8, 2.0, 2, "", ""),
        ({"OMP_NUM_THREADS": "8"}, 8, None, 4, "32 threads of 4 ranks on 8 cores", "export OMP_NUM_THREADS=2"),
        ({"OMP_NUM_THREADS": "2"}, 8, 1.5, 1, "2 threads of 1 ranks on 1 cores", "export OMP_NUM_THREADS=1"),
        ({}, 64, 4.0, 1, "64 threads of 1 ranks on 4 cores", "export OMP_NUM_THREADS=4"),
        ({}, 4, None, 8, "4 cores for 8 ranks", "give the job 8 cores"),
    ],
)
def test_cpu_threads(
    environ: dict[str, str], cores: int, quota: float | None, ranks: int, says: str, cure: str
) -> None:
    check = threads(environ, cores, quota, ranks)
    assert check.state == ("slow" if says else "ok")
    assert says in check.detail and check.cure.startswith(cure)


def test_a_containers_share_of_the_cores(tmp_path: Path) -> None:
    limits = tmp_path / "cpu.max"
    assert _quota(limits) is None
    for text, quota in (("max 100000\n", None), ("150000 100000\n", 1.5)):
        limits.write_text(text)
        assert _quota(limits) == quota


def test_shared_memory() -> None:
    assert shared_memory(16 * ROOM, 15 * ROOM).state == "ok"
    for total, free, cure in (
        (64 << 20, 64 << 20, "docker run --shm-size=16g"),
        (16 * ROOM, 1 << 20, "ls -l /dev/shm"),
        (0, 0, "docker run --shm-size=16g"),
    ):
        check = shared_memory(total, free)
        assert check.state == "slow" and check.cure.startswith(cure)
    assert shared_memory(64 << 20, 60 << 20).detail.startswith("60 of 64 MiB are free in /dev/shm")


REQUIREMENTS = [
    "torch<2.14,>=2.11",
    "pydantic>=2.8",
    "rich",
    'transformers==4.57.1; extra == "examples"',
    'pytest>=8.1; extra == "test"',
]


def versions(**installed: str) -> list[Check]:
    return [*libraries(REQUIREMENTS, installed.get)]


def test_libraries_inside_the_tested_range() -> None:
    (check,) = versions(torch="2.13.0+cpu", pydantic="2.14.3", rich="9", pytest="7.0")
    assert (check.state, check.detail) == ("ok", "torch 2.13.0+cpu, pydantic 2.14.3, rich 9")
    assert "transformers 4.57.1" in versions(pydantic="2.8", rich="9", transformers="4.57.1")[-1].detail


def test_libraries_outside_of_it() -> None:
    old, absent, optional, _ = versions(torch="2.11.0+cu130", pydantic="2.7.9", transformers="5.0.1")
    assert (old.name, old.state, old.cure) == ("pydantic", "failed", "pip install 'pydantic>=2.8'")
    assert old.detail == "2.7.9 is not the tested >=2.8"
    assert (absent.name, absent.state, absent.cure) == ("rich", "failed", "pip install 'rich'")
    assert (optional.state, optional.cure) == ("limited", "pip install 'transformers==4.57.1'")
    for version in ("2.10.1", "2.14.0a0+git123", "3.0"):
        torch = versions(torch=version, pydantic="2.8", rich="9")[0]
        assert (torch.state, torch.cure) == ("failed", "pip install 'torch<2.14,>=2.11'")


def test_a_finding_is_a_line_and_what_mends_it_another() -> None:
    assert [*Check("name", "ok", "detail", "cure").lines()] == ["ok       name: detail"]
    assert [*Check("name", "slow", "detail", "cure").lines()] == ["slow     name: detail", "         -> cure"]
