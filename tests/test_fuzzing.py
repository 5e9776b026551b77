"""The fuzz, and that it sees what it is for: random chains, a judge that tells wrong from right, every feature drawn.

Of the seeds below, those run that show something new; with --all, each. `make fuzz SEEDS=0-2000` runs as many seeds as
wanted.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import fusegen
from fusegen.emulator import KernelFault
from fusegen.errors import NoPlan, ValidationError
from fusegen.storage.folders import cache_root
from tests.fuzzing import trial
from tests.fuzzing.__main__ import main, seeds_of
from tests.fuzzing.arithmetic import UNARY, add, cast, div, maximum, mul, power, sub
from tests.fuzzing.bounded import EPS, INF, STORED, Array, Bounded, as_float, exact
from tests.fuzzing.choosing import best, chosen
from tests.fuzzing.drawing_rows import FLOATS
from tests.fuzzing.judging import difference, judge, judge_columns
from tests.fuzzing.operands import LAYOUTS, Fill, lay, sized
from tests.fuzzing.products import product
from tests.fuzzing.report import RESULTS, WELL, finding
from tests.fuzzing.rows import REDUCE, rms_scale, rmsnorm, softmax
from tests.fuzzing.seeds import ORDER, TARGETS, Case, call_of, case, meaning
from tests.fuzzing.trial import run_trial
from tests.fuzzing.workers import ROOT, run_seeds
from tests.tools import needs_check

FIRST = range(112)  # of the planner's first choices: no fewer draw every feature
ANY = range(1000, 1032)  # of other candidates than the first
PARTS = 3  # that the seeds are run in: of one process each

# ---------------------------------------------------------------- the fuzz


def shown(seed: int) -> set[object]:
    """Each feature of a seed's chain and call, and its kind of chain together with its target."""
    found = case(seed)
    return {*found.features, (found.draft.kind, found.target)}


def telling(seeds: Iterable[int], what: Callable[[int], set[object]]) -> list[int]:
    """Few seeds that show all that these show: again and again the one that shows most of what is left."""
    shows = {seed: what(seed) for seed in seeds}
    left = set().union(*shows.values())
    kept = []
    while left:
        kept.append(max(shows, key=lambda seed: len(shows[seed] & left)))
        left -= shows[kept[-1]]
    return sorted(kept)


def seeds_to_run(every: bool, seeds: range) -> list[int]:
    """All of them, or those that tell: of first choices every feature and every kind of chain for every target that is
    drawn of it; of other candidates each kind of chain, each target, and what first choices don't show."""
    if every:
        return list(seeds)
    if seeds is FIRST:
        return telling(seeds, shown)
    others = EVERY - {feature for seed in FIRST for feature in case(seed).features}
    return telling(seeds, lambda seed: {case(seed).draft.kind, case(seed).target, *(others & case(seed).features)})


def fuzzed(seeds: Sequence[int], *, any_candidate: bool) -> None:
    """In one process beside this one. Fails with the commands that show what is amiss."""
    environment = {**os.environ, "FUSEGEN_CACHE_DIR": str(cache_root())}
    rows = list(run_seeds(seeds, any_candidate=any_candidate, environment=environment))
    assert [row["seed"] for row in rows] == list(seeds)
    amiss = [finding(row) for row in rows if row["result"] not in WELL]
    assert not amiss, "\n" + "\n".join(amiss)
    assert sum(row["result"] == "right" for row in rows) > len(rows) / 2


@needs_check
@pytest.mark.parametrize("part", range(PARTS))
def test_first_choices(part: int, request: pytest.FixtureRequest) -> None:
    fuzzed(seeds_to_run(request.config.getoption("--all"), FIRST)[part::PARTS], any_candidate=False)


@needs_check
def test_any_candidates(request: pytest.FixtureRequest) -> None:
    fuzzed(seeds_to_run(request.config.getoption("--all"), ANY), any_candidate=True)


# ---------------------------------------------------------------- what is drawn

