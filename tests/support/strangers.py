"""A stranger on the network, as a script: connects to where it is told, and sends what nobody understands.

Reads lines of `ADDRESS PORT COUNT SEED`. For each it makes so many connections, and writes how many came about. Some
begin with a small number, as gloo's own connections do.
"""

from __future__ import annotations

import random
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

HELD = 64
"""Connections that stay open, the latest ones."""


def garbage(chance: random.Random) -> Iterator[bytes]:
    """What a connection sends, without end."""
    while True:
        yield b""
        yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500)  # TLS
        yield chance.randbytes(chance.randrange(1, 17))
        yield chance.randbytes(4096)
        yield b"\xff" * 64
        yield struct.pack("<BIB", 0, 0x3C85F7CE, chance.randrange(20)) + chance.randbytes(8)  # as PyTorch's store
        yield b"\0" * 64
        yield struct.pack("<Q", chance.randrange(64))


def connect(address: str, port: int, count: int, seed: int, held: deque[socket.socket]) -> int:
    made = 0
    chance = random.Random(seed)
    for _, content in zip(range(count), garbage(chance), strict=False):
        try:
            one = socket.create_connection((address, port), timeout=5.0)
        except OSError:  # it listens no longer
            continue
        made += 1
        with suppress(OSError):  # it was hung up on
            one.sendall(content)
        match chance.randrange(3):
            case 0:
                one.close()
            case 1:  # by a reset
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.close()
            case _:
                if len(held) == HELD:
                    held.popleft().close()
                held.append(one)
    return made


def main() -> None:
    held: deque[socket.socket] = deque()
    for line in sys.stdin:
        address, port, count, seed = line.split()
        print(connect(address, int(port), int(count), int(seed), held), flush=True)


if __name__ == "__main__":
    main()
