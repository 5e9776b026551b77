"""How a candidate gets into another process: pickled. Messages are framed by their length.

Only a parent reads from pipes that it made to its own children, and they from it; nothing from a file or a network is
ever unpickled. What children answer is JSON: a child that went wrong can say nothing that runs here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import IO, Any

LENGTH = 8  # bytes that say how long a message is


def packed(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes) -> Any:
    return pickle.loads(data)


def send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(LENGTH, "big") + data)
    pipe.flush()


def receive(read: Callable[[int], bytes]) -> bytes:
    """One message, by a function that reads up to so many bytes. Raises EOFError when the other side is gone."""
    return exactly(read, int.from_bytes(exactly(read, LENGTH), "big"))


def exactly(read: Callable[[int], bytes], count: int) -> bytes:
    parts: list[bytes] = []
    while count:
        part = read(min(count, 1 << 20))
        if not part:
            raise EOFError("the other side closed its end")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
