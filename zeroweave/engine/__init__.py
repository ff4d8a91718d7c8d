"""The engine: what users hold in their hands, and the assembly of all that it consists of."""

from zeroweave.engine.engine import Engine

__all__ = ["Engine"]
