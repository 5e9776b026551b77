"""Every gradient of the op table, and those of views, joins, reductions and products, against central differences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusegen import b8, bf16, chain, dims, f8e4m3, f16, f32, i32
from fusegen import ops as F
from fusegen.derivatives import derive
from fusegen.errors import RequestError, SpecError
from fusegen.language.graph import Kind
from fusegen.language.op_table import OPS
from fusegen.language.spec import Chain
from fusegen.language.trace import apply
from tests import grouped
from tests.chains import spec_text
from tests.corpus import CASES
from tests.differences import called, compare, drawn

M, N, K, B, H, D = dims("M N K B H D")
POSITIVE = ("log", "log2", "log1p", "sqrt", "rsqrt", "pow", "fmod", "div")
CHOSEN_BY_PLANNERS = ("small_pow", "log_of_normal", "tanh_log1p")
ROUNDINGS = ("round_", "overflow_")  # steps, whose gradient goes through as it is
FLOATS = [op for op in OPS.values() if op.kind is Kind.MAP and op.result in (None, f32) and
          op.takes in ("float", "number") and op.name not in CHOSEN_BY_PLANNERS and
          not op.name.startswith(ROUNDINGS)]  # fmt: skip


def of_two(name: str) -> Chain:
    @chain(M=3, N=8)
    def two(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
        return apply(name, x, y)

    return two


def of_one(name: str) -> Chain:
    @chain(M=3, N=8)
    def one(x: f32[M, N]) -> f32[M, N]:
        return apply(name, x) + 0.0 * x

    return one


@pytest.mark.parametrize("op", FLOATS, ids=str)
def test_an_op_of_floats_has_its_slope(op: Any) -> None:
    """None of them may be without: what has steps alone says so by None."""
    assert op.gradients, f"{op.name} has no gradients in the op table"
    made = of_two(op.name) if op.arity == 2 else of_one(op.name)
    values = drawn(made.graph, made.graph.inputs, np.random.default_rng(1))
    if op.name in POSITIVE:
        values = {name: np.abs(value) + 0.6 for name, value in values.items()}
    assert compare(made, values=values) >= (4 if op.arity == 2 else 2)


def test_what_is_equal_shares_a_gradient() -> None:
    @chain(M=2, N=4)
    def largest(x: f32[M, N], y: f32[M, N]) -> tuple[f32[M, 1], f32[M, N]]:
        return F.max(x), F.minimum(x, y)

    x = np.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    names = [f"d{t.name}" for t in largest.graph.outputs]
    given = {"x": x, "y": x.copy(), **dict(zip(names, (np.ones((2, 1)), np.zeros((2, 4))), strict=True))}
    found = called(derive(largest).graph, given)
    np.testing.assert_array_equal(found["dx"], [[0, 0.5, 0.5, 0], [0.25] * 4])
    given |= dict(zip(names, (np.zeros((2, 1)), np.ones((2, 4))), strict=True))
    found = called(derive(largest).graph, given)
    np.testing.assert_array_equal(found["dx"], np.full((2, 4), 0.5))
    np.testing.assert_array_equal(found["dy"], np.full((2, 4), 0.5))


def test_a_row_that_is_masked_as_a_whole_has_gradients_of_0() -> None:
    """1 / sum is infinite there, and no NaN comes of it."""

    @chain(M=2, N=4)
    def masked(x: f32[M, N], keep: b8[M, N]) -> f32[M, N]:
        return F.softmax(F.where(keep, x, -float("inf")))

    keep = np.array([[True, True, False, True], [False] * 4])
    given = {"x": np.ones((2, 4)), "keep": keep, "dout": np.arange(8.0).reshape(2, 4)}
    found = called(derive(masked).graph, given)["dx"]
    assert np.isfinite(found).all()
    assert not found[1].any()
    assert found[0].any()


# ---------------------------------------------------------------- chains of several kinds


@chain(M=3, N=8)
def broadcasts(x: f32[M, N], row: f32[M, 1], col: f32[N], one: f32[1, 1]) -> f32[M, N]:
    return (x + row) * col / (1.0 + one * one) - row * col


@chain(B=2, M=3, N=8)
def deeper(x: f32[B, M, N], w: f32[B, 1, N], v: f32[M, 1], u: f32[N]) -> f32[B, M, N]:
    return F.silu(x * w + v) * u


@chain(M=3, N=8)
def row_statistics(x: f32[M, N], y: f32[M, N]) -> tuple[f32[M, 1], f32[M, N], f32[M, 1]]:
    return F.std(x + y), F.layernorm(x) * F.l2norm(y), F.logsumexp(x * y)


@chain(M=3, N=8)
def columns(x: f32[M, N], y: f32[M, N]) -> tuple[f32[1, N], f32[M, N]]:
    top = F.max(x * y, over=M)
    return top * F.sum(x, over=M) - F.min(y, over=M), F.softmax(x, over=M) * y


@chain(M=3, N=6)
def products_of_rows(x: f32[M, N]) -> tuple[f32[M, 1], f32[1, N]]:
    return F.prod(x), F.prod(x, over=M)


@chain(M=3, N=8)
def scans(x: f32[M, N]) -> tuple[f32[M, N], f32[M, N], f32[M, N]]:
    return F.cumsum(x * x), F.cumsum(x, exclusive=True), F.cumsum(x, reverse=True, axis=0) * x


@chain(M=4, N=8, K=6)
def multiplied(x: bf16[M, K], w: bf16[K, N], v: bf16[N, K]) -> tuple[f32[M, N], f32[M, M]]:
    return F.gelu(x @ w) * (x @ v.T), x @ x.T


@chain(B=2, M=4, N=8, K=6)
def multiplied_in_batches(x: bf16[B, M, K], w: bf16[K, N], a: bf16[B, N, M]) -> f32[B, M, M]:
    return F.tanh(x @ w) @ a


@chain(M=4, N=8, K=6)
def multiplied_as_tf32(x: f32[M, K], w: f32[K, N]) -> f32[M, N]:
    return F.matmul(x, w, precision="tf32")


@chain(M=3, N=8)
def taken_apart(x: f32[M, 2 * N]) -> tuple[f32[M, N], f32[M, N]]:
    low, high = F.split(x, 2)
    return low * F.sigmoid(high), x[..., ::2] * x[..., 1::2]


@chain(M=3, N=8)
def parts_alone(x: f32[M, N], y: f32[M, 3, N]) -> tuple[f32[M, 3], f32[M, 1]]:
    return x[:, 2:5] * x[:, 4:7], F.sum(y[:, 1] * x) + x[:, 6:7] * x[:, :1]


@chain(M=3, N=8)
def every_other(x: f32[M, N], y: f32[M, 4, N]) -> tuple[f32[M, N // 2], f32[M, 2, N]]:
    return x[:, 1::2] * 2.0, y[:, ::2] * 3.0


@chain(M=3, H=2, D=4)
def rearranged(x: f32[M, H * D], y: f32[M, H, D]) -> tuple[f32[H, M, D], f32[M, H * D]]:
    heads = F.rearrange(x, "m (h d) -> h m d", h=H)
    return heads * F.rearrange(y, "m h d -> h m d"), F.flip(F.rearrange(y, "m h d -> m (h d)")) * x


@chain(M=3, N=8)
def put_together(x: f32[M, N], y: f32[M, N]) -> tuple[f32[M, 2 * N], f32[M, N, 2]]:
    return F.concat([x * y, F.tanh(x)]), F.stack([x, y * y])


@chain(M=3, N=8)
def rolled(x: f32[M, N]) -> f32[M, N]:
    return F.roll(x, 3) * x


@chain(M=3, H=2, D=8)
def rotated(x: f32[M, H, D], cos: f32[M, 1, D // 2], sin: f32[M, 1, D // 2]) -> tuple[f32[M, H, D], f32[M, H, D]]:
    return F.rope(x, cos, sin), F.rope(x, cos, sin, interleaved=True)


@chain(M=5, N=16)
def repeated(x: f32[M, 1], y: f32[N]) -> f32[M, N]:
    return F.broadcast(F.exp(x), (M, N)) * F.broadcast(y, (M, N))


@chain(M=3, N=12)
def chosen(x: f32[M, N], y: f32[M, N]) -> tuple[f32[M, 3], i32[M, 3]]:
    values, columns = F.topk(x, 3)
    return F.softmax(values) * F.take(y * y, columns), columns


@chain(M=3, N=12)
def taken(x: f32[M, N], labels: i32[M]) -> tuple[f32[M, 1], f32[M]]:
    return F.take(x * x, labels), F.cross_entropy(x, labels, label_smoothing=0.1, z_loss=1e-2)


@chain(M=3, N=8)
def dropped(x: f32[M, N], seed: i32) -> f32[M, N]:
    return F.dropout(x, 0.25, seed, 0) * x


@chain(M=3, N=8, rounding="eager")
def eager(x: bf16[M, N], y: bf16[M, N]) -> bf16[M, N]:
    return F.softmax(x * y) + x


@chain(M=3, N=8)
def only_a_mean(x: f32[M, N]) -> f32[M, 1]:
    return F.mean(x)


@chain(M=3, N=8)
def passed_on(x: f32[M, N], y: f32[M, N]) -> f32[M, N]:
    return x + y


CHAINS = {c.name: c for c in list(globals().values()) if isinstance(c, Chain)}


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_the_slopes_of_the_chain(name: str) -> None:
    assert compare(CHAINS[name]) >= 3


def test_every_kind_of_op_with_gradients_is_tried() -> None:
    """What the chains above and the ops one by one don't reach is named here, with the reason."""
    tried = {node.op.name for c in CHAINS.values() for node in c.graph.nodes} | {op.name for op in FLOATS}
    untried = {name for name, op in OPS.items() if op.gradients and name not in tried}
    steps = {name for name in untried if name.startswith(ROUNDINGS)}  # of one text: d
    scanned = {name for name in untried if name.startswith("cumsum")}  # of one text, with other flags
    masks = {"largest_by_sum", "largest_by_count"}  # behind a comparison wherever fusegen.ops has them
    groups = {"grouped_matmul", "add_group_rows"}  # of whole numbers, exactly: tests/emitting/test_inner_groups.py
    assert untried - steps - scanned - masks - groups - set(CHOSEN_BY_PLANNERS) == {"where", "to_f32"} & untried


