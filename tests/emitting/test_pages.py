"""Attention over keys and values in pages: right on every target, without a copy of them, and faults are caught."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fusegen
from fusegen import Chain, bf16, chain, dims, f16, i32
from fusegen import ops as F
from fusegen.emulator import EmulatorUnavailable, compiler
from fusegen.planner.attention.parts import AttentionPlan
from fusegen.planner.attention.wgmma import WgmmaAttentionPlan
from fusegen.planner.programs.model import ProgramPlan
from fusegen.runtime import Kernel, Program
from fusegen.validation import Report, validate
from fusegen.validation.few_parts import no_variant
from tests.specs import SHIPPED

try:
    compiler()
except EmulatorUnavailable as error:
    pytest.skip(f"no emulator: {str(error).splitlines()[0]}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("emulated_only")

B, G, R, H, N, P, L, D, S = dims("B G R H N P L D S")
TARGETS = ("cuda:h200", "cuda:sm_80", "hip:mi300x")
PAGED = SHIPPED["paged_attention"].at(B=2, G=2, R=3, N=11, P=9, L=16, D=64)


def up_to(scores: Any, length: Any) -> Any:
    return F.where(F.col_index(scores) < length, scores, -inf)


@chain(B=2, G=2, R=3, N=11, P=9, L=16, D=64)
def heads_first(
    q: bf16[B, G, R, D], keys: bf16[N, G, L, D], values: bf16[N, G, L, D], table: i32[B, P], length: i32[B, 1, 1, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    k = F.rearrange(F.gather(keys, table), "b p g l d -> b g (p l) d")
    v = F.rearrange(F.gather(values, table), "b p g l d -> b g (p l) d")
    return F.softmax(up_to(q @ k.mT * 0.125, length)) @ v


@chain(B=2, G=2, R=3, N=11, P=9, L=16, D=64)
def one_cache(
    q: bf16[B, G, R, D], cache: bf16[N, 2, L, G, D], table: i32[B, P], length: i32[B, 1, 1, 1],
) -> bf16[B, G, R, D]:  # fmt: skip
    k = F.rearrange(F.gather(cache[:, 0], table), "b p l g d -> b g (p l) d")
    v = F.rearrange(F.gather(cache[:, 1], table), "b p l g d -> b g (p l) d")
    return F.softmax(up_to(q @ k.mT * 0.125, length)) @ v


@chain(B=2, H=3, N=11, P=9, L=16, D=64, S=70)
def prompt(q: bf16[B, H, S, D], keys: bf16[N, L, H, D], values: bf16[N, L, H, D], table: i32[B, P]) -> bf16[B, H, S, D]:
    k = F.rearrange(F.gather(keys, table), "b p l h d -> b h (p l) d")
    v = F.rearrange(F.gather(values, table), "b p l h d -> b h (p l) d")
    return F.softmax(F.causal(q @ k.mT * 0.125)) @ v


@chain(N=11, P=9, L=16, D=64, S=70)
def one_sequence(q: f16[S, D], keys: f16[N, L, D], values: f16[N, L, D], table: i32[P]) -> f16[S, D]:
    k, v = (F.rearrange(F.gather(x, table), "p l d -> (p l) d") for x in (keys, values))
    return F.softmax(F.causal(q @ k.mT * 0.125)) @ v


@chain(B=2, G=2, R=3, N=11, P=9, L=16, D=64)
def keys_alone(
    q: bf16[B, G, R, D], keys: bf16[N, L, G, D], v: bf16[B, G, P * L, D], table: i32[B, P]
) -> bf16[B, G, R, D]:
    k = F.rearrange(F.gather(keys, table), "b p l g d -> b g (p l) d")
    return F.softmax(q @ k.mT * 0.125) @ v


@chain(B=2, R=3, N=11, P=9, L=16, D=64)
def keys_are_values(q: bf16[B, R, D], rows: bf16[N, L, D], table: i32[B, P]) -> bf16[B, R, D]:
    k = F.rearrange(F.gather(rows, table), "b p l d -> b (p l) d")
    return F.softmax(q @ k.mT * 0.125) @ k


@chain(B=2, G=2, R=3, N=11, P=9, L=16, D=64)
def computed_table(
    q: bf16[B, G, R, D], keys: bf16[N, L, G, D], v: bf16[B, G, P * L, D], table: i32[B, P]
) -> bf16[B, G, R, D]:
    k = F.rearrange(F.gather(keys, table + 1), "b p l g d -> b g (p l) d")
    return F.softmax(q @ k.mT * 0.125) @ v


@chain(B=2, G=2, R=3, N=11, P=9, L=16, D=64)
def two_tables(q: bf16[B, G, R, D], rows: bf16[N, L, G, D], one: i32[B, P], other: i32[B, P]) -> bf16[B, G, R, D]:
    k = F.rearrange(F.gather(rows, one), "b p l g d -> b g (p l) d")
    v = F.rearrange(F.gather(rows, other), "b p l g d -> b g (p l) d")
    return F.softmax(q @ k.mT * 0.125) @ v


CHAINS = (PAGED, heads_first, one_cache, prompt, one_sequence, keys_alone, keys_are_values, two_tables)
SIZES = ({"L": 1, "P": 100}, {"L": 24, "P": 5}, {"L": 256, "P": 2, "D": 80}, {"L": 8, "P": 40, "R": 70}, {"D": 320})


def steps(spec: Chain, on: str) -> tuple[Any, ...]:
    plan = fusegen.plan(spec, on, tuned=False)
    return tuple(step.plan for step in getattr(plan, "steps", ())) or (plan,)


@pytest.mark.by_values("spec", "on")
@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("spec", CHAINS, ids=lambda spec: spec.name)
def test_pages_are_read_where_they_lie(spec: Chain, on: str) -> None:
    plan, *_ = steps(spec, on)  # a second one brings parts together
    assert isinstance(plan, AttentionPlan)
    report = validate(fusegen.compile(spec, on, on="emulator", validate=False), quick=True)
    assert report.ok, str(report)


@pytest.mark.by_values("sizes", "on")
@pytest.mark.parametrize("on", TARGETS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_pages_of_any_number_of_keys(sizes: dict[str, int], on: str) -> None:
    """Tiles of several pages, pages of several tiles, and pages that neither divides."""
    spec = PAGED.at(**sizes)
    plan, *_ = steps(spec, on)  # a second one brings parts together
    assert isinstance(plan, AttentionPlan)
    assert isinstance(plan, WgmmaAttentionPlan) <= (sizes.get("L", 16) % 8 == 0 and sizes.get("L") != 24)
    report = validate(fusegen.compile(spec, on, on="emulator", validate=False), quick=True)
    assert report.ok, str(report)


def test_many_keys_are_dealt_to_parts() -> None:
    """Two kernels, as of keys that lie in a row, and nothing between them that is as large as those."""
    plan = fusegen.plan(SHIPPED["paged_attention"], "cuda:h200", tuned=False)
    assert isinstance(plan, ProgramPlan)
    first, _ = plan.steps
    assert getattr(first.plan, "parts", 0) > 1
    assert max(stored.type.shape[-1] for stored in plan.between if isinstance(stored.type.shape[-1], int)) == 1
    assert all("P" not in map(str, stored.type.shape) for stored in plan.between)


@pytest.mark.parametrize("spec", [computed_table, PAGED.at(D=1024)], ids=["computed", "too wide"])
def test_what_attention_can_not_read_in_pages_is_gathered_first(spec: Chain) -> None:
    kernel = fusegen.compile(spec, "cuda:sm_80", on="emulator", validate=False)
    assert isinstance(kernel, Program)
    assert len(kernel.kernels) > 1
    assert validate(kernel, quick=True).ok


# ---------------------------------------------------------------- by numpy of the test's own


@settings(max_examples=12, deadline=None)
@given(
    on=st.sampled_from(TARGETS), rows=st.sampled_from([1, 3, 8, 16]), pages=st.integers(1, 12), there=st.integers(1, 9),
    length=st.lists(st.integers(0, 200), min_size=2, max_size=2), seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
@example(on="cuda:h200", rows=16, pages=2, there=1, length=[0, 1], seed=0)  # of fewer lines than threads bring
def test_any_table(on: str, rows: int, pages: int, there: int, length: list[int], seed: int) -> None:
    """Whatever a table has, such as -1 or a page beyond the last one, whose keys and values are zeros."""
    rng = np.random.default_rng(seed)
    kernel = compiled_at(on, rows, pages)
    q = rng.standard_normal((2, 1, 2, 16)).astype(bf16.numpy)
    keys, values = rng.standard_normal((2, there, rows, 1, 16)).astype(bf16.numpy)
    table = rng.integers(-2, there + 2, (2, pages)).astype(np.int32)
    table.flat[0] = rng.choice([2**31 - 1, -(2**31), there])
    lengths = np.minimum(np.array(length, np.int32), rows * pages)
    found = np.asarray(kernel(q, keys, values, table, lengths.reshape(2, 1, 1, 1))).astype(np.float64)
    for b in range(2):
        own = [
            np.concatenate([x[page, :, 0] if 0 <= page < there else np.zeros((rows, 16)) for page in table[b]])
            .astype(np.float64)[: lengths[b]]
            for x in (keys, values)
        ]  # fmt: skip
        e = np.exp(q[b, 0].astype(np.float64) @ own[0].T * 0.25)
        wanted = e / e.sum(-1, keepdims=True) @ own[1] if lengths[b] else np.zeros((2, 16))
        np.testing.assert_allclose(found[b, 0], wanted, atol=2e-2)


def compiled_at(on: str, rows: int, pages: int) -> Any:
    spec = SHIPPED["paged_attention"].at(B=2, G=1, R=2, N=9, P=pages, L=rows, D=16)
    return fusegen.compile(spec, on, on="emulator", validate=False)


# ---------------------------------------------------------------- faults

FAULTS = {  # of which target's kernel, and what is wrong in its text
    "pages of the tile before": ("cuda:h200", r"table_here\[key0 / (\w+) ", r"table_here[(key0 - 1) / \1 "),
    "one page in place of all": ("cuda:h200", r"pages_of_keys\[page\]\);", "pages_of_keys[0]);"),
    "pages on one another": ("cuda:h200", r" \+ page \* value_page", ""),
    "the first head's rows": ("cuda:h200", r"static_cast<int>\(G_at\), pages", "0, pages"),
    "the first sequence's pages": ("cuda:h200", r"table_ptr \+ B_at \* table_stride_B", "table_ptr"),
    "a row of the page before": ("cuda:sm_80", r"(\w+_key) % (key_cache_page_rows)", r"(\1 + \2 - 1) % \2"),
    "no test for pages below 0": ("cuda:sm_80", r"key_cache_page >= 0 && ", ""),
    "no test for pages behind the last": ("cuda:sm_80", r" && value_cache_page < value_cache_count", ""),
    "page 0 for one that is not there": ("hip:mi300x", r"key_cache_there \? 8 : 0", "8"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(fault: str) -> None:
    assert not judged(PAGED, *FAULTS[fault]).ok


def test_the_page_of_the_first_line_for_all_is_caught() -> None:
    """Where a thread brings several lines, whose pages it looks up before it loads them."""
    wide = PAGED.at(D=256)
    assert not judged(wide, "hip:mi300x", r"\? key_cache_page\[v\] : 0", "? key_cache_page[0] : 0").ok


def judged(spec: Chain, on: str, pattern: str, instead: str) -> Report:
    """Of a kernel with a part of its text in another's place."""
    program = fusegen.compile(spec, on, on="emulator", validate=False)
    assert isinstance(program, Program)
    kernel, *others = program.kernels  # another one brings parts together
    assert isinstance(kernel, Kernel)
    text, count = re.subn(pattern, instead, kernel.source.text)
    assert count, f"{pattern} is nowhere in the kernel"
    wrong = Kernel(replace(kernel.source, text=text), None, kernel.device, no_variant)
    return validate(Program(program.plan, [wrong, *others], program.device), quick=True)
