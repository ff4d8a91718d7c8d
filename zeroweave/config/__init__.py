"""What users configure: keys and their defaults, checked when an engine is made; DeepSpeed's keys translated."""

from zeroweave.config.config import Config, RuntimeConfig

__all__ = ["Config", "RuntimeConfig"]
