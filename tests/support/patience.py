"""How long something may take on this machine as it is now."""

from __future__ import annotations

import os


def patient(seconds: float) -> float:
    """`seconds` of an idle machine, the longer the more processes want each of its cores."""
    return seconds * (1.0 + os.getloadavg()[0] / (os.cpu_count() or 1))
