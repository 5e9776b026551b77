"""Rows of experts that come by number or behind a mask, as DeepGEMM's contracts have them, against loops in numpy."""

from __future__ import annotations

import numpy as np
import pytest

import fusegen
from fusegen import chain, dims, f16, i32
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
