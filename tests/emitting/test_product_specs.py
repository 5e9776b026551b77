"""The shipped specs with matrix products: every one validated in full, by its small sizes, for both vendors."""

from __future__ import annotations

import pytest

import fusegen
from fusegen.errors import NoPlan
from fusegen.language.products import split
from fusegen.language.spec import Chain
from fusegen.language.types import DTYPES
from fusegen.planner.products.factors import lacking
from fusegen.targets import A100, H200, MI300X, TARGETS, Target
from fusegen.validation import validate
from tests.specs import PRODUCTS, storage_types
from tests.tools import needs_compiler

pytestmark = pytest.mark.usefixtures("emulated_only")

ODD = {"M": 37, "N": 75, "K": 83, "B": 2, "S": 19, "D": 83, "Q": 75, "G": 21, "T": 37, "E": 4}  # of nothing
EVEN = {"M": 64, "N": 96, "K": 64, "B": 2, "S": 16, "D": 64, "Q": 96, "G": 32, "T": 64, "E": 3}
ONE = dict.fromkeys(ODD, 1) | {"M": 3, "T": 3}
NARROW = ("fp8_gemm", "i8_gemm")  # whose factors are of one type
SIZES = {"odd": ODD, "even": EVEN, "one": ONE}


def need_units(name: str, gpu: Target) -> None:
    """A target without matrix units for a spec's factors refuses it in a sentence."""
    if kinds := lacking(PRODUCTS[name].graph, gpu):
        with pytest.raises(NoPlan, match=f"for factors of {kinds}"):
            fusegen.plan(PRODUCTS[name], gpu)
        pytest.skip(f"{gpu} does not multiply {kinds}")


def at(spec: Chain, sizes: dict[str, int]) -> Chain:
    return spec.at(**{name: sizes[name] for name in spec.graph.sizes})


def test_the_specs_are_those_that_users_know() -> None:
    assert set(PRODUCTS) == {
        "fp8_gemm", "gemm_bias_gelu", "gemm_bias_relu_residual", "gemm_swiglu", "gemm_tf32", "grouped_gemm",
        "grouped_swiglu", "grouped_weight_grad", "i8_gemm", "qkv", "rmsnorm_gemm", "rmsnorm_gemm_swiglu",
    }  # fmt: skip
    for spec in PRODUCTS.values():
        assert split(spec.graph).products


@needs_compiler
@pytest.mark.by_values("name", "gpu")  # those of generated/ are compiled for each GPU
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("gpu", [H200, MI300X], ids=str)
def test_every_spec_passes_in_full(name: str, gpu: Target) -> None:
    need_units(name, gpu)
    validate(fusegen.compile(at(PRODUCTS[name], ODD), gpu, on="emulator", validate=False)).raise_for_error()


@needs_compiler
@pytest.mark.pairwise("name", "sizes", "gpu")
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("sizes", "gpu"), [("even", A100), ("one", A100), ("even", TARGETS["hip:mi250x"])], ids=str)
def test_every_spec_passes_at_other_sizes(name: str, sizes: str, gpu: Target) -> None:
    need_units(name, gpu)
    spec = at(PRODUCTS[name], SIZES[sizes])
    validate(fusegen.compile(spec, gpu, on="emulator", validate=False), quick=True).raise_for_error()


@needs_compiler
@pytest.mark.parametrize("name", [name for name in PRODUCTS if name not in NARROW])
def test_every_spec_passes_in_every_type(name: str) -> None:
    own = {tensor.dtype for tensor in PRODUCTS[name].graph.inputs}
    others = [DTYPES[dtype] for dtype in storage_types(PRODUCTS[name]) if DTYPES[dtype] not in own]
    assert others, "its own was validated in full above"
    for dtype in others:
        spec = at(PRODUCTS[name], ODD).with_dtype(dtype)
        validate(fusegen.compile(spec, H200, on="emulator", validate=False), quick=True).raise_for_error()
