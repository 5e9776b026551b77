"""The handler on the CPU, where kernels run in the emulator. It is Python because the emulator is: what that says of a
fault, it finds in Python. XLA's threads come through `handler.c`, and take the interpreter's lock for microseconds
before a kernel and behind it.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER
from typing import Any

from fusegen.errors import FusegenError, KernelError
from fusegen.jax.calls import Call
from fusegen.jax.ffi import ATTRIBUTE, INTERNAL, STRING, TARGET, Handler, NewError, Text
from fusegen.runtime.called import WIDEST

CALLS: dict[str, Call] = {}  # the emulator's: what XLA compiled may run as long as the process does
LOCK = threading.Lock()


def emulated(frame: Any) -> int | None:
    """XLA's call on the CPU: the address of an error, or None."""
    given = frame.contents
    try:
        found = CALLS.get(key := key_in(given))
        if found is None:
            raise KernelError(unknown(key))
        found.run(addresses(given, found), 0)
    except FusegenError as error:
        return failure(given, str(error))
    except BaseException as error:  # it would end here unseen, and XLA go on with arrays that nobody wrote
        return failure(given, f"{type(error).__name__}: {error}")
    return None


emulate = Handler(emulated)


def add(call: Call) -> None:
    with LOCK:
        CALLS.setdefault(call.key, call)


def key_in(frame: Any) -> str:
    """The key of the call that is to be made."""
    attributes = frame.attributes
    for place in range(attributes.size):
        name = attributes.names[place].contents
        if ctypes.string_at(name.pointer, name.size) == ATTRIBUTE.encode() and attributes.types[place] == STRING:
            text = ctypes.cast(attributes.values[place], POINTER(Text)).contents
            return ctypes.string_at(text.pointer, text.size).decode()
    raise KernelError(f"a custom call to {TARGET} has no attribute {ATTRIBUTE!r}: it was made by another version")


def unknown(key: str) -> str:
    return (
        f"this process knows no call {key}: the program was compiled in another one\n"
        "  trace and compile it here; kernels come from fusegen's cache"
    )


def addresses(frame: Any, call: Call) -> list[int]:
    """Of the call's arrays, workspace last. Raises KernelError where they are none that the call was made for."""
    arrays = (frame.operands, frame.results)
    found = [a.buffers[place].contents.data or 0 for a in arrays for place in range(a.size)]
    if frame.operands.size != call.operands or len(found) != call.arrays:
        raise KernelError(f"{call.name} takes {call.operands} operands and {call.arrays} arrays, and XLA has others")
    if wrong := [hex(address) for address in found if address % WIDEST]:
        raise KernelError(f"{call.name}: XLA passes an array at {wrong[0]}, which is no multiple of {WIDEST} bytes")
    return found


def failure(frame: Any, text: str) -> int | None:
    """An error of XLA's own, by its address."""
    asked = NewError(ctypes.sizeof(NewError), None, text.encode(errors="replace"), INTERNAL)
    made: int | None = frame.api.contents.error_create(ctypes.byref(asked))
    return made