EVERY = {
    *(f"{rank} leading axes" for rank in range(5)), "a number for a dim", "a square of one dim", "one column",
    "ragged rows", "awkward names", "special values", "another batch", "no rows", "1 outputs", "2 outputs", "3 outputs",
    "outputs of different types", "causal", "argmax", "take", "in order", "in any order",
    *(f"chosen by {how}" for how in ("raw", "mask", "softmax", "log_softmax", "sigmoid", "integers")),
    "special terms of a row", "special terms of a column", "wrapping integers", "extremes of integers",
    "extremes of a row of integers", "bits of integers", "integers of floats", "ends of i32", "random numbers",
    "running sums", "products",
    "products of batches", *(f"products of {dtype}" for dtype in FLOATS), "products side by side", "a pair of products",
    "attention", "attention of f16", "attention of bf16", "shared keys",
    *(f"attention to a {mask}" for mask in ("causal", "window", "chunk", "prefix", "memory")),
    "a left factor transposed", "a left factor computed", "scales of rows", "special scales of rows",
    *TARGETS, *(drawn.kind for drawn in ORDER), *(f"operand {layout}" for layout in LAYOUTS),
    "out=", *(f"out {layout}" for layout in LAYOUTS - {"broadcast"}),
}  # fmt: skip


def test_the_seeds_that_run_draw_every_feature() -> None:
    first, other = ([case(seed) for seed in seeds_to_run(False, seeds)] for seeds in (FIRST, ANY))
    assert sorted(EVERY - {feature for found in (*first, *other) for feature in found.features}) == []
    assert {found.target for found in other} == set(TARGETS)
    assert {found.draft.kind for found in other} == {drawn.kind for drawn in ORDER}


def test_a_seed_is_the_same_chain_always() -> None:
    first, second = case(77), case(77)
    assert first.draft.text == second.draft.text
    assert (first.target, first.sizes, first.fills) == (second.target, second.sizes, second.fills)
    assert first.outs == second.outs
    for one, other in zip(call_of(first).plain, call_of(second).plain, strict=True):
        np.testing.assert_array_equal(one, other)


def test_most_that_is_drawn_is_a_chain() -> None:
    refused = 0
    for seed in range(300, 500):
        try:
            trial.chain_of(case(seed))
        except Exception:
            refused += 1
    assert refused < 16


def test_the_judge_knows_nothing_of_what_it_judges() -> None:
    """What evaluates and compares imports nothing of fusegen; what runs kernels nothing of their reference."""
    for path in Path(ROOT, "tests", "fuzzing").glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        own = [name for name in names if name.split(".")[0] == "fusegen"]
        assert not own or path.name in ("trial.py", "worker.py"), path
        assert not [name for name in own if "reference" in name or name.startswith("fusegen.validation.")], path


# ---------------------------------------------------------------- values with a bound


def f32(*values: float) -> Bounded:
    return Bounded("f", np.array(values, np.float32).astype(float))


@pytest.mark.parametrize("name", UNARY)
def test_f32_arithmetic_lies_within_the_bounds(name: str) -> None:
    """numpy's own f32 functions are close to the truth: outside a bound of theirs, the bound is wrong."""
    x = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    x = np.abs(x) + np.float32(0.1) if name in ("log", "log1p", "sqrt", "rsqrt") else x
    with np.errstate(all="ignore"):
        want = UNARY[name](Bounded("f", x.astype(float)))
        simple: dict[str, Callable[[Array], Array]] = {
            "rsqrt": lambda a: 1 / np.sqrt(a), "sigmoid": lambda a: 1 / (1 + np.exp(-a)), "neg": np.negative,
            "relu": lambda a: np.maximum(a, 0), "silu": lambda a: a / (1 + np.exp(-a)),
        }  # fmt: skip
        run = simple.get(name) or getattr(np, name, None)
        got = want.value.astype(np.float32) if run is None else run(x)
    assert got.dtype == np.float32
    assert not judge(got, want, "f32", got.shape).complaint
    assert np.isfinite(want.error).all()


def test_a_sum_in_any_order_lies_within_its_bound() -> None:
    x = np.random.default_rng(1).standard_normal((4, 4097)).astype(np.float32) * 100
    want = REDUCE["sum"](Bounded("f", x.astype(float)))
    for order in (x, x[:, ::-1], np.sort(x, -1)):
        parts = np.add.reduce(order[:, :4096].reshape(4, 16, 256), -1, dtype=np.float32)
        got = np.add.reduce(parts, -1, keepdims=True, dtype=np.float32) + order[:, 4096:]
        assert not judge(got, want, "f32", (4, 1)).complaint


