"""Names that a spec may use and a kernel needs for itself: whatever an author calls a value, the two never meet."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator
from time import perf_counter

import numpy as np
import pytest

from fusegen import chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.errors import SpecError
from fusegen.language.axes import over_rows
from fusegen.language.naming import (
    ATTENTION_FRAME,
    ATTENTION_SUFFIXES,
    COLUMN_FRAME,
    COLUMN_SUFFIXES,
    CPP,
    FACTOR_SUFFIXES,
    FRAME,
    PRODUCT_FRAME,
    RESERVED,
    SELECTION_FRAME,
    SIDE_BY_SIDE,
    SUM_SUFFIXES,
    TENSOR_SUFFIXES,
    VALUE_SUFFIXES,
    WEIGHTS_FRAME,
    WEIGHTS_SUFFIXES,
    Claims,
    called,
    made_of,
    value_names,
)
from fusegen.language.reference import reference
from fusegen.language.spec import Chain
from fusegen.language.torch_source import torch_source
from fusegen.language.types import Dim
from fusegen.pipeline import compile
from fusegen.planner import candidates
from fusegen.planner.model import Plan
from fusegen.targets import H200, MI300X, Target
from tests.emitting.test_rendering import compiles
from tests.specs import ALL

M, N, K = dims("M N K")

# of loops in which nothing of a chain is read or computed
INNERMOST = frozenset(("b", "g", "q", "w", "key"))


@chain(M=3, N=4099)
def called_like_frames(
    store_row: i32, store: f16[M, N], own: f16[N], own_vec_next: f16[M, N]
) -> tuple[f16[M, N], f32[M, 1]]:
    """A zero \0, the end of a line \u2028 \x85 and half a letter \ud800 are no text of a comment."""
    load = F.softmax(store + own * own_vec_next) * store_row
    first = F.sum(store)
    return load, first


@chain(M=3, N=4099)
def called_like_picking(picked_sum: f16[M, N], read: f16[M, N]) -> tuple[f16[M, 8], i32[M, 8]]:
    picked_sum_vec = F.sum(read)
    picked_sum_vec_next = picked_sum_vec / 3
    see = picked_sum + picked_sum_vec_next
    ahead, passing = F.topk(see, 8)
    return ahead, passing


@chain(M=3, N=64)
def greek(ξ: f16[M, N]) -> tuple[f16[M, N], f32[M, 1]]:
    σ = F.softmax(ξ)
    return σ, F.max(ξ)


@pytest.mark.parametrize("spec", [called_like_frames, called_like_picking, greek], ids=lambda spec: spec.name)
def test_a_value_may_be_called_what_a_kernel_calls_its_own(spec: Chain, target: Target) -> None:
    for made in one_of_each(spec, target):
        compiles(made)
        opening = render(made).text.split("\n\n")[0]
        assert all(line.startswith("//") for line in opening.splitlines())


@pytest.mark.parametrize("spec", [called_like_frames, called_like_picking], ids=lambda spec: spec.name)
def test_no_name_is_what_a_kernel_makes_of_another(spec: Chain) -> None:
    graph = spec.graph
    names = value_names(graph)
    tensors = [*(names[t.node] for t in graph.inputs), *(t.name for t in graph.outputs)]
    every = {*names.values(), *tensors}
    assert not [(a, b) for a in every for b in tensors if made_of(a, b, TENSOR_SUFFIXES)]
    assert not {name + suffix for name in tensors for suffix in TENSOR_SUFFIXES} & FRAME


@pytest.mark.parametrize("spec", ALL.values(), ids=lambda spec: spec.name)
def test_a_kernel_keeps_its_own_words_from_the_spec(spec: Chain, target: Target) -> None:
    """Every word of a kernel's body is the spec's, made of one of the spec's, or one that the spec's step aside for."""
    for made in one_of_each(spec, target):
        graph = made.graph
        names = {*value_names(made.lowered).values(), *value_names(graph).values(), *(t.name for t in graph.outputs)}
        names |= {word for dim in made.row_dims for word in (dim.extent, dim.index)}
        names |= {SIDE_BY_SIDE} if graph.products else set()
        suffixes = TENSOR_SUFFIXES + VALUE_SUFFIXES + (FACTOR_SUFFIXES + SUM_SUFFIXES if graph.products else ())
        columns = bool(over_rows(graph))
        suffixes += COLUMN_SUFFIXES if columns else ()
        names |= {f"{name}_counted" for name in graph.sizes} if columns else set()
        kept = CPP | FRAME | called() | {made.name} | INNERMOST
        kept |= COLUMN_FRAME if columns else set()
        kept |= (SELECTION_FRAME if graph.selections else set()) | (PRODUCT_FRAME if graph.products else set())
        weights = made.rule.startswith("weights")
        scores = weights or made.rule.startswith("attention")
        kept |= (ATTENTION_FRAME if scores else set()) | (WEIGHTS_FRAME if weights else set())
        suffixes += (ATTENTION_SUFFIXES if scores else ()) + (WEIGHTS_SUFFIXES if weights else ())
        loose = [
            word for word in sorted(words(render(made).text))
            if word not in kept and word not in names and not RESERVED.match(word)
            and not any(made_of(word, name, suffixes) for name in names)
        ]  # fmt: skip
        assert not loose, f"{made.rule} {made.configuration}: a value of such a name would meet the kernel's own"


# ---------------------------------------------------------------- names that mean something elsewhere

GPU = """threadIdx blockIdx blockDim gridDim warpSize clock64 dim3 float4 half2 make_float4 hipError_t linux unix EOF
errno stdout stderr SIMT_WARP simt fusegen_kernel self cls args kwargs function sizes name graph chain dims target"""
NUMPY = """np numpy array asarray float64 int64 float16 arange where shape dtype exp sqrt maximum minimum swapaxes inf
nan take_along_axis newaxis errstate math ml_dtypes bfloat16 top_columns take erf key columns order found rank"""
OTHERS = ["ξ", "ß", "名前", "value", "_", "__", "x" * 120]
LEGAL = {*dir(builtins), *keyword.softkwlist, *NUMPY.split(), *GPU.split(), *CPP, *OTHERS} - {"__debug__"}
WORDS = sorted(w for w in LEGAL if not keyword.iskeyword(w) and not w.endswith(("Error", "Warning")))
BATCH = 36


def spec_of(text: str) -> Chain:
    """The chain of a spec's text. Its own words are such as no test calls a value."""
    scope: dict[str, object] = {"chain_": chain, "T": f32, "I": i32, "F_": F, "M_": Dim("M_"), "N_": Dim("N_")}
    exec(text, scope)
    made = scope["made"]
    assert isinstance(made, Chain)
    return made


