"""The handler in C: run by XLA on the CPU, over a driver that is written here and launches in the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.errors import FusegenError
from fusegen.language.types import f32 as float32
from fusegen.runtime import called
from fusegen.runtime.emulated import VALUES
from fusegen.runtime.program import StepLaunch
from tests.tools import needs_compiler

jax: Any = pytest.importorskip("jax", reason="jax is missing: pip install 'fusegen[jax]'")
from fusegen.jax import calls, ffi, handlers, native, op  # noqa: E402

pytestmark = [needs_compiler, pytest.mark.usefixtures("emulated_only")]

M, N, K, E = dims("M N K E")
STREAM, CONTEXT, OTHER = 0x5EA0, 0xC070, 0xC071
NO_MEMORY = 2
METADATA = 1  # XLA_FFI_Extension_Metadata
numpy: Any = jax.numpy

Status = CFUNCTYPE(c_int, c_void_p)
Out = CFUNCTYPE(c_int, POINTER(c_void_p))
Started = CFUNCTYPE(c_int, c_void_p, *[c_uint32] * 7, c_void_p, POINTER(c_void_p), c_void_p)
Encoded = CFUNCTYPE(c_int, POINTER(c_uint64), c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64),
                    POINTER(c_uint32), POINTER(c_uint32), c_int, c_int, c_int, c_int)  # fmt: skip
StreamGet = CFUNCTYPE(c_void_p, c_void_p)


class Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, as far as every version has it."""

    _fields_ = (("struct_size", c_size_t), ("version", ffi.Version), ("traits", c_uint32))


class MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (("base", ffi.Extension), ("metadata", POINTER(Metadata)))


