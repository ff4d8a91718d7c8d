"""The colours of a screenshot: as much of PNG as a browser writes."""

from __future__ import annotations

import struct
import zlib
from collections import Counter


def colours(png: bytes) -> Counter[bytes]:
    """How many pixels have each colour, in 3 bytes: red, green, blue."""
    width, _, depth, kind = struct.unpack(">IIBB", png[16:26])
    assert depth == 8 and kind in (2, 6), f"a PNG of kind {kind} with {depth} bits"
    size = 3 if kind == 2 else 4
    packed, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            packed += png[at + 8 : at + 8 + length]
        at += 12 + length
    raw, stride = zlib.decompress(packed), size * width
    found: Counter[bytes] = Counter()
    line = bytes(stride)
    for begin in range(0, len(raw), stride + 1):
        line = _unfiltered(raw[begin], raw[begin + 1 : begin + 1 + stride], line, size)
        found.update(line[i : i + 3] for i in range(0, stride, size))
    return found


def _unfiltered(kind: int, line: bytes, above: bytes, size: int) -> bytes:
    """A line as it was before its filter; `size`: bytes of a pixel."""
    out = bytearray(size) + line  # a pixel of zeros on the left
    up = bytes(size) + above
    for i in range(size, len(out)):
        left, over, corner = out[i - size], up[i], up[i - size]
        if kind == 1:
            out[i] = (out[i] + left) & 255
        elif kind == 2:
            out[i] = (out[i] + over) & 255
        elif kind == 3:
            out[i] = (out[i] + (left + over) // 2) & 255
        elif kind == 4:
            guess = left + over - corner
            nearest = min((left, over, corner), key=lambda each: abs(guess - each))
            out[i] = (out[i] + nearest) & 255
    return bytes(out[size:])