def sums_called(operands: list[str], values: list[str], name: str = "spec_") -> Chain:
    """Running sums of operands, each a value; the last two and the row's sum are returned."""
    steps = [
        f"    {value} = {a} * 0.5 + {b}" for value, a, b in zip(values, [operands[0], *values], operands, strict=False)
    ]
    results = "T[M_, N_], T[M_, N_], T[M_, 1]"
    lines = [
        f"def {name}({', '.join(f'{operand}: T[M_, N_]' for operand in operands)}) -> tuple[{results}]:",
        *steps,
        f"    return {values[-1]}, {values[-2]}, F_.sum({values[-1]} * {operands[-1]})",
    ]
    return spec_of("@chain_(M_=3, N_=40)\n" + "\n".join(lines) + f"\nmade = {name}\n")


def agrees(spec: Chain, target: Target) -> None:
    """The reference with numpy on the sums as they are, and the kernel in the emulator with the reference."""
    rng = np.random.default_rng(0)
    operands = [rng.standard_normal((3, 40)).astype(np.float32) for _ in spec.graph.inputs]
    wanted = [operands[0] * 0.5 + operands[0]]
    for operand in operands[1:]:
        wanted.append(wanted[-1] * 0.5 + operand)
    found = reference(spec.graph)(*operands)
    kernel = compile(spec, target, on="emulator", validate=False)
    for results in (found, kernel(*operands)):
        np.testing.assert_allclose(results[0], wanted[-1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results[1], wanted[-2], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(results[2], (wanted[-1] * operands[-1]).sum(-1, keepdims=True), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", range(0, len(WORDS), 2 * BATCH), ids=lambda first: WORDS[first])
def test_operands_and_values_may_be_called_what_python_numpy_or_a_compiler_call_theirs(first: int) -> None:
    spare = [f"spare_{i}" for i in range(2 * BATCH)]
    words = (WORDS[first : first + 2 * BATCH] + spare)[: 2 * BATCH]
    agrees(sums_called(words[:BATCH], words[BATCH:]), H200)
    agrees(sums_called(words[BATCH:], words[:BATCH]), MI300X)


@pytest.mark.parametrize(
    ("operands", "output"), [(["int", "b"], "int_"), (["__y", "b"], "y"), (["x", "x_row"], "xrow")]
)
def test_an_operand_that_steps_aside_does_not_take_an_outputs_name(
    operands: list[str], output: str, target: Target
) -> None:
    """Both are pointers: `int__ptr` twice does not compile."""
    agrees(sums_called(operands, [output, "d"]), target)


@pytest.mark.by_values("name", "target")  # a name stays clear of what any target has taken
@pytest.mark.parametrize(
    "name", ["abs", "float", "min", "range", "main", "np", "half", "threadIdx", "template", "take", "self", "F"]
)
def test_a_chain_and_its_dims_may_be_called_so_too(name: str, target: Target) -> None:
    agrees(sums_called(["a", "b"], ["c", "d"], name=name), target)
    sized = spec_of(
        f"size = type(M_)({name!r})\n@chain_(**{{{name!r}: 3}}, N_=40)\n"
        "def made(a: T[size, N_], b: T[size, N_]) -> tuple[T[size, N_], T[size, N_], T[size, 1]]:\n"
        "    c = a * 0.5 + a\n    d = c * 0.5 + b\n    return d, c, F_.sum(d * b)\n"
    )
    agrees(sized.at(**{name: 5}).at(**{name: 3}), target)
    assert f"def {name}{'_' * (name == 'F')}(" in torch_source(sums_called(["a", "b"], ["c", "d"], name=name).graph)
    found, columns = reference(
        spec_of(
            f"@chain_(M_=3, N_=40)\ndef {name}(x: T[M_, N_]) -> tuple[T[M_, 3], I[M_, 3]]:\n"
            f"    return F_.topk(F_.gelu(x, approximate='none'), 3)\nmade = {name}\n"
        ).graph
    )(np.tile(np.arange(40.0), (3, 1)))
    assert columns.tolist() == [[39, 38, 37]] * 3
    assert found.shape == (3, 3)


@pytest.mark.parametrize(
    "body", ["float = abs(x)\n    return float('inf') + float", "min = F_.min(x)\n    return x * min(x, 1)"]
)
def test_a_function_of_python_that_a_variable_hides_is_an_error_with_its_place(body: str) -> None:
    with pytest.raises(SpecError, match=r"(float is Python's own|called like a function)(.|\n)*another"):
        spec_of(f"@chain_(M_=3, N_=40)\ndef made(x: T[M_, N_]) -> T[M_, N_]:\n    {body}\n")
    with pytest.raises(SpecError, match=":4: UnboundLocalError while the spec ran"):
        spec_of(
            "@chain_(M_=3, N_=40)\ndef made(x: T[M_, N_]) -> T[M_, N_]:\n    y = x\n    return len(y) + (len := y)\n"
        )


def one_of_each(spec: Chain, target: Target) -> Iterator[Plan]:
    """The best plan of each way to hold and pick rows."""
    seen = set()
    for made in candidates(spec.graph, target).plans:
        way = re.sub(r"[\d/x]+", "", f"{made.rule} {made.configuration}"), made.cluster > 1
        if way not in seen:
            seen.add(way)
            yield made


def words(text: str) -> set[str]:
    """The identifiers of a kernel's body, but for what is a member of another."""
    body = text[text.rindex('extern "C"') + len('extern "C"') :]
    code = re.sub(r'//.*|#pragma.*|"[^"\n]*"', "", body)
    return set(re.findall(r"(?<![\w.>:])[A-Za-z_]\w*", code))


def test_arrays_have_no_two_underscores_in_a_row() -> None:
    """An operand that ends with one, as its name is Python's or the kernel's, and results and values of such names."""

    @chain(M=3, N=70)
    def spec(lambda_: f32[M, N], x_: f16[N], row: f32[M, N]) -> tuple[f32[M, N], f32[M, 1]]:
        max = F.max(lambda_ * x_ + row)
        v = lambda_ - max
        return v, max

    names = set(value_names(spec.graph).values())
    assert {"lambda_value", "x", "row_number", "maximum"} <= names
    for gpu in (H200, MI300X):
        text = render(candidates(spec.graph, gpu).plans[0]).text
        assert not re.findall(r"\b[a-zA-Z]\w*__\w*", text.replace("__global__ void", "").split("extern")[1])


def test_an_unnamed_value_is_called_after_what_it_is_of() -> None:
    @chain(M=8, N=16)
    def spread(x: f32[M, N], sum_of_x: f32[N]) -> f32[M, N]:
        y = F.exp(x - F.max(x))
        z = y / F.sum(F.exp(x)) + F.sum(F.abs(x)) + F.sum(x)
        return F.rmsnorm(z) + 1 / F.sum(z) + F.cast(F.max(y) == 0.0, f32) + sum_of_x * 0.5

    names = set(value_names(spread.graph).values())
    assert {"max_of_x", "x_minus_max_of_x", "sum_of_exps", "sum_of_magnitudes", "sum_of_x", "sum_of_x_2"} <= names
    assert {"sum_of_squares", "mean_plus_eps", "one_over_sum_of_z", "max_of_y_is_0"} <= names


def test_values_of_one_op_are_told_apart_by_their_arguments() -> None:
    @chain(M=8, N=16, K=24)
    def spec(x: f16[M, K], gate: f16[K, N], up: f16[K, N], bias: f32[N]) -> f32[M, N]:
        return F.silu(x @ gate) * (x @ up + bias) + bias

    names = set(value_names(spec.graph).values())
    assert {"x_times_gate", "x_times_up", "silu", "mul", "x_times_up_plus_bias", "mul_plus_bias"} <= names


def test_the_authors_names_come_before_those_inside_composites() -> None:
    @chain(M=8, N=16)
    def spec(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N]]:
        p = F.softmax(x)
        pivot = F.softmax(p * 3)
        return p, pivot

    names = set(value_names(spec.graph).values())
    assert {"p", "pivot", "pivot_of_p", "e", "e_of_pivot", "inverse_sum_of_pivot"} <= names
    assert not [name for name in names if re.search(r"_[2-9]$", name)]


def test_a_number_tells_values_apart_that_have_nothing_short_to_say() -> None:
    @chain(M=8, N=16)
    def spec(x: f32[M, N]) -> f32[M, N]:
        return (((x + 0.25) + 0.25) + 0.25) + 0.25

    assert sorted(value_names(spec.graph).values()) == ["add", "add_2", "add_from_x", "out", "x"]


def test_a_number_that_a_composite_has_a_name_for_is_written_out() -> None:
    @chain(M=3, N=8)
    def spec(x: f32[M, N], v: f32[N], seed: i32) -> f32[M, N]:
        return x + v + F.uniform(v, seed, 0)

    assert not [node for node in value_names(spec.graph) if node.literal is not None]


def test_naming_takes_time_in_proportion_to_the_values() -> None:
    def claimed(count: int) -> float:
        claims, start = Claims(frozenset()), perf_counter()
        for number in range(count):
            claims.claim(["same" if number % 2 else f"value_{number}_of_many"], VALUE_SUFFIXES)
        return perf_counter() - start

    claimed(100)
    assert min(claimed(8000) for _ in range(3)) < 30 * min(claimed(800) for _ in range(3))


def test_no_name_begins_with_a_digit() -> None:
    """An unnamed value is called after its arguments, and a number may be the first of them."""

    @chain(M=2, N=8)
    def spec(x: f32[M, N]) -> f32[M, N]:
        return F.where((1.0 - x) > 0.0, 0.0 - x, 1.0 / (1.0 + x)) + F.sum(1.0 - x)

    assert all(name.isidentifier() for name in value_names(spec.graph).values())
    assert reference(spec.graph)(np.ones((2, 8))).shape == (2, 8)
