"""Machine code for several of NVIDIA's architectures as one file, of which the driver loads what its GPU runs."""

from __future__ import annotations

from collections.abc import Sequence

from fusegen.errors import MissingError


def fatbin(codes: Sequence[tuple[str, str, bytes]]) -> bytes:
    """The codes, each (architecture, name, cubin), as a fatbin. Raises MissingError without NVIDIA's library."""
    try:
        from cuda.bindings import nvfatbin
    except ImportError as error:
        raise missing(error) from error
    try:
        handle = nvfatbin.create([], 0)
    except Exception as error:  # the loader's own class, whose home has moved between versions
        raise missing(error) from error
    try:
        for arch, name, code in codes:
            nvfatbin.add_cubin(handle, code, len(code), arch.removeprefix("sm_"), name)
        made = bytearray(nvfatbin.size(handle))
        nvfatbin.get(handle, made)
        return bytes(made)
    finally:
        nvfatbin.destroy(handle)


def missing(error: Exception) -> MissingError:
    said = str(error).splitlines()[0]
    return MissingError(f"NVIDIA's library of fat binaries is missing here: {said}\n  pip install nvidia-nvfatbin")
