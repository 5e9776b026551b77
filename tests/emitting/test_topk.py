"""Kernels that choose columns: every regime's candidates in the emulator, on ragged rows, ties, NaN and masks."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from fusegen import b8, bf16, chain, dims, f16, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.errors import NoPlan
from fusegen.language.selection import top_columns
from fusegen.language.spec import Chain
from fusegen.planner import candidates
from fusegen.planner.model import Layout, RowPlan, Source, Tile
from fusegen.planner.selections.choosing import expected
from fusegen.planner.selections.large_k_cost import candidates_of, large_k_of
from fusegen.planner.selections.small_k_cost import reaching, small_k_of
from fusegen.reporting.explaining import accesses
from fusegen.runtime import Kernel, finding
from fusegen.targets import target
from fusegen.validation import validate

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"the emulator can't run here: {error}", allow_module_level=True)

M, V, K = dims("M V K")


@chain(M=4, V=1000, K=8)
def plain(x: f32[M, V]) -> tuple[f32[M, K], i32[M, K]]:
    """Values and columns."""
    return F.topk(x, K)


@chain(M=4, V=1000)
def greedy(x: bf16[M, V]) -> i32[M, 1]:
    """One column."""
    return F.argmax(x)


@chain(M=4, V=1000, K=8)
def sampled(x: bf16[M, V], mask: b8[M, V], scale: f32) -> tuple[f32[M, K], i32[M, K], f32[M, 1]]:
    """Renormalised probabilities of what a mask leaves, and the row's maximum beside them."""
    z = F.where(mask, x * scale, -float("inf"))
    values, columns = F.topk(F.softmax(z), K)
    return values / F.sum(values), columns, F.max(z)


@chain(M=4, V=1000, K=8)
def routed(x: f16[M, V], bias: f32[V]) -> tuple[f32[M, K], i32[M, K]]:
    """Chosen by biased scores, weighed by the scores themselves."""
    scores = F.sigmoid(x)
    _, columns = F.topk(scores + bias, K)
    weights = F.take(scores, columns)
    return F.softmax(weights), columns


@chain(M=4, V=1000, K=8)
def normed(x: f32[M, V], y: f32[M, V], gain: f32[V]) -> tuple[f32[M, K], i32[M, K], f32[M, V]]:
    """The key needs a reduction of the row, and a whole row is written beside it."""
    h = x + y
    values, columns = F.topk(F.rmsnorm(h, gain), K)
    return F.softmax(values), columns, h


@chain(M=4, V=1000, K=8)
def likeliest(x: f16[M, V]) -> tuple[f32[M, K], i32[M, K]]:
    """Probabilities, whose sum is one of the whole row."""
    return F.topk(F.softmax(x), K)


@chain(M=4, V=1000, K=8)
def unguarded(x: f32[M, V]) -> tuple[f32[M, K], i32[M, K]]:
    """A softmax by hand: of a row of -inf it makes NaN."""
    e = F.exp(x - F.max(x))
    return F.topk(e / F.sum(e), K)


CHAINS = (plain, greedy, sampled, routed, normed)
TARGETS = ("cuda:sm_80", "cuda:h200", "hip:mi300x", "hip:gfx90a")


def kernel(plan: RowPlan) -> Kernel:
    """The plan's kernel in the emulator; other layouts get the nearest candidate."""
    assert plan.selection is not None
    chosen = plan.selection

    def variant(layout: Layout) -> tuple[Source, None]:
        plans = candidates(plan.graph, plan.target, layout).plans
        like = [
            other for other in plans
            if isinstance(other, RowPlan) and other.selection and other.selection.by == chosen.by
            and (other.threads, other.cluster) == (plan.threads, plan.cluster)
        ]  # fmt: skip
        return render((like or plans)[0]), None

    return Kernel(render(plan), None, finding.find(plan.target, "emulator"), variant)


