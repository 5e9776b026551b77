"""Timing without a GPU: a pretended one writes down what is asked of it and keeps a clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.errors import RequestError
from fusegen.measuring.operands import MOST_SETS, TILE_BYTES, operands, rotation
from fusegen.measuring.timing import FLUSH_BYTES, Stopwatch, Timing, percentile
from fusegen.runtime.emulated import EmulatorDevice
from fusegen.runtime.finding import find, present, target_of
from fusegen.runtime.gpu import GpuDevice
from fusegen.targets import target
from tests import grouped
from tests.pretend import RATE, PretendGpu
from tests.specs import SHIPPED

M, N = dims("M N")


@chain(M=3, N=8)
def mixed(x: f16[M, N], mask: b8[M, N], places: i32[M, 1], gain: bf16[N], scale: f32) -> tuple[f16[M, N], f32[M, 1]]:
    """An operand of every kind."""
    y = F.where(mask, x * gain, scale)
    return y, F.sum(y) + F.cast(places, f32)


def test_percentiles() -> None:
    timing = Timing(tuple(float(n) for n in (4, 1, 2, 3, 0, 10, 9, 8, 7, 6, 5)))
    assert (timing.median, timing.low, timing.high) == (5.0, 1.0, 9.0)
    assert timing.spread == 8 / 5
    assert percentile([1.0], 0.9) == 1.0
    assert percentile([0.0, 1.0], 0.25) == 0.25
    assert str(timing) == "5.0 us (1.0 to 9.0)"


def test_each_launch_is_timed_alone_behind_a_fill() -> None:
    gpu = PretendGpu()
    watch = Stopwatch(gpu)
    gpu.asked.clear()
    launches = [lambda stream: gpu.work("a", 10.0), lambda stream: gpu.work("b", 30.0)]
    timing = watch.time(launches, repeats=4, warmup=1)
    assert timing.us == (10.0, 30.0, 10.0, 30.0)
    warm, timed = gpu.asked[:4], gpu.asked[4:]
    assert warm == ["fill", "a", "fill", "b"]  # each of them once at least
    assert timed == ["wait", *["fill", "mark", "a", "mark", "fill", "fill", "mark", "b", "mark"] * 2, "wait"]


@pytest.mark.parametrize("kernels", [1, 2, 3, 4])
@pytest.mark.parametrize("contenders", [1, 2, 3, 4])
def test_launches_of_all_numbers_modulo_four_are_timed_alike(kernels: int, contenders: int) -> None:
    gpu = PretendGpu()
    numbers: list[list[int]] = [[] for _ in range(contenders)]

    def launches(place: int) -> Any:
        def launch(stream: int) -> None:
            numbers[place].append(sum(word != "mark" for word in gpu.asked) % 4)
            for _ in range(kernels):
                gpu.work("kernel", 1.0)

        return [launch]

    watch = Stopwatch(gpu)
    gpu.asked.clear()
    watch.time_together([launches(place) for place in range(contenders)], repeats=16, warmup=1)
    for met in numbers:
        timed = met[1:]
        assert [timed.count(number) for number in range(4)] == [4] * 4


def test_what_is_compared_takes_turns() -> None:
    gpu = PretendGpu()
    watch = Stopwatch(gpu)
    gpu.asked.clear()
    one = [lambda stream: gpu.work("a", 10.0), lambda stream: gpu.work("b", 30.0)]
    other = [lambda stream: gpu.work("c", 5.0)]
    timings = watch.time_together([one, other], repeats=2, warmup=1)
    assert [timing.us for timing in timings] == [(10.0, 30.0), (5.0, 5.0)]
    assert gpu.asked[:6] == ["fill", "a", "fill", "b", "fill", "c"]
    assert [word for word in gpu.asked[6:] if word in "abc"] == ["a", "c", "b", "c"]


def test_turns_may_be_shuffled() -> None:
    gpu = PretendGpu()
    watch = Stopwatch(gpu)
    gpu.asked.clear()
    each = [[lambda stream, word=word, us=us: gpu.work(word, us)] for word, us in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    timings = watch.time_together(each, repeats=8, warmup=1, shuffled=True)
    assert [timing.us for timing in timings] == [(us,) * 8 for us in (1.0, 2.0, 3.0)]  # whose time is whose
    words = "".join(word for word in gpu.asked[6:] if word in "abc")
    turns = [words[at : at + 3] for at in range(0, 24, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert {turn[0] for turn in turns} == {"a", "b", "c"}  # each comes first in some turn


def test_a_slow_host_gets_a_longer_fill() -> None:
    gpu = PretendGpu()
    watch = Stopwatch(gpu)
    gpu.asked.clear()
    watch.time([lambda stream: time.sleep(0.002)], repeats=1, warmup=1)
    assert gpu.asked.count("fill") > 20  # 2 ms of queueing, twice, in fills of 80 µs


def test_the_copy_rate_counts_both_directions_and_is_measured_once() -> None:
    gpu = PretendGpu()
    watch = Stopwatch(gpu)
    assert watch.copy_rate() == pytest.approx(RATE)
    gpu.asked.clear()
    watch.copy_rate()
    assert gpu.asked == []


def test_the_emulator_gives_no_times() -> None:
    with pytest.raises(RequestError, match="gives no times"):
        Stopwatch(EmulatorDevice(target("cuda:h200"), check=False))


@pytest.mark.parametrize(("launches", "repeats"), [([], 3), ([lambda stream: None], 0)])
def test_nothing_to_time(launches: Sequence[Any], repeats: int) -> None:
    with pytest.raises(RequestError, match="at least"):
        Stopwatch(PretendGpu()).time(launches, repeats)


# ---------------------------------------------------------------- operands


def test_operands_are_ordinary_and_the_same_again() -> None:
    device = EmulatorDevice(target("cuda:h200"), check=False)
    graph = mixed.at(M=513, N=2049).graph  # 2 MB of halves: two tiles and a bit
    one, again, other = operands(device, graph), operands(device, graph), operands(device, graph, seed=1)
    x, mask, places, gain, scale = one.inputs
    assert [v.shape for v in one.inputs[:4]] == [(513, 2049), (513, 2049), (513, 1), (2049,)]
    assert [v.shape for v in one.outputs] == [(513, 2049), (513, 1)]
    values = x.numpy().reshape(-1)
    assert np.isfinite(values).all()
    assert 0.9 < values.astype(np.float32).std() < 1.1
    assert (values[: TILE_BYTES // 2] == values[TILE_BYTES // 2 : TILE_BYTES]).all()
    assert 0.4 < mask.numpy().mean() < 0.6
    assert set(np.unique(places.numpy())) == {0, 1}
    assert isinstance(scale, float)
    assert gain.numpy().shape == (2049,)
    assert (again.inputs[0].numpy() == x.numpy()).all()
    assert (other.inputs[0].numpy() != x.numpy()).any()


def test_bounds_leave_out_nothing() -> None:
    """A cache's lengths are all of it; what is an index too names its last row; first columns are the first."""
    device = EmulatorDevice(target("cuda:h200"), check=False)

    def drawn(name: str, operand: str, **sizes: int) -> Any:
        graph = SHIPPED[name].at(**sizes).graph
        places = {t.name: place for place, t in enumerate(graph.inputs)}
        return operands(device, graph).inputs[places[operand]].numpy()

    lengths = drawn("mla_decode", "length", B=3, H=2, T=40, D=24, E=16)
    assert lengths.shape == (3, 1, 1)
    assert (lengths == 40).all()
    assert (drawn("decoder_layer", "position", B=2, D=64, H=2, G=2, E=16, T=32, U=96) == 31).all()
    assert (drawn("document_attention", "start", H=1, S=9, T=9, D=16) < 2).all()