def test_integers_wrap() -> None:
    top, one = Bounded("i", np.array([2**31 - 1, -(2**31)])), exact(1)
    assert add(top, one).value.tolist() == [-(2**31), -(2**31) + 1]
    assert sub(top, one).value.tolist() == [2**31 - 2, 2**31 - 1]
    assert mul(top, top).value.tolist() == [1, 0]
    assert maximum(top, exact(2**24 + 1)).value.tolist() == [2**31 - 1, 2**24 + 1]
    assert not add(top, one).error.any()


def test_casts_to_i32_saturate() -> None:
    assert cast(f32(np.nan, np.inf, -np.inf, 3e9, -1.9, 1.9), "i32").value.tolist() == [
        0, 2**31 - 1, -(2**31), 2**31 - 1, -1, 1,
    ]  # fmt: skip


def test_what_is_beyond_f32_is_infinite_and_its_edge_is_not_judged() -> None:
    with np.errstate(all="ignore"):
        far, edge = mul(f32(1e30), f32(1e30)), mul(f32(2.0**127), f32(2.0 - 2.0**-23))
    assert far.value[0] == INF
    assert far.error[0] == 0
    assert np.isinf(edge.error[0])
    assert np.isinf(div(f32(1.0), f32(1e-40)).error[0])
    assert np.isfinite(power(f32(2.0), 2.7).error[0])


def test_i32_beyond_2_to_the_24_are_rounded_as_floats() -> None:
    assert as_float(Bounded("i", np.array([2**24 + 1]))).error[0] >= 1
    assert as_float(Bounded("i", np.array([2**24]))).error[0] == 0


def test_the_order_of_a_choice() -> None:
    """NaN first, then descending, ties by column, -inf never."""
    score = f32(1.0, -INF, 3.0, np.nan, 3.0, INF, -0.0, 0.0)
    row = Bounded("f", score.value[None])
    choice = chosen(row, 8)
    assert choice.columns.tolist() == [[3, 5, 2, 4, 0, 6, 7, -1]]
    assert choice.certain.all()
    np.testing.assert_array_equal(best(row, choice).value, [[np.nan, INF, 3, 3, 1, -0.0, 0, -INF]])


def test_a_choice_goes_by_what_is_below_a_softmax() -> None:
    """Also where a term of the row is no number: then nothing is left, or all are alike; -inf + inf is NaN."""
    logits = np.array([[0.0, -200.0, -100.0, -INF]] * 4)
    terms = Bounded("f", np.array([[1.0], [-INF], [INF], [np.nan]]))
    with np.errstate(all="ignore"):
        choice = chosen(softmax(add(Bounded("f", logits), terms)), 4)
    assert choice.columns.tolist() == [[0, 2, 1, -1], [-1] * 4, [3, 0, 1, 2], [0, 1, 2, 3]]
    assert choice.missing == 0


def test_ranks_too_close_to_call_are_not_judged() -> None:
    score = Bounded("f", np.array([[1.0, 1.0 + EPS, 5.0]]), np.full((1, 3), 2 * EPS))
    assert chosen(score, 3).certain.tolist() == [[True, False, False]]


# ---------------------------------------------------------------- the judge

NEXT = {"f32": np.int32, "f16": np.int16, "bf16": np.int16}


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_step_beyond_the_bound_is_wrong(dtype: str) -> None:
    value = np.random.default_rng(2).standard_normal((3, 50)).astype(STORED[dtype])
    want = Bounded("f", value.astype(float))
    assert not judge(value, want, dtype, (3, 50)).complaint
    spoilt = value.copy()
    spoilt.view(NEXT[dtype])[1, 7] += 1
    assert "1 of 150 are wrong, the first at [1, 7]" in judge(spoilt, want, dtype, (3, 50)).complaint
    loose = Bounded("f", want.value, np.abs(want.value) * 2.0 ** (-8 if dtype == "bf16" else -10))
    assert not judge(spoilt, loose, dtype, (3, 50)).complaint