def plans_of(found: Chain, name: str, **sizes: int) -> Iterator[RowPlan]:
    for plan in candidates(found.at(**sizes).graph, target(name)).plans:
        assert isinstance(plan, RowPlan)
        yield plan


def sizes_of(found: Chain, cols: int, k: int) -> dict[str, int]:
    return {"V": cols, **({"K": k} if "K" in found.graph.sizes else {})}


LENGTHS = ((61, 5), (1003, 17), (2999, 40))  # odd ones within and beyond a warp's


@pytest.mark.pairwise("number", "name", "cols")
@pytest.mark.parametrize(("cols", "k"), LENGTHS)
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("number", range(len(CHAINS)), ids=lambda number: CHAINS[number].name)
def test_some_candidates_of_every_chain_are_right(
    number: int, name: str, cols: int, k: int, request: pytest.FixtureRequest
) -> None:
    """Every 38th, from another one on for each chain and target; with --all, every 19th."""
    one, first = CHAINS[number], (number * len(TARGETS) + TARGETS.index(name)) % 19
    step = 19 if request.config.getoption("--all") else 38
    for plan in list(plans_of(one, name, **sizes_of(one, cols, k)))[first::step]:
        report = validate(kernel(plan), quick=True)
        assert report.ok, f"{plan.configuration}\n{report}"


@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize(("cols", "k"), [(1, 1), (2, 1), (9, 9), (33, 32), (1024, 1024), (1500, 1024)])
def test_as_many_as_there_are(name: str, cols: int, k: int) -> None:
    validate(kernel(next(plans_of(plain, name, V=cols, K=k))), quick=True).raise_for_error()


def by(plans: Iterator[RowPlan], which: str, cluster: int = 1) -> RowPlan:
    """The first candidate of that kind: "one by one" is a warp that takes the largest key out, "warp" one that
    ranks."""
    kind = ("warp", True) if which == "one by one" else (which, False)
    return next(
        p for p in plans
        if p.selection and (p.selection.by, p.selection.one_by_one) == kind and p.cluster == cluster and p.threads < 512
    )  # fmt: skip


ORDERS = ("ascending", "descending", "equal", "few", "outlier", "masked", "nan", "infinite", "half", "signed zeros")


@pytest.mark.parametrize(("which", "cols", "cluster"), [
    ("one by one", 16, 1), ("warp", 301, 1), ("streaming", 3001, 1), ("streaming", 301_001, 1),
    ("streaming", 30_001, 2), ("small_k", 3001, 1), ("small_k", 30_001, 2), ("large_k", 301, 1),
])  # fmt: skip
def test_the_map_of_a_kernel_names_its_sections(which: str, cols: int, cluster: int) -> None:
    """In their order, and with the algorithm's name before them."""
    text = render(by(plans_of(plain, "cuda:h200", V=cols), which, cluster)).text
    opening = [line.removeprefix("//") for line in text.split("\n\n")[0].splitlines()]
    method = next(i for i, line in enumerate(opening) if line.startswith(" method   "))
    first = next(i for i, line in enumerate(opening) if line.startswith(" sections "))
    assert first > method
    named = [line[10:].split()[0] for line in opening[first:] if line[10] != " "]
    assert re.findall(r"^ *// ---- (\w+)$", text, re.MULTILINE) == named


def row(order: str, cols: int) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(7)
    x = rng.standard_normal(cols).astype(np.float32)
    if order in ("ascending", "descending"):
        return np.sort(x)[:: 1 if order == "ascending" else -1].copy()
    if order == "equal":
        x[:] = 1.0
    elif order == "few":
        x = np.round(x)
    elif order == "outlier":
        x[5] = 1e30
    elif order == "masked":
        x[:] = -np.inf
    elif order == "nan":
        x[::2] = np.nan
    elif order == "infinite":
        x[::3] = np.inf
    elif order == "half":
        x[20:] = -np.inf
    elif order == "signed zeros":
        x = np.where(x > 0, np.float32(0.0), np.float32(-0.0)).astype(np.float32)
    return x