# ---------------------------------------------------------------- random chains, and those of others


def without_casts(text: str) -> str:
    """A rounding is steps, whose slope is 0 almost everywhere."""
    return re.sub(r"F\.cast\((\w+), b?f16\)", r"\1 * 1.0", text)


@pytest.mark.parametrize("start", range(0, 60, 10))
def test_random_chains(start: int) -> None:
    for seed in range(start, start + 10):
        module: dict[str, Any] = {"__name__": f"fuzz_{seed}"}
        exec(compile(without_casts(spec_text(seed)), f"fuzz_{seed}.py", "exec"), module)
        assert compare(module["fuzz"], seed), f"python -m tests.chains {seed}"


NOWHERE_SMOOTH = {
    "logit_bias", "token_bitmask", "min_p_filter", "top_k_filter", "top_k_top_p_filter", "top_p_renormalized",
    "typical_filter",  # sums of infinities
}  # fmt: skip


def positive(made: Chain) -> dict[str, Any]:
    """For roots of what an optimizer has summed up."""
    values = drawn(made.graph, made.graph.inputs, np.random.default_rng(2))
    return {name: np.abs(v) * 0.5 + 0.1 if np.asarray(v).dtype.kind == "f" else v for name, v in values.items()}


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce")
@pytest.mark.parametrize("kind", sorted({case.kind for case in CASES.values()}))
def test_chains_of_the_corpus(kind: str) -> None:
    """Each is compared, or refused with a line of its spec, or for a reason of its own."""
    compared = 0
    for name, case in CASES.items():
        if case.kind != kind:
            continue
        try:
            made = case.traced()
            found = compare(made) or compare(made, values=positive(made))
        except (SpecError, RequestError) as error:
            if not getattr(error, "where", None) and not re.search("has no gradients|is the gradient of", str(error)):
                raise
            continue
        assert found or name in NOWHERE_SMOOTH, name
        compared += bool(found)
    assert compared or kind == "embeddings"


