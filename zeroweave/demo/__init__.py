"""The demo: a small language model, a text for it, and the program that compares the stages with DDP and trains it."""

from __future__ import annotations

from zeroweave.demo.model import Llama, LlamaConfig
from zeroweave.demo.text import Text

__all__ = ["Llama", "LlamaConfig", "Text"]
