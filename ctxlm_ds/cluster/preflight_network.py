"""Whether nodes reach each other, and how far apart their clocks are: plain sockets, no torch, no NCCL.

In: a name and a port of another node. Out: round trip and clock offset in seconds. Not here: who asks whom
(preflight_rank.py), what is too much (preflight_judgement.py).
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

_TIME = struct.Struct("!d")
ROUND_TRIPS = 9
BACKLOG = 256


class ClockServer:
    """Answers each byte with this node's time, on a port of the system's choice, until the process ends."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._listener = socket.create_server(("", 0), backlog=BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, name="preflight-clock", daemon=True).start()

    def close(self) -> None:
        """Refuse further connections."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while connection.recv(1):
                    connection.sendall(_TIME.pack(self._clock()))
            except OSError:
                return


@dataclass(frozen=True)
class RoundTrip:
    """The quickest of several exchanges with another node."""

    round_trip_s: float
    offset_s: float
    """What its clock shows more than this node's; known to within half the round trip."""


def measure_clock(host: str, port: int, timeout_s: float, clock: Callable[[], float] = time.time) -> RoundTrip:
    """Exchange times with a ClockServer.

    Raises:
        OSError: the node cannot be reached or does not answer in time.
    """
    best: RoundTrip | None = None
    with socket.create_connection((host, port), timeout=timeout_s) as connection:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            before_s, sent_s = clock(), time.monotonic()
            connection.sendall(b"?")
            theirs_s = _TIME.unpack(_receive(connection, _TIME.size))[0]
            trip_s = time.monotonic() - sent_s
            if best is None or trip_s < best.round_trip_s:
                best = RoundTrip(trip_s, theirs_s - (before_s + trip_s / 2))
    assert best is not None
    return best


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