class StreamAsked(ctypes.Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = (*ffi.HEAD, ("context", c_void_p), ("stream", c_void_p))


@chain(M=256, N=64, K=64, E=2)
def by_groups(x: bf16[M, K], w: bf16[E, N, K], ends: i32[E]) -> bf16[M, N]:
    return F.grouped_matmul(x, w.mT, ends)


@chain(M=16, N=32)
def scaled(x: f32[M, N], factor: f32, shift: i32) -> f32[M, N]:
    """Run-time scalars of two types."""
    return x * factor + F.cast(shift, f32)


@chain(M=16, N=32)
def rms_backward(x: f32[M, N], gain: f32[N], dout: f32[M, N]) -> tuple[f32[M, N], f32[N]]:
    """Two kernels with a workspace between them."""
    rrms = F.rsqrt(F.mean(x * x) + 1e-6)
    normalized, given = x * rrms, dout * gain
    return rrms * (given - normalized * F.mean(given * normalized)), F.sum(dout * normalized, over=M)[0]


@chain(M=128, N=128, K=64)
def product(x: bf16[M, K], w: bf16[N, K]) -> f32[M, N]:
    """On Hopper, by wgmma and tensor copies."""
    return x @ w.mT


class Driver:
    """CUDA's, as far as the handler calls it. What it was asked is noted; a launch runs in the emulator."""

    def __init__(self) -> None:
        self.current = CONTEXT
        self.stack: list[int] = []
        self.launches: list[str] = []
        self.encoded: dict[int, tuple[int, int]] = {}  # by the number in the map: the address, and the rank
        self.refuses = 0
        self.steps: dict[int, StepLaunch] = {}
        self.functions = (Started(self.start), Encoded(self.encode), CFUNCTYPE(c_int, c_void_p, POINTER(c_void_p))(
            self.context_of), Out(self.now), Status(self.push), Out(self.pop),
            CFUNCTYPE(c_int, c_int, POINTER(c_char_p))(self.name))  # fmt: skip

    def start(self, function: int, x: int, y: int, z: int, *rest: Any) -> int:
        block, shared, stream, table = rest[:3], rest[3], rest[4], rest[5]
        if self.refuses:
            return self.refuses
        step = self.steps[function]
        record = step.record
        plan, launch = record.variant.plan, record.launch
        assert (x, y, z) == (*plan.grid(launch.blocks), 1)
        assert (block, shared, stream) == ((plan.threads, 1, 1), plan.shared_bytes, STREAM)
        assert self.current == CONTEXT
        pointers, values, numbers, maps = [], [], [], iter(launch.maps)
        mapped: dict[str, int] = {}
        for place, param in enumerate(plan.params):
            at = table[place]
            if param.kind == "map":
                assert at % 64 == 0
                address, rank = self.encoded[c_uint64.from_address(at).value]
                assert rank == len(next(maps).shape)
                pointers.append(address)
                mapped[param.tensor] = address
            elif param.kind == "pointer":
                pointers.append(c_void_p.from_address(at).value or 0)
            elif param.kind == "value":
                values.append(VALUES[param.dtype or float32].from_address(at).value)
            elif param.kind == "address":
                assert c_void_p.from_address(at).value == mapped[param.tensor]
            else:
                numbers.append(ctypes.c_int64.from_address(at).value)
        assert tuple(numbers) == launch.numbers
        self.launches.append(plan.name)
        assert record.loaded is not None
        record.loaded.launch(launch, pointers, values, 0)
        return 0

    def encode(self, made: Any, kind: int, rank: int, address: int, shape: Any, strides: Any, box: Any, steps: Any,
               *rest: int) -> int:  # fmt: skip
        number = len(self.encoded) + 1
        given = [one for step in self.steps.values() for one in step.record.launch.maps]
        wanted = [one.at(address).driver_arguments() for one in given]
        assert (rank, tuple(shape[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]), tuple(steps[:rank])) in wanted
        made[0] = number
        self.encoded[number] = address, rank
        return 0

    def context_of(self, stream: int, context: Any) -> int:
        assert stream == STREAM
        context[0] = CONTEXT
        return 0

    def now(self, context: Any) -> int:
        context[0] = self.current
        return 0

    def push(self, context: int) -> int:
        self.stack.append(self.current)
        self.current = context
        return 0

    def pop(self, context: Any) -> int:
        context[0], self.current = self.current, self.stack.pop()
        return 0

    def name(self, status: int, text: Any) -> int:
        text[0] = b"CUDA_ERROR_OUT_OF_MEMORY"
        return int(status != NO_MEMORY)


@pytest.fixture(scope="module")
def compiled() -> Any:
    """handler.c."""
    try:
        return native.built()
    except FusegenError as error:
        pytest.skip(f"no handler in C: {str(error).splitlines()[0]}")


@pytest.fixture(scope="module")
def passing_on(compiled: Any) -> Any:
    """What XLA calls on the CPU: the handler in C, with a stream that the CPU has not."""
    to_c = ffi.Handler(("fusegen_call", compiled))

    def on_no_gpu(asked: int) -> None:
        ctypes.cast(asked, POINTER(StreamAsked)).contents.stream = STREAM

    stream_get = StreamGet(on_no_gpu)

    def call(frame: Any) -> int | None:
        given = ffi.CallFrame.from_buffer_copy(frame.contents)
        if not given.extension:  # where XLA asks what the handler is, older versions pass no functions
            api = ffi.Api.from_buffer_copy(given.api.contents)
            api.stream_get = ctypes.cast(stream_get, c_void_p).value
            given.api = ctypes.pointer(api)
        found: int | None = to_c(ctypes.byref(given))
        return found

    handler = ffi.Handler(call)
    jax.ffi.register_ffi_target("fusegen_c", jax.ffi.pycapsule(ctypes.cast(handler, c_void_p).value), platform="cpu")
    return handler, stream_get  # kept alive


@pytest.fixture
def driver(compiled: Any, passing_on: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Operators that are lowered now go through the handler in C to this driver."""
    made = Driver()
    addresses = [ctypes.cast(function, c_void_p).value or 0 for function in made.functions]
    library = native.Library(compiled, addresses, id, lambda device: CONTEXT)

    def add(call: Any) -> None:
        made.steps |= {id(step.record.loaded): step for step in call.launches}
        library.add(call)

    monkeypatch.setattr(ffi, "TARGET", "fusegen_c")
    monkeypatch.setattr(handlers, "registered", lambda platform: add)
    yield made
    assert not made.stack
    KEPT.append((made, library))  # XLA's programs may outlive a test


KEPT: list[Any] = []


def test_arguments_of_every_kind_reach_the_kernel(driver: Driver) -> None:
    x = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    found = jax.jit(lambda x: op(scaled)(x, 2.5, -3))(x)
    np.testing.assert_allclose(found, x * np.float32(2.5) - 3, rtol=1e-6)
    assert driver.launches == ["scaled"]


def test_programs_have_xlas_memory_between_their_kernels(driver: Driver) -> None:
    rng = np.random.default_rng(0)
    x, gain, dout = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 32), (32,), (9, 32)))
    dx, dgain = jax.jit(op(rms_backward))(x, gain, dout)
    rrms = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    wanted = rrms * (dout * gain - x * rrms * (dout * gain * x * rrms).mean(-1, keepdims=True))
    np.testing.assert_allclose(dx, wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dgain, (dout * x * rrms).sum(0), rtol=1e-4, atol=1e-5)
    assert len(driver.launches) == 2


def test_tensor_maps_are_made_for_xlas_addresses(driver: Driver) -> None:
    rng = np.random.default_rng(0)
    x, w = (numpy.asarray(rng.standard_normal((128, 64)), numpy.bfloat16) for _ in range(2))
    multiply = op(product, target="cuda:h200", validate=False)
    found = jax.jit(multiply)(x, w)
    np.testing.assert_allclose(found, np.asarray(x, np.float32) @ np.asarray(w, np.float32).T, rtol=1e-5, atol=1e-5)
    assert driver.encoded, "no launch had a tensor map"


def test_what_has_a_map_may_have_its_address_besides(driver: Driver) -> None:
    """A grouped product's result: whole boxes are stored by the map, rows of others by the address."""
    rng = np.random.default_rng(0)
    x, w = (numpy.asarray(rng.standard_normal(shape), numpy.bfloat16) for shape in ((256, 64), (2, 64, 64)))
    multiply = op(by_groups, target="cuda:h200", validate=False)
    found = np.asarray(jax.jit(multiply)(x, w, np.array([100, 200], np.int32)), np.float32)
    wide, (first, second) = np.asarray(x, np.float32), np.asarray(w, np.float32)
    wanted = np.concatenate([wide[:100] @ first.T, wide[100:200] @ second.T, np.zeros((56, 64), np.float32)])
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-2)
    plans = [step.record.variant.plan for step in driver.steps.values()]
    assert any(param.kind == "address" for plan in plans for param in plan.params)


def test_a_thread_of_another_gpu_is_readied_and_left_as_it_was(driver: Driver) -> None:
    driver.current = OTHER
    x = np.ones((5, 32), np.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: op(scaled)(x, 2.0, 1))(x), 3 * x)
    assert driver.current == OTHER