@pytest.mark.parametrize(
    ("cols", "which", "cluster"),
    [
        (300, "warp", 1), (1003, "streaming", 1), (9000, "streaming", 1), (9000, "streaming", 2),
        (9001, "streaming", 4), (600, "small_k", 1), (9000, "small_k", 2), (9001, "small_k", 4), (600, "large_k", 1),
        (3001, "large_k", 1),
    ],
)  # fmt: skip
def test_whatever_the_order(cols: int, which: str, cluster: int) -> None:
    """Each order in two rows, with others before and behind them."""
    k = 8 if cols < 1000 else 50
    made = kernel(by(plans_of(plain, "cuda:h200", V=cols, K=k), which, cluster))
    x = np.stack([row(order, cols) for order in (*ORDERS, *reversed(ORDERS))])
    x[-ORDERS.index("few") - 1] = row("few", cols)[::-1]
    values, columns = made(x)
    wanted = top_columns(x.astype(np.float64), k)
    np.testing.assert_array_equal(columns, wanted)
    expected_values = np.where(wanted < 0, -np.inf, np.take_along_axis(x, np.maximum(wanted, 0), -1))
    np.testing.assert_array_equal(values, expected_values)


def router(experts: int, k: int, tokens: int = 65536) -> Chain:
    @chain(M=tokens, V=experts, K=k)
    def routed(x: bf16[M, V]) -> tuple[f32[M, K], i32[M, K]]:
        p, columns = F.topk(F.softmax(x), K)
        return p / F.sum(p), columns

    return routed


@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (16, 4)])
def test_every_candidate_of_a_small_router(experts: int, k: int, name: str) -> None:
    for plan in plans_of(router(experts, k), name):
        report = validate(kernel(plan), quick=True)
        assert report.ok, f"{plan.configuration}\n{report}"


@pytest.mark.parametrize("name", ["cuda:sm_80", "cuda:h200", "hip:mi300x", "hip:gfx90a"])
def test_fewer_columns_take_no_longer(name: str) -> None:
    """Of few columns a row has few lanes, or one: a block for each row of 8 took thirty times as long."""
    times = [next(plans_of(router(experts, 2), name)).cost.time_us for experts in (8, 16, 32, 64)]
    assert times == sorted(times)
    for one, how in ((router(8, 2), "packed"), (router(8, 2).with_dtype(f32), "packed")):
        best = next(plans_of(one, name))
        assert best.selection
        assert best.selection.best == how
        assert best.tile.threads_per_row <= 2


@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize(("cols", "lanes"), [(7, 1), (16, 1), (13, 2), (29, 4), (61, 8)])
def test_the_largest_is_taken_out_whatever_the_order(cols: int, lanes: int, name: str) -> None:
    k = min(cols, 11)
    found = (p for p in plans_of(plain, name, V=cols, K=k) if p.selection and p.selection.one_by_one)
    made = kernel(next(p for p in found if p.tile.threads_per_row == lanes))
    x = np.stack([row(order, cols) for order in ORDERS])
    values, columns = made(x)
    wanted = top_columns(x.astype(np.float64), k)
    np.testing.assert_array_equal(columns, wanted)
    expected_values = np.where(wanted < 0, -np.inf, np.take_along_axis(x, np.maximum(wanted, 0), -1))
    np.testing.assert_array_equal(values, expected_values)


