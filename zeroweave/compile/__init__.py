"""Compiled regions: what is compiled (`regions`), and the templates that run on the runtime."""

from zeroweave.compile.announce import Announcer
from zeroweave.compile.bind import Host, Part, Place
from zeroweave.compile.regions import Region, call_modules, find_blocks, find_regions, region_key
from zeroweave.compile.templates import Templates

__all__ = [
    "Announcer",
    "Host",
    "Part",
    "Place",
    "Region",
    "Templates",
    "call_modules",
    "find_blocks",
    "find_regions",
    "region_key",
]
