"""Messages between the ranks and the coordinator: pickles behind a keyed hash, over TCP.

Whoever reaches the coordinator's port can write to it. What does not carry the hash under the ranks' common token is
not unpickled, and ends its connection and nothing else.
"""

from __future__ import annotations

import hmac
import pickle
import select
import selectors
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final

LOOK_SECONDS: Final = 1.0
"""How often a rank shows that it lives, and looks whether the others do."""
STRANGERS: Final = 4096
"""The longest first message of a connection, in bytes."""
LONGEST: Final = 2**32 - 1
"""That of the others."""
WELCOME: Final = ("welcome",)
"""The coordinator's answer to the first message."""
_AGAIN: Final = 0.2
"""Seconds until a connection is made again."""
_HEAD = struct.Struct("<I32s")
"""Bytes of the pickle, and its keyed hash."""
_READ: Final = 1 << 16
"""Bytes that are read at once."""


class Forged(Exception):
    """A message has no hash of this job's: something else has written it."""


class Codec:
    """Messages of one direction as bytes. `longest`: bytes of the first message that is taken."""

    def __init__(self, token: bytes, direction: bytes, longest: int = LONGEST) -> None:
        self._key, self._longest, self._rest = token + direction, longest, bytearray()

    def pack(self, message: Any) -> bytes:
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        return _HEAD.pack(len(body), hmac.digest(self._key, body, "sha256")) + body

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are whole now that these bytes have come, too."""
        self._rest += data
        messages = []
        while len(self._rest) >= _HEAD.size:
            size, mark = _HEAD.unpack_from(self._rest)
            if size > self._longest:
                raise Forged
            if len(self._rest) < (end := _HEAD.size + size):
                break
            body = bytes(self._rest[_HEAD.size : end])
            del self._rest[:end]
            if not hmac.compare_digest(mark, hmac.digest(self._key, body, "sha256")):
                raise Forged
            messages.append(pickle.loads(body))
            self._longest = LONGEST
        return messages


class Channel:
    """A rank's connection to the coordinator, for one thread; others may `post`, and `shut` it.

    Ctrl-C in `send` or `receive` leaves half a message: a thread that gets it uses the channel no more, see
    `Control.broken`, or only posts. What sends or receives raises `ConnectionError` once the connection is lost. The
    coordinator drops newcomers while strangers crowd in, so a connection that ends before it is welcome is made again,
    for `within` seconds.
    """

    def __init__(self, address: tuple[str, int], token: bytes, hello: Any, within: float) -> None:
        self._address, self._token, self._end = address, token, time.monotonic() + within
        self._early: list[Any] | None = [hello]
        """what was sent so far, until the connection is welcome"""
        self._posted, self._come = deque[Any](), deque[Any]()
        self.sent = self.received = 0
        """bytes"""
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._connect()

    def _connect(self) -> None:
        self._up, self._down = Codec(self._token, b"up"), Codec(self._token, b"down")
        try:
            self._socket = socket.create_connection(self._address, max(_AGAIN, self._end - time.monotonic()))
        except OSError as error:
            host, port = self._address
            raise ConnectionError(f"rank 0 does not answer at {host}:{port}: {error}") from error
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.poll()  # `select` knows no number of a file above 1023
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        for message in self._early or ():
            self._write(message)

    def post(self, message: Any) -> None:
        """In any thread: the thread that receives sends it, at once if it waits for a message."""
        self._posted.append(message)
        with suppress(OSError):  # it has been woken often enough, or the channel is closed
            self._waker.send(b"x")

    def flush(self) -> None:
        """Sends what was posted."""
        while self._posted:
            self.send(self._posted.popleft())

    def send(self, message: Any) -> None:
        if self._early is not None:
            self._early.append(message)
        self._write(message)

    def _write(self, message: Any) -> None:
        data = self._up.pack(message)
        try:
            self._socket.sendall(data)
        except OSError as error:
            if self._early is None:  # else `receive` finds that, too, and connects again
                raise ConnectionError(f"rank 0 has gone: {error}") from error
        self.sent += len(data)

    def receive(self, seconds: float) -> Any | None:
        """The next message; None where none has come in that time, or something was posted, which has been sent."""
        while not self._come:
            ready = {number for number, _ in self._poll.poll(1000 * max(0.0, seconds))}
            if not ready - {self._woken.fileno()}:
                with suppress(OSError):
                    self._woken.recv(_READ)
                self.flush()
                return None
            try:
                messages = self._read()
            except ConnectionError:
                if self._early is None or time.monotonic() > self._end:
                    raise
                time.sleep(_AGAIN)
                self._socket.close()
                self._connect()
                continue
            if messages and messages[0] == WELCOME:
                self._early = None
                del messages[0]
            self._come.extend(messages)
        return self._come.popleft()

    def _read(self) -> list[Any]:
        try:
            data = self._socket.recv(_READ)
            self.received += len(data)
            messages = self._down.feed(data)
        except OSError as error:
            raise ConnectionError(f"rank 0 has gone: {error}") from error
        except Forged:
            raise ConnectionError("what answers in the place of rank 0 is no rank of this job") from None
        if not data:
            raise ConnectionError("rank 0 has gone: it closed the connection")
        return messages

    def shut(self) -> None:
        """In any thread: ends the connection, and whatever waits in it."""
        self._end = 0.0
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Where no thread uses it any more: another file may get its number."""
        self.shut()
        for each in (self._socket, self._waker, self._woken):
            each.close()


class Connection:
    """The coordinator's end of a channel, in its selector: it never waits. `since`: when it was made.

    `owner`: what its first message said, None before that.
    """

    def __init__(self, sock: socket.socket, token: bytes, since: float, selector: selectors.BaseSelector) -> None:
        sock.setblocking(False)
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.since = since
        self.owner: Any = None
        self._socket, self._selector = sock, selector
        self._codec, self._out, self._writing = Codec(token, b"up", STRANGERS), bytearray(), False
        selector.register(sock, selectors.EVENT_READ, self)

    def read(self) -> list[Any] | None:
        """The messages that have come; None: the other end has gone."""
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._codec.feed(data) if data else None

    def greeted(self, owner: Any) -> None:
        """Its first message has come."""
        self.owner = owner

    def write(self, data: bytes = b"") -> None:
        """Bytes of `Codec.pack`, behind those that are left."""
        self._out += data
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # whoever reads learns that the other end has gone
        if self._writing != bool(self._out):
            self._writing = not self._writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self._socket, events, self)

    def close(self) -> None:
        self._selector.unregister(self._socket)
        with suppress(OSError):
            self._socket.settimeout(1.0)
            self._socket.sendall(self._out)
            self._socket.shutdown(socket.SHUT_RDWR)  # a forked child may have it, too
        self._socket.close()
