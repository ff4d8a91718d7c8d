"""Compiles every kernel for some of NVIDIA's GPUs, and prints what came of it as JSON. Not in an interpreter."""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zeroweave._triton import masters, rules

ADAM = {
    "master": "*bf16", "remainder": "*i16", "gradient": "*bf16", "average": "*fp32", "square": "*fp32",
    "largest": "*fp32", "factor": "*fp32", "numel": "i32",
    **dict.fromkeys(("keep", "size", "root", "decay", "rest1", "beta2", "rest2", "eps"), "fp32"),
}  # fmt: skip
SGD = {
    "master": "*bf16", "remainder": "*i16", "gradient": "*bf16", "buffer": "*fp32", "factor": "fp32",
    "numel": "i32",
    **dict.fromkeys(("rate", "decay", "momentum", "undamped"), "fp32"),
}  # fmt: skip
ADAGRAD = {
    "master": "*bf16", "remainder": "*i16", "gradient": "*bf16", "total": "*fp32", "factor": "*fp32",
    "numel": "i32", **dict.fromkeys(("rate", "decay", "eps"), "fp32"),
}  # fmt: skip
LION = {
    "master": "*bf16", "remainder": "*i16", "gradient": "*bf16", "average": "*fp32", "factor": "*fp32",
    "numel": "i32",
    **dict.fromkeys(("keep", "rate", "beta1", "rest1", "beta2", "rest2"), "fp32"),
}  # fmt: skip
COMPACT = {
    **{name: kind for name, kind in ADAM.items() if name != "largest"}, "remainder": "*i8", "average": "*i8",
    "square": "*u8", "averages": "*fp32", "squares": "*fp32", "position": "i32", "step": "i32",
}  # fmt: skip
SPLIT = {"masters": "*fp32", "shard": "*bf16", "remainder": "*i16", "random": "*i32", "numel": "i32"}
CASES: dict[str, tuple[str, str, dict[str, str], dict[str, Any]]] = {
    "adam, split": (
        "rules", "adam", ADAM,
        {"SPLIT": True, "FACTOR": 2, "COUPLED": False, "AMSGRAD": True},
    ),
    "adam, whole": (
        "rules", "adam", {**ADAM, "master": "*fp32", "gradient": "*fp32", "numel": "i64", "factor": "fp32"},
        {"SPLIT": False, "FACTOR": 1, "COUPLED": True, "AMSGRAD": False},
    ),
    "compact adam, another factor": (
        "rules", "compact_adam", COMPACT,
        {"SPLIT": True, "FACTOR": 2, "COUPLED": False},
    ),
    "compact adam": (
        "rules", "compact_adam", {**COMPACT, "factor": "fp32", "position": "i64"},
        {"SPLIT": True, "FACTOR": 1, "COUPLED": True},
    ),
    "sgd": (
        "rules", "sgd", SGD,
        {"SPLIT": True, "FACTOR": 0, "DECAY": True, "MOMENTUM": True,
         "FIRST": False, "NESTEROV": True},
    ),
    "adagrad": (
        "rules", "adagrad", ADAGRAD,
        {"SPLIT": True, "FACTOR": 2, "DECAY": True},
    ),
    "lion": (
        "rules", "lion", LION, {"SPLIT": True, "FACTOR": 2},
    ),
    "cast": ("masters", "_cast", {"target": "*bf16", "values": "*fp32", "numel": "i32"}, {}),
    "split": ("masters", "_split", SPLIT, {"MISSING": 0, "RANDOM": False}),
    "split to 24 bits": ("masters", "_split", {**SPLIT, "remainder": "*i8"}, {"MISSING": 8, "RANDOM": True}),
    "join": ("masters", "_join", {key: SPLIT[key] for key in SPLIT if key != "random"}, {"MISSING": 0}),
}  # fmt: skip


def compiled(case: str, capability: int) -> dict[str, Any]:
    module, name, signature, constants = CASES[case]
    kernel = getattr({"masters": masters, "rules": rules}[module], name)
    constants = {"SIZE": 1024, **({"MAXIMIZE": False} if module == "rules" else {}), **constants}
    aligned = [i for i, n in enumerate(kernel.arg_names) if signature.get(n, "").startswith("*") or n == "numel"]
    source = ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    code = made.asm["ptx"]
    return {
        "bytes": len(made.asm["cubin"]),
        "fused": len(re.findall(r"fma\.rn\.f32", code)),
        "accesses": sorted(set(re.findall(r"(?:ld|st)\.global\S*", code))),
    }


if __name__ == "__main__":
    print(json.dumps({f"{case} {sm}": compiled(case, sm) for case in CASES for sm in (80, 90)}))
