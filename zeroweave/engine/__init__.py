"""The engine, which users call, and the assembly of its parts."""

from zeroweave.engine.engine import Engine

__all__ = ["Engine"]