@pytest.mark.parametrize(("want", "got"), [(1.0, np.nan), (np.nan, 1.0), (INF, 3e38), (INF, -INF), (0.0, INF)])
def test_no_number_in_a_numbers_place_is_wrong(want: float, got: float) -> None:
    law = Bounded("f", np.array([want]))
    assert judge(np.array([got], np.float32), law, "f32", (1,)).complaint
    assert not judge(np.array([want], np.float32), law, "f32", (1,)).complaint


def test_what_is_not_certain_is_not_judged_and_counted() -> None:
    law = Bounded("f", np.array([1.0, 2.0]), np.array([INF, 0.0]))
    verdict = judge(np.array([9.0, 2.0], np.float32), law, "f32", (2,))
    assert (verdict.complaint, verdict.elements, verdict.unjudged) == ("", 2, 1)
    assert judge(np.array([1, 9], np.float32), law, "f32", (2,)).complaint


@pytest.mark.parametrize("got", [np.zeros((2, 3), np.float16), np.zeros((3, 2), np.float32)])
def test_another_type_or_shape_is_wrong(got: Array) -> None:
    assert judge(got, Bounded("f", np.zeros((2, 3))), "f32", (2, 3)).complaint


@pytest.mark.parametrize(
    ("got", "well"),
    [([4, 2, -1], True), ([2, 4, -1], True), ([2, 2, -1], False), ([-1, 2, 4], False), ([2, 3, -1], False),
     ([2, 9, -1], False)],
)  # fmt: skip
def test_columns_in_any_order(got: list[int], well: bool) -> None:
    want = chosen(Bounded("f", np.array([[-INF, -INF, 5.0, -INF, 7.0]])), 3)
    verdict = judge_columns(np.array([got], np.int32), want, (1, 3), ordered=False)
    assert bool(verdict.complaint) is not well
    ordered = judge_columns(np.array([got], np.int32), want, (1, 3), ordered=True)
    assert bool(ordered.complaint) is (got != [4, 2, -1])


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(("got", "well"), [([3, 0], True), ([3, 1], True), ([0, 3], False), ([3, 2], False)])
def test_ranks_too_close_to_call_are_judged_by_their_keys(got: list[int], well: bool, ordered: bool) -> None:
    want = chosen(Bounded("f", np.array([[1.0, 1.0 + EPS, 0.5, 7.0]]), np.full((1, 4), 2 * EPS)), 2)
    verdict = judge_columns(np.array([got], np.int32), want, (1, 2), ordered=ordered)
    assert bool(verdict.complaint) is not (well or (not ordered and got == [0, 3]))
    assert not verdict.unjudged


def test_bits_are_compared() -> None:
    one = np.array([0.0, np.nan, 1.0], np.float32)
    assert not difference(one, np.array([0.0, -np.nan, 1.0], np.float32))
    assert difference(one, np.array([-0.0, np.nan, 1.0], np.float32))
    half = one.astype(ml_dtypes.bfloat16)
    assert not difference(half, half.copy())
    assert difference(half, one)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts_hold_their_values_and_show_what_is_beside_them(layout: str) -> None:
    values = np.broadcast_to(np.arange(12, dtype=np.float32).reshape(1, 3, 4), (2, 3, 4))
    laid = lay(values, Fill("", 0, layout, 3, 1))
    np.testing.assert_array_equal(laid.array, values)
    if layout == "broadcast":
        return
    before = laid.around
    laid.array[...] = 5
    assert laid.around == before
    if layout in ("padded", "misaligned", "every second row"):
        laid.room.reshape(-1)[0 if layout == "misaligned" else -1] = 9
        assert laid.around != before


# ---------------------------------------------------------------- its classes


