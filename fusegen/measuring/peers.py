"""What a kernel is timed against: torch, eagerly and compiled, and kernels that others wrote by hand.

A peers file is Python that says which hand-written kernels compute which chain:

    PEERS = {"rmsnorm": {"QuACK": make_quack_rmsnorm}}

A maker takes the chain's operands (torch tensors; run-time scalars as numbers) and returns what is timed: a function
without arguments that queues the work on torch's current stream. A maker raises ImportError where its package is
missing and ValueError for operands that its kernel does not take; either is reported in place of a time.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fusegen.errors import RequestError
from fusegen.language.graph import Graph
from fusegen.language.torch_source import DTYPES, TorchChain, torch_chain
from fusegen.language.types import b8
from fusegen.measuring.operands import Operands
from fusegen.measuring.product_peers import matrix_rate, product_ways, same_precision
from fusegen.measuring.timing import REPEATS, Launch, Stopwatch, Timing
from fusegen.runtime.arrays import CPU, ArrayView
from fusegen.runtime.devices import Device

Maker = Callable[..., Callable[[], object]]
Run = Callable[..., Any]

log = logging.getLogger("fusegen.measuring.peers")


def load_peers(file: Path) -> Mapping[str, Mapping[str, Maker]]:
    """The peers of a file, by the names of chain and peer. The file is code and is run: load only what you trust.

    Raises RequestError for a file that is not there, does not run, or has no PEERS.
    """
    if not file.is_file():
        raise RequestError(f"there is no file of peers at {file}")
    found = importlib.util.spec_from_file_location("fusegen_peers", file)
    if found is None or found.loader is None:
        raise RequestError(f"{file} can't be read as Python source")
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise RequestError(f"{file} does not run: {type(error).__name__}: {error}") from error
    peers = getattr(module, "PEERS", None)
    if not isinstance(peers, Mapping) or not all(isinstance(row, Mapping) for row in peers.values()):
        raise RequestError(f"{file} has no PEERS: a mapping from a chain's name to its peers by name")
    return peers


def torch_peers(
    graph: Graph,
    device: Device,
    sets: Sequence[Operands],
    watch: Stopwatch,
    others: Mapping[str, Maker],
    repeats: int = REPEATS,
    own: bool = True,
) -> Iterator[tuple[str, str, Timing | str]]:
    """(name, kind, its times or why there are none) of torch's own ways unless `own` is False, then of `others`."""
    try:
        import torch
    except ImportError as error:
        yield "torch", "torch", f"torch is missing here ({error})"
        return
    if device.place != CPU and not torch.cuda.is_available():
        yield "torch", "torch", "this torch was built without support for the GPU here"
        return
    tensors = [[tensor_over(torch, v) for v in one.inputs] for one in sets]
    with default_stream(torch, device), same_precision(torch, graph), torch.no_grad():
        for name, make in ways(torch, torch_chain(graph), tensors[0]).items() if own else ():
            yield name, "torch", attempt(watch, lambda make=make: calls(make(), tensors), repeats)  # type: ignore[misc]
        for name, maker in others.items():
            yield name, "peer", attempt(watch, lambda m=maker: [m(*row) for row in tensors], repeats)  # type: ignore[misc]


def beside_library(
    graph: Graph,
    device: Device,
    launches: Sequence[Launch],
    sets: Sequence[Operands],
    watch: Stopwatch,
    repeats: int = REPEATS,
) -> tuple[Timing, list[tuple[str, Timing | str]]]:
    """Times of `launches`, and beside them, by turns, those of the vendor's library (or why there are none), by name:
    nothing for a chain without products, and where no torch brings the library."""
    if (torch := library_torch(graph)) is None:
        return watch.time(launches, repeats), []
    tensors = [[tensor_over(torch, v) for v in one.inputs] for one in sets]
    found: dict[str, Timing | str] = {}
    ways: dict[str, list[Launch]] = {}
    with default_stream(torch, device), same_precision(torch, graph), torch.no_grad():
        for name, runs in product_ways(torch, graph, tensors):
            found[name] = attempt(watch, lambda runs=runs: runs, repeats=1)  # type: ignore[misc]
            if not isinstance(found[name], str):
                ways[name] = [lambda stream, run=run: run() for run in runs]  # type: ignore[misc]
        own, *others = watch.time_together([launches, *ways.values()], repeats)
    found.update(zip(ways, others, strict=True))
    return own, list(found.items())


