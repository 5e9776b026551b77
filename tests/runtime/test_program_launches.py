"""What a program's call asks of NVIDIA's driver, with a driver that only pretends: no more than its launches."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fusegen.emitting.rendering import render
from fusegen.errors import ArgumentError, KernelError
from fusegen.language.types import u8
from fusegen.pipeline import plan
from fusegen.planner.programs.model import ProgramPlan
from fusegen.runtime import called, nvidia
from fusegen.runtime.arrays import ArrayView
from fusegen.runtime.kernel import Kernel
from fusegen.runtime.program import Program
from fusegen.targets import H200
from tests.chains_cut import mlp
from tests.runtime.test_devices import FakeCuda, address_of, binary

SIZES = {"M": 512, "H": 1024, "K": 512}
CHAIN = mlp.at(**SIZES)


class Driver(FakeCuda):
    """Notes each launch as the kernel, the stream and the addresses of its arrays. A tensor map begins with its
    address; `asked` are the addresses that it made one for."""

    def __init__(self, real: Any) -> None:
        super().__init__(real)
        self.kernels: dict[int, str] = {}
        self.plans: dict[str, Any] = {}
        self.asked: list[int] = []
        self.dependent: list[bool] = []  # of each launch: may it begin while the one before it runs?
        self.version = nvidia.DEPENDENT_DRIVER
        self.names: list[Any] = []

    def cuModuleGetFunction(self, module: object, name: bytes) -> tuple[Any, ...]:
        self.names.append(ctypes.create_string_buffer(name))
        address = ctypes.addressof(self.names[-1])
        self.kernels[address] = name.decode()
        return self.result(address)

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self.result(self.version)

    def encode(self, to: int, kind: int, rank: int, base: int, *rest: Any) -> int:
        self.asked.append(base)
        ctypes.c_uint64.from_address(to).value = base
        return 0

    def start(self, config: Any, function: Any, table: Any, extra: None) -> int:
        time.sleep(0)
        kernel = self.kernels[address_of(function)]
        params = self.plans[kernel].params
        slots = (ctypes.c_void_p * len(params)).from_address(address_of(table))
        arrays = [(p, at) for p, at in zip(params, slots, strict=True) if p.kind in ("pointer", "map")]
        addresses = tuple(ctypes.c_uint64.from_address(at).value for _, at in arrays)
        given = nvidia.Config.from_address(address_of(config))
        stream = given.stream or 0
        attributes = [nvidia.Attribute.from_address(given.attributes)] if given.attribute_count else []
        self.dependent.append([(a.id, a.value[0]) for a in attributes] == [(nvidia.STREAM_SERIALIZATION, 1)])
        self.note(stream, lambda on: (kernel, on, *addresses))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda.bindings is missing: pip install cuda-bindings")
    fake = Driver(real)
    monkeypatch.setattr(nvidia, "driver", lambda: fake)
    monkeypatch.setattr(nvidia, "launcher", lambda: fake.start)
    monkeypatch.setattr(nvidia, "encoder", lambda: fake.encode)
    nvidia.device.cache_clear()
    nvidia.launches_dependent.cache_clear()
    yield fake
    nvidia.device.cache_clear()
    nvidia.launches_dependent.cache_clear()


def program_on(driver: Driver) -> Program:
    found = plan(CHAIN, H200)
    assert isinstance(found, ProgramPlan)
    kernels = []
    for step in found.steps:
        source = render(step.plan)
        driver.plans[step.name] = step.plan
        kernels.append(Kernel(source, binary(source), nvidia.device(0), lambda layout: pytest.fail(str(layout))))
    return Program(found, kernels, nvidia.device(0))


def arrays() -> list[ArrayView]:
    """The operands, then the output, which is like the first."""
    shapes = [tuple(SIZES[str(size)] for size in t.shape) for t in (*CHAIN.graph.inputs, *CHAIN.graph.outputs)]
    device = nvidia.device(0)
    return [device.empty(2 * rows * cols).view(CHAIN.graph.inputs[0].dtype, (rows, cols)) for rows, cols in shapes]


def launches(given: list[ArrayView], between: int, stream: int) -> list[tuple[object, ...]]:
    x, gate, up, down, out = (array.address for array in given)
    return [("mlp_h", stream, x, gate, up, between), ("mlp_out", stream, down, between, out)]


def test_a_like_call_launches_and_does_nothing_else(driver: Driver) -> None:
    program, given = program_on(driver), arrays()
    assert [sum(p.kind == "map" for p in step.plan.params) for step in program.plan.steps] == [4, 3]
    program(*given[:4], out=given[4])
    (room,) = program.workspaces.values()
    wanted = launches(given, room.address, 0)
    assert driver.launched == wanted
    x, gate, up, down, out = (array.address for array in given)
    assert sorted(driver.asked) == sorted([x, gate, up, room.address, room.address, down, out])
    prepared = program.prepare(*given[:4], out=given[4])
    driver.asked.clear()
    driver.calls.clear()
    for _ in range(3):
        program(*given[:4], out=given[4])
        prepared()
    assert driver.launched == 7 * wanted
    assert (driver.asked, driver.calls) == ([], []), "no map is made, no context pushed"


def test_kernels_but_the_first_are_launched_to_begin_early(driver: Driver) -> None:
    """Whichever way they are launched: by a call that finds its way, by one that repeats, with other addresses, in a
    graph, and with all care."""
    program, given, other = program_on(driver), arrays(), arrays()
    for tensors in (given, given, other, given):
        program(*tensors[:4], out=tensors[4])
    program.prepare(*given[:4], out=given[4])()
    program.graph(*given[:4], out=given[4])()
    assert driver.dependent == [False, True] * (len(driver.dependent) // 2)
    driver.dependent.clear()
    (record,) = program.records.values()
    (room,) = program.workspaces.values()
    record.launches[1].run([*(a.address for a in given), room.address], (), 0)
    assert driver.dependent == [True]
    assert driver.launched[-1] == launches(given, room.address, 0)[1]


def test_an_older_driver_launches_one_behind_the_other(driver: Driver) -> None:
    driver.version = 12020
    program, given = program_on(driver), arrays()
    program(*given[:4], out=given[4])
    assert driver.dependent == [False, False]


def test_only_maps_of_other_addresses_are_made(driver: Driver) -> None:
    program, given, other = program_on(driver), arrays(), arrays()
    program(*given[:4], out=given[4])
    (room,) = program.workspaces.values()
    driver.asked.clear()
    driver.launched.clear()
    mixed = [other[0], *given[1:4], other[4]]
    program(*mixed[:4], out=mixed[4])
    assert driver.asked == [other[0].address, other[4].address]
    program(*given[:4], out=given[4])
    program(*mixed[:4], out=mixed[4])
    assert len(driver.asked) == 2, "both are remembered"
    program(*given[:4], out=given[4], stream=7)
    second = program.workspaces[("cuda", 0), 7]
    assert driver.asked[2:] == [second.address] * 2, "another stream, another workspace"
    assert driver.launched == [
        *launches(mixed, room.address, 0), *launches(given, room.address, 0), *launches(mixed, room.address, 0),
        *launches(given, second.address, 7),
    ]  # fmt: skip


def test_calls_of_many_threads_on_one_stream_are_one_after_the_other(driver: Driver) -> None:
    """They share a workspace: no kernel of one may stand between two of another."""
    program = program_on(driver)
    each = [arrays() for _ in range(4)]
    program(*each[0][:4], out=each[0][4])
    (room,) = program.workspaces.values()
    driver.launched.clear()

    def work(given: list[ArrayView]) -> None:
        for _ in range(50):
            program(*given[:4], out=given[4])

    threads = [threading.Thread(target=work, args=(given,)) for given in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pairs = list(zip(driver.launched[::2], driver.launched[1::2], strict=True))
    assert len(pairs) == 200
    assert set(pairs) == {tuple(launches(given, room.address, 0)) for given in each}


def test_graphs_have_workspaces_of_their_own(driver: Driver) -> None:
    """So that they may run at the same time, beside calls too; it goes with the graph."""
    program, given, other = program_on(driver), arrays(), arrays()
    before = set(driver.blocks)
    first = program.graph(*given[:4], out=given[4])
    second = program.graph(*other[:4], out=other[4], stream=5)
    assert (driver.launched, driver.streams, program.workspaces) == ([], [], {})
    rooms = sorted(set(driver.blocks) - before, key=list(driver.blocks).index)
    assert len(rooms) == 2
    first()
    first(stream=3)
    second()
    assert driver.launched == [
        *launches(given, rooms[0], 0), *launches(given, rooms[0], 3), *launches(other, rooms[1], 5),
    ]  # fmt: skip
    assert first.result is given[4]
    assert len(driver.graphs) == 2
    del first, second
    gc.collect()
    assert not driver.graphs
    assert set(driver.blocks) == before


def test_a_graph_in_the_callers_workspace(driver: Driver) -> None:
    program, given = program_on(driver), arrays()
    room = nvidia.device(0).empty(program.workspace_bytes()).view(u8, (program.workspace_bytes(),))
    program.graph(*given[:4], out=given[4], workspace=room)()
    assert driver.launched == launches(given, room.address, 0)
    with pytest.raises(ArgumentError, match=r"mlp: workspace has 524288 bytes .* and these sizes take 1048576"):
        program.graph(*given[:4], out=given[4], workspace=arrays()[4])


def test_no_graph_of_arrays_that_never_change(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    program, given = program_on(driver), arrays()
    monkeypatch.setattr(called, "owner_of", lambda arrays: "jax")
    with pytest.raises(ArgumentError, match=r"mlp: graph takes arrays whose memory .*, and those of jax never do"):
        program.graph(*given[:4], out=given[4])


def test_no_graph_is_captured_within_another(driver: Driver) -> None:
    program, given = program_on(driver), arrays()
    driver.captured[8] = []
    with pytest.raises(KernelError, match="one is being captured on this stream\n  call mlp itself"):
        program.graph(*given[:4], out=given[4], stream=8)
    program(*given[:4], out=given[4], stream=8)
    assert (len(driver.captured[8]), driver.launched) == (2, [])