def test_groups_of_rows_are_as_likely_one_as_another() -> None:
    device = EmulatorDevice(target("cuda:h200"), check=False)
    graph = grouped.plain.at(T=6000, N=8, K=8, E=6).graph
    ends = operands(device, graph).inputs[2].numpy()
    sizes = np.diff(ends, prepend=0)
    assert ends[-1] == 6000
    assert sizes.min() > 800
    assert len(set(sizes.tolist())) > 1


def test_small_operands_take_turns() -> None:
    device = EmulatorDevice(target("cuda:h200"), check=False)
    assert len(rotation(device, mixed.graph)) == MOST_SETS
    assert len(rotation(device, mixed.graph, budget=0)) == 1


# ---------------------------------------------------------------- a real one


@pytest.mark.gpu
def test_a_gpu_keeps_time() -> None:
    gpus = [gpu for gpu in present().gpus if target_of(gpu)]
    if not gpus:
        pytest.skip("no GPU that a target fits: `fusegen doctor` says why")
    fitting = target_of(gpus[0])
    assert fitting is not None
    device = find(fitting, "gpu")
    assert isinstance(device, GpuDevice)
    watch = Stopwatch(device)
    sheet = fitting.dram_gbs * 1e3  # bytes per µs
    assert 0.5 * sheet < watch.copy_rate() < sheet
    memory = device.empty(FLUSH_BYTES)
    half = watch.time([lambda stream: device.fill(memory.address, FLUSH_BYTES // 2, stream)])
    whole = watch.time([lambda stream: device.fill(memory.address, FLUSH_BYTES, stream)])
    assert 1.5 < whole.median / half.median < 2.5
    assert len(whole.us) == 30
