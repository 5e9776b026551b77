"""The shipped specs with matrix products: every one validated in full, by its small sizes, for both vendors."""

from __future__ import annotations

import pytest

import fusegen
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.products import split
from fusegen.spec import Chain
from fusegen.targets import A100, H200, MI300X, TARGETS, Target
from fusegen.types import DTYPES
from fusegen.validation import validate
from tests.specs import PRODUCTS, storage_types

ODD = {"M": 37, "N": 75, "K": 83, "B": 2, "S": 19, "L": 21}  # no multiple of anything
EVEN = {"M": 64, "N": 96, "K": 64, "B": 2, "S": 16, "L": 32}
ONE = dict.fromkeys(ODD, 1) | {"M": 3}
SIZES = {"odd": ODD, "even": EVEN, "one": ONE}


def have_compiler() -> bool:
    try:
        compiler()
    except EmulatorUnavailable:
        return False
    return True


needs_compiler = pytest.mark.skipif(not have_compiler(), reason="needs a C++ compiler; see `fusegen doctor`")


def at(spec: Chain, sizes: dict[str, int]) -> Chain:
    return spec.at(**{name: sizes[name] for name in spec.graph.sizes})


def test_the_specs_are_those_that_users_know() -> None:
    assert set(PRODUCTS) == {
        "gemm_bias_gelu", "gemm_bias_relu_residual", "gemm_swiglu", "qkv", "rmsnorm_gemm", "rmsnorm_gemm_swiglu",
    }  # fmt: skip
    for spec in PRODUCTS.values():
        assert split(spec.graph).products


@needs_compiler
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("gpu", [A100, H200, MI300X, TARGETS["hip:mi250x"]], ids=str)
def test_every_spec_passes_in_full(name: str, sizes: str, gpu: Target) -> None:
    spec = at(PRODUCTS[name], SIZES[sizes])
    kernel = fusegen.compile(spec, gpu, on="emulator", validate=False)
    validate(kernel, quick=sizes != "odd").raise_for_error()


@needs_compiler
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_spec_passes_in_every_type(name: str) -> None:
    for dtype in storage_types(PRODUCTS[name]):
        spec = at(PRODUCTS[name], ODD).with_dtype(DTYPES[dtype])
        validate(fusegen.compile(spec, H200, on="emulator", validate=False), quick=True).raise_for_error()