# ---------------------------------------------------------------- what is read, and what is refused


def names_of(made: Chain) -> list[str]:
    return [t.name for t in made.graph.inputs]


def test_operands_are_those_that_are_needed() -> None:
    @chain(M=16, N=32)
    def gated(x: f32[M, N], gate: f32[M, N], bias: f32[N]) -> f32[M, N]:
        return x * F.sigmoid(gate) + bias

    made = derive(gated)
    assert names_of(made) == ["x", "gate", "dout"]
    assert [(t.name, str(t.type)) for t in made.graph.outputs] == [
        ("dx", "f32[M, N]"), ("dgate", "f32[M, N]"), ("dbias", "f32[N]"),
    ]  # fmt: skip
    assert names_of(derive(gated, of=["bias"])) == ["dout"]
    assert derive(gated).graph.where == gated.graph.where


def test_what_the_forward_chain_returns_is_read_where_that_pays() -> None:
    @chain(M=64, N=256)
    def normed(x: bf16[M, N], residual: bf16[M, N], gain: bf16[N]) -> tuple[bf16[M, N], bf16[M, N], f32[M, 1]]:
        h = x + residual
        rstd = F.rsqrt(F.mean(h * h) + 1e-6)
        out = h * rstd * gain
        return out, h, rstd

    made = derive(normed)
    assert names_of(made) == ["gain", "h", "rstd", "dout", "dh", "drstd"]
    assert names_of(derive(normed, outputs=("out",))) == ["gain", "h", "rstd", "dout"]

    @chain(M=64, N=256)
    def halved(x: bf16[M, N]) -> tuple[bf16[M, N], bf16[M, N]]:
        low, high = F.tanh(x), x * x
        return low, high

    assert names_of(derive(halved)) == ["x", "dlow", "dhigh"]  # a rounded tanh spares no memory