@pytest.mark.parametrize(("cols", "which"), [
    (4096, "streaming"), (5001, "streaming"), (251, "warp"), (4096, "small_k"), (5001, "small_k"), (4096, "large_k"),
    (1001, "large_k"),
])  # fmt: skip
def test_a_row_alone_has_the_same_bits(cols: int, which: str) -> None:
    """What is chosen, and the row's sum behind it, depend neither on the batch nor on where the row starts."""
    plans = plans_of(likeliest, "cuda:h200", V=cols, K=max(17, cols // 100))
    made = kernel(by((p for p in plans if p.misaligned_rows == (cols % 2 == 1)), which))
    x = np.random.default_rng(3).standard_normal((5, cols)).astype(np.float16)
    together = made(x)
    for at in range(5):
        for whole, alone in zip(together, made(x[at : at + 1].copy()), strict=True):
            np.testing.assert_array_equal(whole[at : at + 1], alone)


@pytest.mark.parametrize("which", ["warp", "streaming"])
def test_a_key_may_need_a_softmax_of_its_row(which: str) -> None:
    @chain(M=4, V=301, K=8)
    def nested(x: f32[M, V]) -> tuple[f32[M, K], i32[M, K]]:
        """Chosen by scores to which their probabilities are added."""
        return F.topk(F.softmax(x + F.softmax(x)), K)

    validate(kernel(by(plans_of(nested, "cuda:h200"), which)), quick=True).raise_for_error()


@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("which", ["warp", "streaming"])
def test_equal_keys_have_equal_bits_in_every_thread(which: str, name: str) -> None:
    """Keys that are made of a sum which each thread merges in an order of its own."""
    cols, k = {"warp": (120, 20), "streaming": (2000, 200)}[which]

    @chain(M=12, V=cols, K=k)
    def twice(x: f32[M, V]) -> i32[M, K]:
        return F.topk(F.softmax(F.softmax(x)), K)[1]

    x = np.round(np.random.default_rng(1).standard_normal((12, cols)).astype(np.float32), 1)
    plan = next(p for p in plans_of(twice, name) if p.selection and p.selection.by == which and p.tile.row_threads > 16)
    np.testing.assert_array_equal(kernel(plan)(x), np.argsort(-x, axis=-1, kind="stable")[:, :k])


@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize(("cols", "number"), [(3000, 0), (3000, 2), (40001, 0)])
def test_keys_that_compilers_may_fuse_differently_leave_out_nothing(cols: int, number: int, name: str) -> None:
    """The pass has another use for the product, so it rounds it; a candidate's key is a fused multiply-add."""

    @chain(M=4, V=cols, K=40)
    def shared(x: f32[M, V], y: f32[M, V], s: f32) -> tuple[f32[M, K], i32[M, K], f32[M, 1]]:
        z = x * s
        values, columns = F.topk(z + y, K)
        return values, columns, F.max(z)

    plan = [p for p in plans_of(shared, name) if p.selection and p.selection.by == "streaming"][number]
    made = kernel(plan)
    rng = np.random.default_rng(0)
    for _ in range(8):
        x, y = (np.repeat(rng.standard_normal((4, 1)).astype(np.float32), cols, 1) for _ in range(2))
        _, columns, _ = made(x, y, float(rng.standard_normal()))
        np.testing.assert_array_equal(columns, np.tile(np.arange(40), (4, 1)))
    validate(made, quick=True).raise_for_error()


@chain(M=8, V=301, K=6)
def shifted(x: f32[M, V], m: f32[M, 1]) -> tuple[f32[M, K], i32[M, K]]:
    """What is added to a row is no number everywhere."""
    return F.topk(F.softmax(x + m), K)


@chain(M=8, V=301, K=6)
def by_hand(x: f32[M, V], m: f32[M, 1]) -> tuple[f32[M, K], i32[M, K]]:
    """Of a row that is masked whole it makes NaN."""
    z = x + m
    e = F.exp(z - F.max(z))
    return F.topk(e / F.sum(e), K)


@chain(M=8, V=301)
def best_by_hand(x: f32[M, V], m: f32[M, 1]) -> i32[M, 1]:
    """The first of these."""
    z = x + m
    return F.argmax(F.exp(z) / F.sum(F.exp(z)))


@pytest.mark.pairwise("name", "which", "number")
@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
@pytest.mark.parametrize("which", ["one by one", "warp", "streaming", "small_k", "large_k"])
@pytest.mark.parametrize("number", range(3), ids=("softmax", "by hand", "argmax by hand"))
def test_rows_to_which_something_is_added_that_is_no_number(number: int, which: str, name: str) -> None:
    """By the formula in float64, apart from the generated reference: NaN first, equals by logits and then by column."""
    one = (shifted, by_hand, best_by_hand)[number]
    if one is best_by_hand and which == "large_k":
        pytest.skip("large k chooses more than one of 301 columns")
    cols = 29 if which == "one by one" else 301
    x = np.round(np.random.default_rng(11).standard_normal((10, cols)).astype(np.float32), 1)
    x[6:8], x[8, 7::9], x[9, 2 : cols - 2] = -np.inf, np.nan, -np.inf
    x[0:6, 11], x[0:6, 12] = -np.inf, np.inf * np.array([-1, -1, -1, -1, 1, 1])
    m = np.array([0, -np.inf, np.inf, np.nan, -np.inf, 1, 0, np.inf, 2, -1], np.float32)[:, None]
    with np.errstate(all="ignore"):
        z = x.astype(np.float64) + m
        top = z.max(-1, keepdims=True)
        e = np.exp(z - (np.where(top == -np.inf, 0, top) if one is shifted else top))
        p = e / e.sum(-1, keepdims=True)
    if one is shifted:
        p = np.where((z == -np.inf).all(-1, keepdims=True), 0, p)
    nothing = (z == -np.inf) & ~((z == -np.inf).all(-1, keepdims=True) & np.isnan(p))
    k = one.graph.picks
    order = np.lexsort((-z, ~np.isnan(z), -p, ~np.isnan(p), nothing))[:, :k]
    columns = np.where(np.take_along_axis(nothing, order, -1), -1, order)
    made = kernel(by(plans_of(one, name, V=cols), which))(x, m)
    if one is best_by_hand:
        np.testing.assert_array_equal(made, columns)
        return
    np.testing.assert_array_equal(made[1], columns)
    values = np.where(columns < 0, 0, np.take_along_axis(p, order, -1))
    np.testing.assert_allclose(made[0], values, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("which", ["streaming", "small_k", "large_k"])
def test_a_softmax_by_hand(which: str) -> None:
    validate(kernel(by(plans_of(unguarded, "cuda:h200"), which)), quick=True).raise_for_error()


@pytest.mark.parametrize("which", ["warp", "streaming", "small_k", "large_k"])
def test_a_key_may_depend_on_its_column(which: str) -> None:
    @chain(M=4, V=301, K=8)
    def causal(x: f32[M, V]) -> tuple[f32[M, K], i32[M, K]]:
        """Candidates are looked at again one by one, wherever they lie."""
        return F.topk(F.softmax(F.where(F.col_index(x) < 200, x, -float("inf"))), K)

    validate(kernel(by(plans_of(causal, "cuda:h200"), which)), quick=True).raise_for_error()


@pytest.mark.parametrize(("which", "cluster"), [("warp", 1), ("streaming", 2), ("small_k", 2)])
def test_columns_may_be_added_up(which: str, cluster: int) -> None:
    @chain(M=4, V=9000, K=8)
    def added(x: f32[M, V]) -> tuple[i32[M, K], i32[M, 1]]:
        """Of a cluster one block goes on behind the selection, and sums up ints by itself."""
        _, columns = F.topk(x, K)
        return columns, F.sum(columns)

    sizes = {"V": 301} if which == "warp" else {}
    validate(kernel(by(plans_of(added, "cuda:h200", **sizes), which, cluster)), quick=True).raise_for_error()


@pytest.mark.parametrize(("which", "cols"), [("warp", 64), ("warp", 301), ("streaming", 301)])
def test_a_key_may_be_made_of_what_rows_share(which: str, cols: int) -> None:
    @chain(M=4, V=301, K=8)
    def sharpened(sharpness: f32[M, 1], prior: f32[V]) -> tuple[f32[M, K], i32[M, K]]:
        """No operand of it moves along rows and columns both."""
        return F.topk(F.softmax(prior * sharpness), K)

    validate(kernel(by(plans_of(sharpened, "cuda:h200", V=cols), which)), quick=True).raise_for_error()


def test_what_the_order_does_not_depend_on_is_not_read() -> None:
    @chain(M=4, V=301)
    def shifted(x: f32[M, V], shift: i32[M, 1], weights: b8[M, V]) -> i32[M, 1]:
        """Adding the same number to a whole row moves no column; a float might be NaN."""
        return F.argmax(x * 0.5 + shift + F.sum(F.cast(weights, f32)))

    for which in ("warp", "streaming", "small_k"):
        plan = by(plans_of(shifted, "cuda:h200"), which)
        assert {t.tensor: t.moved > 0 for t in plan.cost.traffic.tensors} == {
            "x": True, "shift": False, "weights": False, "out": True,
        }  # fmt: skip
        assert "weights: not read; no result depends on it" in accesses(plan)
        validate(kernel(plan), quick=True).raise_for_error()


def test_padded_rows_and_broadcast_masks() -> None:
    found = sampled.at(V=777, K=9)
    made = kernel(by(plans_of(sampled, "cuda:h200", V=777, K=9), "streaming"))
    assert made.plan.graph.shape == found.graph.shape
    validate(made, quick=False, cases=("layout",)).raise_for_error()


def test_what_cannot_be_chosen_from_says_why() -> None:
    @chain(M=4, V=100)
    def kept(x: f32[M, V]) -> f32[M, V]:
        """Nothing chosen."""
        return F.softmax(x)

    refusals = {r.rule: r.reason for r in candidates(kept.graph, target("cuda:h200")).refusals}
    assert "keeps every column" in refusals["topk"]
    refused = {r.rule for r in candidates(plain.graph, target("cuda:h200")).refusals}
    assert refused >= {"elementwise", "rowwise"}
    refusals = {r.rule: r.reason for r in candidates(normed.graph, target("cuda:h200")).refusals}
    assert "needs a reduction of the row first; topk_small_k takes one pass over a row" in refusals["topk_small_k"]
    assert "needs a reduction of the row first; topk_large_k takes one pass over a row" in refusals["topk_large_k"]
    refusals = {r.rule: r.reason for r in candidates(plain.at(V=2000, K=8).graph, target("cuda:h200")).refusals}
    assert "chooses 8 of 2000 columns; topk_large_k is for one in 128 and more" in refusals["topk_large_k"]
    with pytest.raises(NoPlan, match="32 bits"):
        candidates(plain.at(V=2**31).graph, target("cuda:h200")).need()


def test_a_resident_row_keeps_nothing_else() -> None:
    @chain(M=4, V=1000, K=8)
    def written(x: f32[M, V], y: f32[M, V]) -> tuple[i32[M, K], f32[M, V]]:
        """The key is an output too."""
        h = x + y
        return F.topk(h, K)[1], h

    @chain(M=4, V=1000, K=8)
    def noisy(x: f32[M, V], noise: f32[M, V]) -> tuple[f32[M, K], i32[M, K]]:
        """Chosen by one value, weighed by the softmax of another."""
        _, columns = F.topk(x + noise, K)
        return F.take(F.softmax(x), columns), columns

    for refused, reason in ((written, "h is written whole"), (noisy, "a softmax is one of x")):
        refusals = {r.rule: r.reason for r in candidates(refused.graph, target("cuda:h200")).refusals}
        assert reason in refusals["topk_small_k"]
        assert reason in refusals["topk_large_k"]


@pytest.mark.parametrize(("cols", "k", "warps"), [(32000, 16, 64), (32000, 128, 32), (8192, 50, 8), (50257, 256, 64)])
def test_as_many_reach_the_bar_as_expected(cols: int, k: int, warps: int) -> None:
    """The bar of planner/selections/small_k_cost.py, in numpy: of rows in random order, to 10 % in the mean."""
    tile = Tile(128, warps * 32, 1, 1, -(-cols // (warps * 32)), cluster=warps // 4)
    small_k = small_k_of(k, tile, target("cuda:h200"))
    rng = np.random.default_rng(5)
    found = []
    for _ in range(60):
        keys = np.full(tile.cols, -np.inf)
        keys[:cols] = rng.standard_normal(cols)
        peaks = keys.reshape(-1, warps, 32).max(axis=0)
        said = np.sort(peaks, axis=1)[:, -small_k.want]
        bar = np.sort(said)[-small_k.need]
        found.append(int((keys >= bar).sum()))
    assert min(found) >= k
    assert np.mean(found) == pytest.approx(reaching(small_k, tile, cols), rel=0.1)


MANY = ((1000, 512), (1003, 100), (300, 300), (1500, 1024), (2048, 256), (4001, 600))


@pytest.mark.pairwise("order", "cols", "name")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("cols", "k"), MANY)
@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
def test_many_of_a_short_row(name: str, cols: int, k: int, order: str) -> None:
    """The fewest threads that hold it, and a row where ties stand between what is chosen and what is not."""
    plans = [p for p in plans_of(plain, name, V=cols, K=k) if p.selection and p.selection.by == "large_k"]
    made = kernel(min(plans, key=lambda plan: plan.threads))
    x = np.stack([row(order, cols), row("few", cols)[::-1], np.where(np.arange(cols) % 7 == 0, row(order, cols), 0)])
    values, columns = made(x)
    wanted = top_columns(x.astype(np.float64), k)
    np.testing.assert_array_equal(columns, wanted)
    expected_values = np.where(wanted < 0, -np.inf, np.take_along_axis(x, np.maximum(wanted, 0), -1))
    np.testing.assert_array_equal(values, expected_values)


SIFTED = ((8192, 512, 128), (8192, 100, 256), (2048, 512, 64), (1000, 32, 32))


@pytest.mark.parametrize(("cols", "k", "threads"), SIFTED)
def test_as_many_reach_the_bar_of_a_short_row_as_expected(cols: int, k: int, threads: int) -> None:
    """The bar of planner/selections/large_k_cost.py, in numpy: of rows in random order, to 10 % in the mean; and no
    row's too many."""
    tile = Tile(threads, threads, 1, 1, -(-cols // threads))
    large_k = large_k_of(k, cols, tile, target("cuda:h200"))
    assert large_k is not None
    rng = np.random.default_rng(5)
    found = []
    for _ in range(60):
        keys = np.full(tile.per_thread * threads, -np.inf)
        keys[:cols] = rng.standard_normal(cols)
        own = keys.reshape(tile.per_thread, threads // 32, 32)
        peaks = np.stack([own[g :: large_k.groups].max(axis=0) for g in range(large_k.groups)])
        said = np.sort(peaks.transpose(1, 0, 2).reshape(threads // 32, -1), axis=1)
        bar = said[:, -(large_k.want + large_k.enough) // 2].min()
        found.append(int((keys >= bar).sum()))
    assert k <= min(found) <= max(found) <= large_k.limit
    assert np.mean(found) == pytest.approx(candidates_of(large_k, tile, cols), rel=0.1)


@pytest.mark.parametrize("rows", [1, 64])
def test_few_long_rows_stay_in_registers(rows: int) -> None:
    plan = next(plans_of(likeliest, "cuda:h200", M=rows, V=50257, K=256))
    assert plan.rule == "topk_small_k"
    assert plan.cluster > 1


@pytest.mark.parametrize("name", TARGETS)
def test_few_rows_are_spread(name: str) -> None:
    """One row of a vocabulary: a cluster where there are clusters, else the largest block that pays."""
    plan = next(plans_of(plain, name, M=1, V=50257, K=256))
    assert (plan.cluster > 1) == (plan.target.max_cluster > 1)
    assert plan.threads * plan.cluster >= 512


@pytest.mark.parametrize(("cols", "k", "threads"), [(512, 64, 32), (1000, 100, 64), (4096, 50, 64)])
def test_short_rows_have_few_threads(cols: int, k: int, threads: int) -> None:
    """Where a warp has no room for so many; and blocks of less than a warp are none."""
    assert next(plans_of(plain, "cuda:h200", M=8192, V=cols, K=k)).threads <= threads
    assert all(plan.threads >= plan.target.warp for plan in plans_of(plain, "hip:mi300x", M=8192, V=cols, K=k))


@pytest.mark.parametrize("name", ["cuda:a100", "cuda:h200"])
@pytest.mark.parametrize(("cols", "k"), [(32000, 128), (262144, 1024)])
def test_registers_are_shared_by_blocks_that_have_room(name: str, cols: int, k: int) -> None:
    """No candidate has its registers cut for blocks that shared memory would keep out."""
    told = [p for p in plans_of(plain, name, M=32, V=cols, K=k) if p.selection and p.selection.by == "streaming"]
    assert told
    for plan in told:
        assert plan.selection
        assert 1 <= plan.selection.resident <= plan.target.shared_per_sm // plan.shared_bytes


@pytest.mark.parametrize(("cols", "k"), [(1000, 256), (1000, 512), (2048, 512), (4096, 512), (8192, 512)])
def test_many_columns_are_chosen_from_registers(cols: int, k: int) -> None:
    assert next(plans_of(plain, "cuda:h200", M=4096, V=cols, K=k)).rule == "topk_large_k"


def test_a_warp_has_fewer_candidates_than_it_ranks() -> None:
    """Where as many are chosen as a warp has lanes, the poorest lane's largest key is a bar that far too many reach."""
    plan = next(plans_of(plain, "cuda:h200", M=4096, V=1000, K=32))
    assert plan.selection is not None
    assert plan.selection.by != "warp"


def test_short_rows_go_to_warps() -> None:
    plan = next(plans_of(plain, "cuda:h200", M=131072, V=256, K=8))
    assert plan.selection is not None
    assert plan.selection.by == "warp"


@pytest.mark.parametrize(("cols", "k"), [(10_000, 16), (100_000, 128), (1_000_000, 1024)])
def test_candidates_are_a_small_part_of_the_row(cols: int, k: int) -> None:
    plan = next(plans_of(plain, "cuda:h200", M=4096, V=cols, K=k))
    assert plan.selection is not None
    found = expected(plan.selection, plan.tile, cols)
    assert k <= found.candidates <= 0.2 * cols


SHIFTS = (-1e9, -1000.0, -60.0, 0.0, 95.0, 1000.0, 1e9)


@pytest.mark.parametrize("name", ["cuda:h200", "hip:mi300x"])
def test_sums_of_rows_far_from_zero(name: str) -> None:
    """Exponentials are added up below 0 or what was seen before: rows that this loses are read again."""

    @chain(M=len(SHIFTS) + 2, V=2999, K=17)
    def shifted(x: f32[M, V]) -> tuple[f32[M, K], i32[M, K]]:
        """Probabilities."""
        return F.topk(F.softmax(x), K)

    one = kernel(by(plans_of(shifted, name), "streaming"))
    rng = np.random.default_rng(3)
    x = rng.standard_normal((len(SHIFTS) + 2, 2999)).astype(np.float32)
    x[: len(SHIFTS)] += np.array(SHIFTS, np.float32)[:, None]
    x[-2, :2000] = -np.inf  # nothing at first,
    x[-2, 2000:] += 200.0  # and then what is far above 0
    x[-1] = np.linspace(-300.0, 300.0, 2999, dtype=np.float32)  # each vector is far above the one before
    values, columns = one(x)
    e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True).astype(np.float64))
    wanted = top_columns(x, 17)
    assert (columns == wanted).all()
    assert values == pytest.approx(np.take_along_axis(e / e.sum(axis=1, keepdims=True), wanted, 1), rel=2e-5, abs=1e-12)
