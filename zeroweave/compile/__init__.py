"""Compiled regions: what is compiled (`regions`), and the templates that run on the runtime."""

from zeroweave.compile.announce import Announcer
from zeroweave.compile.bind import Part, Place, TemplateHost
from zeroweave.compile.regions import Region, call_modules, find_blocks, find_regions, region_key
from zeroweave.compile.templates import Templates

__all__ = [
    "Announcer",
    "Part",
    "Place",
    "Region",
    "TemplateHost",
    "Templates",
    "call_modules",
    "find_blocks",
    "find_regions",
    "region_key",
]