def library_torch(graph: Graph) -> Any:
    """The torch that brings the vendor's library; None for a chain without products, and where there is none."""
    if not graph.products:
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def library_rate(graph: Graph, device: Device, watch: Stopwatch) -> float | None:
    """Flop per µs that the vendor's library reaches with a large product of the chain's factors' type; None for a chain
    without products, and where no torch brings the library."""
    if (torch := library_torch(graph)) is None:
        return None
    with default_stream(torch, device), same_precision(torch, graph), torch.no_grad():
        return matrix_rate(torch, watch, graph.factor_types[graph.products[0]], f"cuda:{device.ordinal}")


def attempt(watch: Stopwatch, make: Callable[[], Sequence[Callable[[], object]]], repeats: int) -> Timing | str:
    """Times, or one line that says what went wrong: other people's code may raise anything."""
    try:
        runs = make()
        return watch.time([lambda stream, run=run: run() for run in runs], repeats)  # type: ignore[misc]
    except Exception as error:
        log.debug("a peer failed", exc_info=True)
        return f"{type(error).__name__}: {gist(str(error))}"


def gist(message: str) -> str:
    """The first line, and those it announces with a colon at its end."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    last = next((i for i, line in enumerate(lines) if not line.endswith(":")), 0)
    return " ".join(lines[: last + 1])


def ways(torch: Any, chain: TorchChain, operands: Sequence[Any]) -> Mapping[str, Callable[[], Run]]:
    """Torch's ways to run the chain, each made when its turn comes. Compiled, constants are made inside the kernel."""
    place = next((o.device for o in operands if hasattr(o, "device")), "cpu")

    def eager() -> Run:
        constants = chain.constants(place)
        return lambda *values: chain.function(*values, *constants)

    def whole(*values: Any) -> Any:
        return chain.function(*values, *chain.constants(place))

    def compiled(mode: str | None) -> Run:
        torch.compiler.reset()  # no guard of an earlier chain is asked
        run: Run = torch.compile(whole, mode=mode, dynamic=False)
        return run

    return {
        "torch eager": eager,
        "torch.compile": lambda: compiled(None),
        "torch.compile max-autotune": lambda: compiled("max-autotune-no-cudagraphs"),
    }


def calls(run: Run, sets: Sequence[Sequence[Any]]) -> list[Callable[[], object]]:
    return [lambda row=row: run(*row) for row in sets]  # type: ignore[misc]


@contextlib.contextmanager
def default_stream(torch: Any, device: Device) -> Iterator[None]:
    """Torch's work on the stream that is timed."""
    if device.place == CPU:
        yield
        return
    with torch.cuda.device(device.ordinal), torch.cuda.stream(torch.cuda.default_stream(device.ordinal)):
        yield


class RawBytes:
    """Device memory as `__cuda_array_interface__` shows it: bytes, since it has no name for bf16."""

    def __init__(self, view: ArrayView) -> None:
        self.view = view  # keeps the memory alive
        nbytes = view.size * view.dtype.bytes
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (view.address, False), "version": 3,
        }  # fmt: skip


def tensor_over(torch: Any, value: Any) -> Any:
    """A torch tensor over the same memory; a run-time scalar as it is."""
    if not isinstance(value, ArrayView):
        return value
    if value.device == CPU:
        flat = replace(value, dtype=b8, shape=(value.size * value.dtype.bytes,), strides=(1,))
        raw = torch.from_numpy(flat.numpy().view(np.uint8))
    else:
        raw = torch.as_tensor(RawBytes(value), device=f"cuda:{value.device[1]}")
    return raw.view(getattr(torch, DTYPES[value.dtype.name].removeprefix("torch."))).view(value.shape)