def test_no_rows_are_no_launch(driver: Driver) -> None:
    assert jax.jit(lambda x: op(scaled)(x, 2.0, 1))(np.ones((0, 32), np.float32)).shape == (0, 32)
    assert not driver.launches


@pytest.mark.parametrize(("status", "said"), [(NO_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"), (999, "no name for")])
def test_what_the_driver_refuses_is_xlas_error(driver: Driver, status: int, said: str) -> None:
    driver.refuses = status
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=rf"scaled: the launch failed: CUDA says .*{said}.*\({status}\)"
    ):
        jax.jit(lambda x: op(scaled)(x, 2.0, 1))(np.ones((5, 32), np.float32)).block_until_ready()


@pytest.mark.parametrize(
    ("key", "said"), [("0" * 32, "this process knows no call 0000"), ("short", "has no attribute 'call' of ours")]
)
def test_calls_of_other_processes_are_refused(driver: Driver, key: str, said: str) -> None:
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        jax.jit(lambda x: jax.ffi.ffi_call(ffi.TARGET, shape)(x, call=key))(np.ones(4, np.float32)).block_until_ready()


def test_calls_with_other_arrays_are_refused(driver: Driver) -> None:
    scale = op(scaled)
    lowered = jax.jit(lambda x: scale(x, 2.0, 1)).lower(np.ones((5, 32), np.float32)).as_text()
    key = lowered.partition('call = "')[2][:32]
    shape = jax.ShapeDtypeStruct((5, 32), np.float32)
    call = jax.ffi.ffi_call(ffi.TARGET, shape)
    with pytest.raises(jax.errors.JaxRuntimeError, match="scaled takes 1 operands and 2 arrays, and XLA has 2 and 3"):
        jax.jit(lambda x: call(x, x + 1, call=key))(np.ones((5, 32), np.float32)).block_until_ready()


@pytest.mark.parametrize(("name", "traits"), [("fusegen_call", 1), ("fusegen_emulate", 0)])
def test_xla_is_told_whether_calls_may_be_recorded(compiled: Any, name: str, traits: int) -> None:
    told = Metadata(ctypes.sizeof(Metadata))
    asked = MetadataExtension(ffi.Extension(ctypes.sizeof(ffi.Extension), METADATA, None), ctypes.pointer(told))
    frame = ffi.CallFrame(ctypes.sizeof(ffi.CallFrame), ctypes.cast(ctypes.pointer(asked), POINTER(ffi.Extension)))
    assert not ffi.Handler((name, compiled))(ctypes.byref(frame))
    assert (told.version.major, told.traits) == (0, traits)
    assert told.version.minor > 0


def test_what_c_and_python_both_say_is_the_same() -> None:
    text = native.SOURCE.read_text()
    for name in ("MOST_ARGUMENTS", "MOST_MAPS", "MOST_ARRAYS"):
        assert f"{name} = {getattr(native, name)}," in text
    assert f"KEY = {calls.KEY_DIGITS}," in text
    assert f"WIDEST = {called.WIDEST}," in text
    assert f'memcmp(name->ptr, "{ffi.ATTRIBUTE}", {len(ffi.ATTRIBUTE)})' in text