def test_types_are_those_of_the_operands() -> None:
    @chain(M=4, N=8)
    def mixed(x: f16[M, N], y: bf16[N], count: i32[M, 1], scale: f32) -> f32[M, N]:
        return x * y * scale + F.cast(count, f32)

    made = derive(mixed)
    assert names_of(made) == ["x", "y", "scale", "dout"]
    assert [t.dtype for t in made.graph.outputs] == [f16, bf16]


@chain(M=4, N=8, K=12)
def looked_up(table: f32[K, N], ids: i32[M], x: f32[M, N]) -> f32[M, N]:
    return F.gather(table, ids) * x


@chain(M=4, N=8)
def sorted_rows(x: f32[M, N]) -> f32[M, N]:
    values, _ = F.sort(x)
    return values


@chain(M=4, N=8)
def written(x: f32[M, N], ids: i32[M], rows: f32[M, N]) -> f32[M, N]:
    return F.scatter(x, ids, rows)


@chain(M=4, N=8)
def steps(x: f32[M, N]) -> f32[M, N]:
    return F.floor(x)


@chain(M=4, N=64)
def many(x: f32[M, N]) -> f32[M, 20]:
    values, _ = F.topk(x, 20)
    return values


@chain(M=4, N=8)
def taken_name(x: f32[M, N], dx: f32[N]) -> f32[M, N]:
    return x * dx


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        (looked_up, SpecError, r"test_slopes\.py:\d+: gather has no gradient here: rows that several indices name add"),
        (sorted_rows, SpecError, r"test_slopes\.py:\d+: sort has no gradient here: what comes from a column goes back"),
        (written, SpecError, "writes to x in its own memory"),
        (many, SpecError, r"the gradient of topk: a selection of 20 columns has none; one of a number up to 16"),
        (steps, RequestError, "no output of floats varies with an operand"),
        (grouped.by_channels, SpecError, "grouped_matmul has no gradient here: no op scales rows by their group's"),
        (grouped.blocks, SpecError, "grouped_matmul has no gradient here: its factors are codes with scales"),
        (taken_name, RequestError, "dx is the gradient of x, and something else has that name"),
    ],
    ids=lambda value: value.name if isinstance(value, Chain) else None,
)  # fmt: skip
def test_what_has_no_gradient_says_why(made: Chain, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        derive(made)


def test_operands_that_are_not_asked_for_may_go_through_what_has_none() -> None:
    assert [t.name for t in derive(looked_up, of=("x",)).graph.outputs] == ["dx"]
    with pytest.raises(RequestError, match="no array of floats 'ids'"):
        derive(looked_up, of=("ids",))
    with pytest.raises(RequestError, match="no output 'y'"):
        derive(looked_up, outputs=("y",))
    with pytest.raises(RequestError, match="takes a chain"):
        derive(looked_up.graph)  # type: ignore[arg-type]


def test_narrow_operands_have_gradients_when_they_are_named() -> None:
    @chain(M=4, N=8)
    def dequantized(x: f8e4m3[M, N], scale: f32[M, 1]) -> bf16[M, N]:
        return x * scale

    assert [t.name for t in derive(dequantized).graph.outputs] == ["dscale"]
    assert [t.dtype for t in derive(dequantized, of=("x",)).graph.outputs] == [f8e4m3]


def test_the_docs_name_the_ops_without_gradients() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gradients.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([^`]+)`", page.split("These have none")[1].split("\n\n")[0]))
    public = {"gather": "F.gather", "scatter": "F.scatter", "cumprod": "F.cumprod", "sorted_values": "F.sort"}
    values = [op for op in OPS.values() if op.result in (None, f32) and not op.gradients and op.takes != "bool"]
    without = {op.name for op in values if op.name in public}
    assert {public[name] for name in without} <= named
    others = {op.name for op in values if not op.name.startswith(("cumprod", "sorted"))} - set(public)
    internal = {op.name for op in values if op.kind in (Kind.INPUT, Kind.LEAF, Kind.GROUP, Kind.PART, Kind.DEAL)}
    of_planners = {*CHOSEN_BY_PLANNERS, "spread", "deal_back", "deal_matmul", "put", "paged_rows"}
    whole = {op.name for op in values if op.takes == "int" or op.name.startswith(("unpack", "to_unit"))}
    assert others - internal - of_planners - whole == {"matmul_over_groups", "scale_group_rows"}
