"""Rows of experts that come by number or behind a mask, as DeepGEMM has them, and layers as models write them."""

from __future__ import annotations

import numpy as np
import pytest

import fusegen
from fusegen import Chain, bf16, chain, dims, f8e4m3, f16, f32, i32
from fusegen import ops as F

pytestmark = pytest.mark.usefixtures("emulated_only")

T, M, N, K, E = dims("T M N K E")
TARGETS = ("cuda:h200", "cuda:a100", "hip:mi300x")


@chain(T=96, N=64, K=64, E=4)
def of_ids(x: f16[T, K], w: f16[E, N, K], ids: i32[T]) -> f16[T, N]:
    order, ends, places = F.sort_by_group(ids, E)
    y = F.cast(F.grouped_matmul(F.gather(x, order), w.mT, ends), f16)
    return F.gather(y, places)


@chain(M=24, N=64, K=64, E=4)
def masked(x: f16[E, M, K], w: f16[E, N, K], counts: i32[E]) -> f16[E, M, N]:
    one = x[:, :, 0]
    experts = F.where(F.col_index(one) < counts[:, None], F.row_index(one), -1)
    order, ends, places = F.sort_by_group(experts, E)
    rows = F.gather(F.rearrange(x, "e m k -> (e m) k"), order)
    y = F.cast(F.grouped_matmul(rows, w.mT, ends), f16)
    return F.rearrange(F.gather(y, F.rearrange(places, "e m -> (e m)")), "(e m) n -> e m n", e=E)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(-3, 4, shape).astype(np.float16)


@pytest.mark.parametrize("name", TARGETS)
def test_rows_with_the_number_of_their_expert(name: str) -> None:
    kernel = fusegen.compile(of_ids, name, on="emulator")
    x, w = drawn(96, 64), drawn(4, 64, 64)
    ids = np.array([*[0] * 30, *[-1] * 2, *[1] * 17, *[-1] * 15, *[3] * 31, 7], np.int32)  # padded to 32, one unknown
    for given in (ids, np.random.default_rng(5).permutation(ids)):
        wanted = [x[t].astype(int) @ w[e].T.astype(int) if 0 <= e < 4 else np.zeros(64) for t, e in enumerate(given)]
        np.testing.assert_array_equal(np.asarray(kernel(x, w, given)), np.array(wanted))


@pytest.mark.parametrize("name", TARGETS)
def test_rows_of_which_counts_say_how_many_there_are(name: str) -> None:
    kernel = fusegen.compile(masked, name, on="emulator")
    x, w, counts = drawn(4, 24, 64), drawn(4, 64, 64), np.array([24, 0, 1, 13], np.int32)
    wanted = np.einsum("emk,enk->emn", x.astype(int), w.astype(int))
    for e, count in enumerate(counts):
        wanted[e, count:] = 0
        x[e, count:] = np.nan  # what is not there is not multiplied
    np.testing.assert_array_equal(np.asarray(kernel(x, w, counts)), wanted)


# ---------------------------------------------------------------- layers as models write them

D, H, V = dims("D H V")


@chain(T=12, D=64, H=32, E=4)
def one_expert(x: bf16[T, D], router: bf16[E, D], up: bf16[E, H, D], down: bf16[E, D, H]) -> bf16[T, D]:
    """Switch: each token by the best expert alone, weighed by its probability."""
    best, experts = F.topk(F.softmax(x @ router.T), 1)
    order, ends, places = F.sort_by_group(experts, E)
    h = F.gelu(F.grouped_matmul(F.gather(x, order), up.mT, ends))
    return F.gather_sum(F.cast(F.grouped_matmul(h, down.mT, ends), bf16), places, best)


@chain(T=12, D=64, N=32, E=4)
def quantized_once(x: bf16[T, D], ids: i32[T, 2], w: f8e4m3[E, N, D], scale: f32[E, N]) -> bf16[2 * T, N]:
    """Tokens are quantized before their experts take them, and not once for each of these."""
    order, ends, _ = F.sort_by_group(ids, E)
    q, row = F.quantize(x, f8e4m3, per="row")
    return F.grouped_matmul(F.gather(q, order // 2), w.mT, ends, scale=scale) * F.gather(row, order // 2)


@chain(T=6, D=64, E=16)
def router_of_f32(x: bf16[T, D], router: f32[E, D], bias: f32[E]) -> tuple[f32[T, 4], i32[T, 4]]:
    """DeepSeek-V3's router, whose weights are of f32: chosen with a bias, weighed without."""
    high = F.cast(router, bf16)
    scores = F.sigmoid(x @ high.T + x @ F.cast(router - high, bf16).T)
    _, experts = F.topk(scores + bias, 4)
    weights = F.take(scores, experts)
    return weights / F.sum(weights), experts


@chain(T=6, D=64, V=96)
def taken_of_a_product(x: bf16[T, D], y: bf16[T, D], w: bf16[V, D]) -> tuple[i32[T, 4], f32[T, 4]]:
    _, columns = F.topk(x @ w.T, 4)
    return columns, F.take(F.softmax(y @ w.T), columns)


@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("spec", [one_expert, quantized_once, router_of_f32, taken_of_a_product], ids=lambda s: s.name)
def test_layers_as_models_write_them(spec: Chain, name: str) -> None:
    if spec is quantized_once and name == "hip:mi300x":
        pytest.skip("an MI300X multiplies no 8-bit floats of OCP")
    report = fusegen.compile(spec, name, on="emulator").report
    assert report is not None
    assert report.ok, str(report)[:2000]
