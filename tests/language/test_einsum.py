"""F.einsum against numpy's own, and what it refuses."""

from __future__ import annotations

import re
from typing import Any, cast

import numpy as np
import pytest

from fusegen import bf16, chain, dims, f32
from fusegen import ops as F
from fusegen.errors import SpecError
from fusegen.language.spec import Chain
from fusegen.language.types import Dim, DType
from fusegen.pipeline import compile
from fusegen.runtime.program import Program
from fusegen.targets import H200, MI300X, Target

pytestmark = pytest.mark.usefixtures("emulated_only")

SIZES = {"b": 2, "h": 3, "d": 16, "i": 5, "j": 7, "k": 64, "m": 32, "n": 48, "s": 32, "t": 48}
AXES: dict[str, Dim] = dict(zip(SIZES, cast(Any, dims(" ".join(map(str.upper, SIZES)))), strict=True))


def spec_of(pattern: str, dtype: DType, precision: str | None = None) -> Chain:
    left, out = pattern.split("->")
    terms = left.split(",")

    def spec(x: Any, y: Any = None) -> Any:
        operands = (x,) if len(terms) == 1 else (x, y)
        return F.einsum(pattern, *operands, precision=precision)

    def one(x: Any) -> Any:
        return spec(x)

    made = one if len(terms) == 1 else spec
    named = dict(zip("xy", terms, strict=False))
    made.__annotations__ = {name: dtype[tuple(AXES[a] for a in term)] for name, term in named.items()}
    made.__annotations__["return"] = f32[tuple(AXES[a] for a in out) or 1]
    made.__defaults__ = None
    return chain(**{a.upper(): SIZES[a] for a in dict.fromkeys("".join((*terms, out)))})(made)


@pytest.mark.parametrize(
    ("pattern", "kernels"),
    [
        ("ij->ji", 1), ("ij->i", 1), ("ij->j", 1), ("i,i->", 1), ("ij,ij->i", 1), ("ij,j->i", 1), ("i,ij->j", 1),
        ("i,j->ji", 1), ("ij,ji->ij", 1), ("ij,kj->i", 2),
    ],
)  # fmt: skip
def test_sums_and_products_of_elements(pattern: str, kernels: int) -> None:
    check(spec_of(pattern, f32), pattern, f32, H200 if len(pattern) % 2 else MI300X, kernels)


@pytest.mark.parametrize(
    ("pattern", "kernels"),
    [
        ("mk,nk->mn", 1), ("mk,kn->mn", 1), ("mk,nk->nm", 2), ("bmk,bnk->bmn", 1), ("bshd,bthd->bhst", 1),
        ("mk,khd->mhd", 1), ("mhd,hdn->mn", 1),
    ],
)  # fmt: skip
@pytest.mark.by_values("pattern", "target")  # what a pattern means is no target's own
@pytest.mark.parametrize("target", [H200, MI300X], ids=str)
def test_matrix_products(pattern: str, kernels: int, target: Target) -> None:
    check(spec_of(pattern, bf16), pattern, bf16, target, kernels)


def check(spec: Chain, pattern: str, dtype: DType, target: Any, kernels: int) -> None:
    rng = np.random.default_rng(1)
    terms = pattern.split("->")[0].split(",")
    arrays = [rng.standard_normal([SIZES[a] for a in term]).astype(dtype.numpy) for term in terms]
    run = compile(spec, target, on="emulator")
    wanted = np.einsum(pattern, *(array.astype(np.float64) for array in arrays))
    np.testing.assert_allclose(np.reshape(run(*arrays), wanted.shape), wanted, rtol=1e-4, atol=1e-4)
    assert (len(run.kernels) if isinstance(run, Program) else 1) == kernels


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("ij,jk", "'ij,jk' is no pattern; write it as in"),
        ("...j,jk->...k", "every axis is one letter; `...` is not taken"),
        ("ii,ij->j", "a letter stands twice in 'ii'; diagonals are not taken"),
        ("i,ij->j", "'i' names other axes than [I, J] has"),
        ("ij,jk->il", "no operand has the result's l"),
        ("ij,ji->i", "i is I and K"),
        ("ij->i", "of 2 operands: it says 1"),
    ],
)
def test_what_is_refused(pattern: str, said: str) -> None:
    def spec(x: Any, y: Any) -> Any:
        return F.einsum(pattern, x, y)

    spec.__annotations__ = {"x": f32[AXES["i"], AXES["j"]], "y": f32[AXES["j"], AXES["k"]], "return": f32[1]}
    with pytest.raises(SpecError, match=re.escape(said)):
        chain(I=5, J=7, K=64)(spec)


def test_three_operands_are_taken_two_at_a_time() -> None:
    def spec(x: Any, y: Any) -> Any:
        return F.einsum("ij,jk,ij->k", x, y, x)

    spec.__annotations__ = {"x": f32[AXES["i"], AXES["j"]], "y": f32[AXES["j"], AXES["k"]], "return": f32[1]}
    with pytest.raises(SpecError, match="of 3 operands: it takes one or two; of more, take two at a time"):
        chain(I=5, J=7, K=64)(spec)