class Pretended:
    """A kernel that returns what is meant, but for what a test spoils."""

    in_place = frozenset[tuple[str, str]]()
    plan = SimpleNamespace(regime="pretended")

    def __init__(self, found: Case, spoil: Callable[[list[Array], tuple[Any, ...], int], None]) -> None:
        self.found, self.call, self.spoil, self.calls = found, call_of(found), spoil, 0

    def __call__(self, *operands: Any, out: Any = None) -> Any:
        with np.errstate(all="ignore"):
            wants, outputs = meaning(self.found, self.call).outputs, self.found.draft.outputs
            shapes = [sized(out.term.shape, self.found.sizes) for out in outputs]
            whole = [np.broadcast_to(want.value, shape) for want, shape in zip(wants, shapes, strict=True)]
            got = [one.astype(STORED[out.dtype]) for one, out in zip(whole, outputs, strict=True)]
        self.spoil(got, operands, self.calls)
        self.calls += 1
        if out is not None:
            for place, array in zip(out if isinstance(out, tuple) else (out,), got, strict=True):
                place[...] = array
        return tuple(got) if len(got) > 1 else got[0]


def nothing(got: list[Array], operands: tuple[Any, ...], calls: int) -> None:
    pass


def an_element(got: list[Array], operands: tuple[Any, ...], calls: int) -> None:
    got[0].reshape(-1)[0] += got[0].dtype.type(3)


def no_number(got: list[Array], operands: tuple[Any, ...], calls: int) -> None:
    got[0].reshape(-1)[-1] = np.nan


def an_operand(got: list[Array], operands: tuple[Any, ...], calls: int) -> None:
    next(one for one in operands if isinstance(one, np.ndarray) and one.flags.writeable).view()[..., :1] = 3


def another_shape(got: list[Array], operands: tuple[Any, ...], calls: int) -> None:
    got[0] = got[0][..., None]


def bits_of_the_second_call(got: list[Array], operands: tuple[Any, ...], calls: int) -> None:
    if calls == 1:
        got[0].view({2: np.uint16, 4: np.uint32}[got[0].dtype.itemsize]).reshape(-1)[:1] ^= 1


@pytest.fixture(scope="module")
def plain_seed() -> Iterator[int]:
    """A seed of rows with numbers alone, into which a kernel writes nothing by out=."""
    for seed in range(0, 4000, len(ORDER)):
        found = case(seed)
        whole = found.draft.outputs[0].dtype in FLOATS and 0 not in found.sizes.values() and found.outs is None
        if whole and "special values" not in found.features and "operand broadcast" not in found.features:
            with np.errstate(all="ignore"):
                want = meaning(found, call_of(found)).outputs[0]
            if np.isfinite(want.error).all() and (np.abs(want.value) < 2).all() and (want.error < 1e-3).all():
                yield seed
                return


@pytest.mark.parametrize(
    ("spoil", "says"),
    [(an_element, "are wrong"), (no_number, "found nan"), (an_operand, "was changed"), (another_shape, "wanted"),
     (bits_of_the_second_call, "1 of")],
)  # fmt: skip
def test_broken_results_are_wrong(spoil: Any, says: str, plain_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "compiled", lambda outcome, found: Pretended(found, nothing))
    assert run_trial(plain_seed).result == "right"
    monkeypatch.setattr(trial, "compiled", lambda outcome, found: Pretended(found, spoil))
    outcome = run_trial(plain_seed)
    assert outcome.result == "wrong", outcome.why
    assert says in outcome.why


@pytest.mark.parametrize(
    ("failed", "spoil", "result"),
    [("rel L2 inf", nothing, "false-alarm"), ("rel L2 inf", an_element, "caught"), ("a race", nothing, "caught")],
)
def test_what_validation_refuses(
    failed: str, spoil: Any, result: str, plain_seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unproven(chain: Any, target: str, *, on: str, validate: bool = True) -> Pretended:
        if validate:
            raise ValidationError(failed)
        return Pretended(case(plain_seed), spoil)

    monkeypatch.setattr("fusegen.compile", unproven)
    outcome = run_trial(plain_seed)
    assert (outcome.result, outcome.failed) == (result, failed)


@pytest.mark.parametrize(("error", "result"), [(NoPlan("no rule"), "refused"), (RuntimeError("broken"), "crash")])
def test_errors(error: Exception, result: str, plain_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(outcome: Any, found: Case) -> None:
        raise error

    monkeypatch.setattr(trial, "compiled", fail)
    assert run_trial(plain_seed).result == result
    monkeypatch.setattr(trial, "case", fail)
    assert run_trial(plain_seed).result == "harness"


def padded_alone(found: Case) -> bool:
    laid = {feature for feature in found.features if feature.startswith("operand")} - {"operand plain"}
    return laid == {"operand padded"} and found.outs is None and found.draft.ordered


def test_a_layout_that_is_promised_and_refused_is_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Particular(Pretended):
        def __call__(self, *operands: Any, out: Any = None) -> Any:
            self.calls += 1
            if self.calls > 1:
                raise NoPlan("not so")
            return super().__call__(*operands, out=out)

    promised = next(seed for seed in range(400) if padded_alone(case(seed)))
    monkeypatch.setattr(trial, "compiled", lambda outcome, found: Particular(found, nothing))
    outcome = run_trial(promised)
    assert (outcome.result, "refuses a layout" in outcome.why) == ("false-alarm", True)


# ---------------------------------------------------------------- running


def script(tmp_path: Path, body: str) -> None:
    """A package in the place of this one, whose worker does `body` for each seed."""
    folder = tmp_path / "tests" / "fuzzing"
    folder.mkdir(parents=True)
    for one in (folder.parent, folder):
        (one / "__init__.py").touch()
    lines = "import json, os, sys, time\nprint('ready', flush=True)\nfor line in sys.stdin:\n    seed = int(line)\n"
    say = "    print(json.dumps({'seed': seed, 'result': 'right'}), flush=True)\n"
    (folder / "worker.py").write_text(f"{lines}    {body}\n{say}", encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "result", "why"),
    [("if seed == 3: os.kill(os.getpid(), 11)", "crash", "died of SIGSEGV"),
     ("if seed == 3: print('bad', file=sys.stderr); sys.exit(5)", "crash", "ended with 5\nbad"),
     ("if seed == 3: time.sleep(60)", "hang", "not done after 1 s")],
)  # fmt: skip
def test_a_seed_that_dies_or_hangs_costs_itself_alone(
    body: str, result: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, body)
    monkeypatch.setattr("tests.fuzzing.workers.ROOT", tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    rows = {row["seed"]: row for row in run_seeds(range(7), jobs=2, limit_s=1.0, environment=environment)}
    assert sorted(rows) == list(range(7))
    assert rows.pop(3)["result"] == result
    assert all(row["result"] == "right" for row in rows.values())


def test_the_commands_exit_code_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path, "if seed == 3: os.kill(os.getpid(), 11)")
    monkeypatch.setattr("tests.fuzzing.workers.ROOT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    log = tmp_path / "log.jsonl"
    assert main(["--seeds", "0-3", "--jobs", "1", "--log", str(log)]) == 0
    assert len(log.read_text().splitlines()) == 3
    capsys.readouterr()
    assert main(["--seeds", "0-5", "--jobs", "1", "--log", str(log)]) == 1
    shown = capsys.readouterr().out
    assert "python -m tests.fuzzing --seeds 3 --show" in shown
    assert re.search(r"crash\W+1", shown)
    assert re.search(r"right\W+4", shown)


def test_seeds_are_numbers_and_ranges() -> None:
    assert seeds_of("3,7,10-12") == [3, 7, 10, 11]
    assert set(WELL) < set(RESULTS)
    with pytest.raises(SystemExit):
        main(["--seeds", "3-x"])


@needs_check
def test_one_seed_is_shown() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzzing", "--seeds", "6", "--show"], cwd=ROOT, capture_output=True, text=True
    )
    assert "@chain(" in done.stdout
    assert re.search(r"result +right", done.stdout), done.stdout + done.stderr


def test_a_fault_at_a_call_is_a_crash(plain_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(got: list[Array], operands: tuple[Any, ...], calls: int) -> None:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(trial, "compiled", lambda outcome, found: Pretended(found, strike))
    assert run_trial(plain_seed).result == "crash"
    assert issubclass(KernelFault, Exception)


def test_products_are_bounded_by_what_their_factors_are_rounded_to() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((5, 64)), rng.standard_normal((64, 7))
    left, right = (Bounded("f", x.astype(np.float32).astype(float)) for x in (a, b))
    got = (left.value.astype(ml_dtypes.bfloat16).astype(np.float32) @ right.value.astype(np.float32)).astype(np.float32)
    assert judge(got, product(left, right, "bf16", computed=False, tf32=False), "f32", (5, 7)).complaint
    assert not judge(got, product(left, right, "bf16", computed=True, tf32=False), "f32", (5, 7)).complaint


@needs_check
@pytest.mark.parametrize("gpu", ["cuda:h200", "cuda:sm_80", "hip:mi300x"])
def test_a_scale_behind_a_product_of_f16_finds_what_was_rounded_before(gpu: str) -> None:
    """What of x * g is beyond f16 is infinite, and what is subnormal there has lost bits: exactly these are judged."""
    text = """from fusegen import chain, dims, f16, f32
from fusegen import ops as F
M, N, K = dims("M N K")

@chain(M=6, N=16, K=64)
def spec(x: f16[M, K], g: f16[K], w: f16[K, N]) -> f32[M, N]:
    return F.rmsnorm(x, g) @ w
"""
    module: dict[str, Any] = {}
    exec(text, module)
    kernel = fusegen.compile(module["spec"], gpu, on="emulator", validate=False)
    assert "(in f16 what is beyond 65504 is an infinity, and below 6.1e-5 bits are lost)" in kernel.plan.rounding[0]
    rng = np.random.default_rng(4)
    x, w = rng.standard_normal((6, 64)), rng.standard_normal((64, 16)).astype(np.float16)
    for size, gain, first in (1.0, 0.7, 1.0), (1e-3, 1e-3, 1e-3), (1.0, 8.0, 3e4):
        operands = [(x * size).astype(np.float16), np.full(64, gain, np.float16), w]
        operands[0][0, 0] = first
        a, g, b = (Bounded("f", one.astype(float)) for one in operands)
        with np.errstate(all="ignore"):
            moved = mul(product(mul(a, g), b, "f16", computed=True, tf32=False), rms_scale(a, 1e-6))
            written = product(rmsnorm(a, g, 1e-6), b, "f16", computed=True, tf32=False)
        got = kernel(*operands)
        verdict = judge(got, moved, "f32", (6, 16))
        assert not verdict.complaint
        assert not verdict.unjudged
        assert judge(got, written, "f32", (6, 16)).complaint  # as if it were rounded only once it is scaled
        assert np.isinf(got).any(-1).tolist() == [first > 1e4, *[False] * 5]


@needs_check
@pytest.mark.parametrize("gpu", ["cuda:h200", "cuda:sm_80", "hip:mi300x"])
def test_a_factor_beyond_the_range_of_f16_is_what_it_is_rounded_to(gpu: str) -> None:
    """An infinity, or 0: what meets 0, or an infinity, is NaN, though f32 would hold the factor."""
    text = """from fusegen import chain, dims, f16, f32
M, N, K = dims("M N K")

@chain(M=4, N=16, K=64)
def spec(x: f16[M, K], scale: f32[M, 1], w: f16[K, N]) -> f32[M, N]:
    return (x * scale) @ w
"""
    module: dict[str, Any] = {}
    exec(text, module)
    kernel = fusegen.compile(module["spec"], gpu, on="emulator", validate=False)
    assert kernel.plan.rounding == ("x * scale to f16 before it is multiplied",)
    x, w = np.ones((4, 64), np.float16), np.ones((64, 16), np.float16)
    w[0, 0], w[0, 1] = 0, np.inf
    scale = np.array([[1.0], [1e5], [1e-7], [1e-8]], np.float32)
    a, b = (Bounded("f", one.astype(float)) for one in (x, w))
    with np.errstate(all="ignore"):
        left = mul(a, Bounded("f", scale.astype(float)))
        rounded, held = (product(left, b, "f16", computed=computed, tf32=False) for computed in (True, False))
    got = kernel(x, scale, w)
    assert not judge(got, rounded, "f32", (4, 16)).complaint
    assert not judge(got, rounded, "f32", (4, 16)).unjudged
    assert judge(got, held, "f32", (4, 16)).complaint  # as if f32 were multiplied
    np.testing.assert_array_equal(got[:, :2], [[63, INF], [np.nan, INF], [got[2, 0], INF], [0, np.nan]])
