"""Deliberately broken kernels: each mutation edits an emitted source the way a bug in a template or a plan would.

A `Subject` is one kernel: a chain, a target, a row length, and which of the planner's candidates. A `Mutation` is a
name, what it models, and an edit of the text. `tests/validation/test_mutations.py` shows that validation catches every
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fusegen import bf16, chain, dims, f32, i32
from fusegen import ops as F
from fusegen.emitting.rendering import render
from fusegen.language.spec import Chain
from fusegen.language.types import DTYPES
from fusegen.planner import CONTIGUOUS
from fusegen.planner.model import Layout, RowPlan, Source
from fusegen.planner.ways import Streaming
from fusegen.targets import target
from tests.row_plans import row_plans
from tests.sizes import sizes_at
from tests.specs import ALL

M, N, V = dims("M N V")


@chain(M=64, N=1000)
def largest(x: f32[M, N]) -> f32[M, 1]:
    """The largest of each row; NaN wins."""
    return F.max(x)


@chain(M=64, N=16)
def few_experts(x: bf16[M, N]) -> tuple[f32[M, 4], i32[M, 4]]:
    """A router of few experts."""
    p, experts = F.topk(F.softmax(x), 4)
    return p / F.sum(p), experts


@chain(M=64, N=1000)
def integers(x: i32[M, N]) -> tuple[i32[M, 1], i32[M, 1], i32[M, N]]:
    """What f32 would round."""
    return F.max(x), F.sum(x), F.minimum(x, 2**24 + 1)


@chain(M=64, N=1000)
def largest_integers(x: i32[M, N]) -> tuple[i32[M, 8], i32[M, 8]]:
    """Keys that f32 would round."""
    return F.topk(x, 8)


@chain(V=100, M=64, N=1000)
def gathered(table: bf16[V, N], ids: i32[M, 1], label: i32[M, 1], x: bf16[M, N]) -> tuple[bf16[M, N], f32[M, 1]]:
    """Rows of a table, and one column of each row."""
    return F.rmsnorm(F.gather(table, ids) + x), F.take(x, label, -1.0)


@cache
def chains() -> dict[str, Chain]:
    return {c.name: c for c in (*ALL.values(), largest, few_experts, integers, largest_integers, gathered)}


@dataclass(frozen=True)
class Subject:
    """One kernel to break. `fits` picks the first of the planner's candidates that has the regime wanted."""

    chain: str
    cols: int
    fits: Callable[[RowPlan], bool]
    target: str = "cuda:h200"
    dtype: str = ""  # the spec's own unless named
    rows: int = 0  # that the plan is made for, along M; as the spec says unless named

    def source(self, layout: Layout = CONTIGUOUS) -> Source:
        found = chains()[self.chain]
        if self.dtype:
            found = found.with_dtype(DTYPES[self.dtype])
        rows = {"M": self.rows} if self.rows else {}
        graph = found.graph.at(**sizes_at(found.graph, self.cols), **rows)
        plans = row_plans(graph, target(self.target), layout)
        fitting = [p for p in plans if self.fits(p)] or ([plans[0]] if layout != CONTIGUOUS else [])
        assert fitting, f"the planner has no candidate for {self.chain} at {self.cols} that {self.fits.__name__} fits"
        return render(fitting[0])


def registers(plan: RowPlan) -> bool:
    return (
        plan.staging == "registers" and plan.warps_per_row > 1 and plan.tile.per_thread > 1 and not plan.misaligned_rows
    )


def shared(plan: RowPlan) -> bool:
    keeps = any(row_pass.keeps for row_pass in plan.passes)
    return (
        plan.staging == "shared"
        and keeps
        and plan.warps_per_row > 1
        and plan.tile.cluster == 1
        and not plan.misaligned_rows
    )


def stream(plan: RowPlan) -> bool:
    return plan.staging == "stream" and plan.tile.vector > 1 and not plan.misaligned_rows


def sub_warp(plan: RowPlan) -> bool:
    return (
        plan.tile.rows_per_block > 1 and 1 < plan.tile.threads_per_row < plan.target.warp and not plan.misaligned_rows
    )


def warp(plan: RowPlan) -> bool:
    return plan.tile.threads_per_row == plan.target.warp and not plan.misaligned_rows


def across(plan: RowPlan) -> bool:
    return plan.misaligned_rows and plan.tile.vector > 2 and plan.warps_per_row > 1


def handed(plan: RowPlan) -> bool:
    stores = [store for row_pass in plan.passes for store in row_pass.stores if not row_pass.blocks_of]
    return plan.warps_per_row > 1 and any(s.access.mode == "misaligned" and not s.staged for s in stores)


def prefetched(plan: RowPlan) -> bool:
    return registers(plan) and bool(plan.prefetched)


def remainder(plan: RowPlan) -> bool:
    return plan.staging == "registers" and plan.tile.remainder > 0 and plan.warps_per_row > 1


def copied_across(plan: RowPlan) -> bool:
    return plan.misaligned_rows and plan.copies and plan.tile.cluster == 1


def one_pass(plan: RowPlan) -> bool:
    return plan.staging == "none" and plan.tile.threads_per_row > 1 and not plan.misaligned_rows


def copied(plan: RowPlan) -> bool:
    return plan.copies and plan.tile.cluster == 1 and 2 <= plan.tile.per_thread <= 8 and not plan.misaligned_rows


def partly_kept(plan: RowPlan) -> bool:
    return plan.copies and plan.tile.cluster == 1 and plan.tile.kept < plan.tile.per_thread


def clustered(plan: RowPlan) -> bool:
    return plan.tile.cluster == 2 and plan.tile.kept == plan.tile.per_thread


def by(plan: RowPlan) -> str:
    return plan.selection.by if plan.selection else ""


def streaming(plan: RowPlan) -> bool:
    return by(plan) == "streaming" and plan.cluster == 1 and plan.threads < 512


def segmented(plan: RowPlan) -> bool:
    way = plan.selection.way if plan.selection else None
    return streaming(plan) and isinstance(way, Streaming) and way.segment < plan.tile.per_thread


def one_by_one(plan: RowPlan) -> bool:
    return plan.selection is not None and plan.selection.one_by_one and plan.tile.threads_per_row == 2


def ranked(plan: RowPlan) -> bool:
    found = plan.selection
    return found is not None and found.by == "streaming" and plan.cluster == 1 and found.k < plan.threads // 32


def ragged(plan: RowPlan) -> bool:
    return streaming(plan) and plan.misaligned_rows


def met(plan: RowPlan) -> bool:
    return by(plan) == "streaming" and plan.cluster == 2 and plan.threads < 512


def small_k(plan: RowPlan) -> bool:
    return by(plan) == "small_k" and plan.cluster == 1 and plan.threads < 512


def small_k_misaligned(plan: RowPlan) -> bool:
    return small_k(plan) and plan.misaligned_rows


def small_k_met(plan: RowPlan) -> bool:
    return by(plan) == "small_k" and plan.cluster == 4 and plan.threads == 128


def large_k(plan: RowPlan) -> bool:
    return by(plan) == "large_k" and 2 * plan.target.warp <= plan.threads < 512


def large_k_misaligned(plan: RowPlan) -> bool:
    return large_k(plan) and plan.misaligned_rows


def by_warp(plan: RowPlan) -> bool:
    selection = plan.selection
    return bool(selection and selection.by == "warp" and not selection.best and selection.delegates == 1)


def whatever(plan: RowPlan) -> bool:
    return True


LN = Subject("bias_gelu_residual_ln", 1000, registers)
LN_PREFETCHED = Subject("bias_gelu_residual_ln", 4096, prefetched, rows=512)
LN_SHARED = Subject("bias_gelu_residual_ln", 1000, shared)
COPIED = Subject("log_softmax", 2056, copied)
PARTLY = Subject("log_softmax", 120000, partly_kept)
CLUSTER = Subject("log_softmax", 60000, clustered)
LN_STREAM = Subject("bias_gelu_residual_ln", 2056, stream)
SOFTMAX = Subject("masked_softmax", 2056, registers)
SOFTMAX_SHORT = Subject("masked_softmax", 20, sub_warp)
SOFTMAX_STREAM = Subject("additive_mask_softmax", 2056, stream)
CAUSAL = Subject("scale_causal_softmax", 40, sub_warp)
RMS = Subject("rmsnorm", 1000, registers, dtype="f32")
RMS_WARP = Subject("rmsnorm", 250, warp)
RMS_MISALIGNED = Subject("rmsnorm", 1003, across)
HANDED = Subject("rmsnorm", 1003, handed)
RMS_REMAINDER = Subject("rmsnorm", 1027, remainder)
COPIED_MISALIGNED = Subject("log_softmax", 2057, copied_across)
TWO = Subject("add_rmsnorm", 1000, shared)
FLAT = Subject("swiglu_elementwise", 77, whatever)
TILES = Subject("bias_relu", 100, whatever)
MAX = Subject("largest", 1000, one_pass)
HIP_LN = Subject("bias_gelu_residual_ln", 2000, registers, "hip:mi300x")
HIP_SOFTMAX = Subject("masked_softmax", 2056, registers, "hip:mi300x")
HIP_MAX = Subject("largest", 1000, one_pass, "hip:mi300x")
CHOSEN = Subject("scale_mask_softmax_topk", 9000, streaming)
CHOSEN_RAGGED = Subject("topk", 53, ragged)
CHOSEN_MET = Subject("scale_mask_softmax_topk", 9000, met)
SMALL_K = Subject("scale_mask_softmax_topk", 6000, small_k)
SMALL_K_RAGGED = Subject("topk", 2053, small_k_misaligned)
SMALL_K_MET = Subject("scale_mask_softmax_topk", 9000, small_k_met)
LARGE_K = Subject("scale_mask_softmax_topk", 1000, large_k)
LARGE_K_RAGGED = Subject("topk", 1003, large_k_misaligned)
ROUTED = Subject("router_topk", 200, by_warp)
ROUTED_FEW = Subject("few_experts", 16, one_by_one)
RANKED = Subject("router_topk", 9000, ranked)
INTEGERS = Subject("integers", 1000, lambda plan: plan.warps_per_row > 1)
INTEGER_KEYS = Subject("largest_integers", 2999, streaming)
GREEDY = Subject("argmax", 40000, streaming)
SEGMENTED = Subject("topk", 9001, segmented)
HIP_CHOSEN = Subject("scale_mask_softmax_topk", 9000, streaming, "hip:mi300x")
HIP_SMALL_K = Subject("scale_mask_softmax_topk", 6000, small_k, "hip:mi300x")
HIP_LARGE_K = Subject("scale_mask_softmax_topk", 1000, large_k, "hip:mi300x")
HIP_ROUTED = Subject("router_topk", 200, by_warp, "hip:mi300x")
GATHERED = Subject("gathered", 1000, registers)
HIP_GATHERED = Subject("gathered", 250, warp, "hip:mi300x")
HIP_TWO = Subject("add_rmsnorm", 500, warp, "hip:mi300x")


@dataclass(frozen=True)
class Mutation:
    """One bug. `edits` are (pattern, replacement) pairs, each applied to the first match only unless `everywhere`."""

    name: str
    models: str
    subject: Subject
    edits: tuple[tuple[str, str], ...]
    everywhere: bool = False
    quick: bool = True  # what every first build runs finds it; else only a full validation does
    blind: str = ""  # why nothing here can find it: listed, and not counted

    def apply(self, text: str) -> str:
        """The broken text. Raises AssertionError where an edit finds nothing to change."""
        for pattern, replacement in self.edits:
            changed = re.sub(pattern, replacement, text, count=0 if self.everywhere else 1, flags=re.DOTALL)
            assert changed != text, f"{self.name}: {pattern!r} changes nothing in {self.subject.chain}"
            text = changed
        return text


def mutation(name: str, models: str, subject: Subject, *edits: str, **options: bool | str) -> Mutation:
    pairs = tuple(zip(edits[::2], edits[1::2], strict=True))
    return Mutation(name, models, subject, pairs, **options)  # type: ignore[arg-type]


MUTATIONS: tuple[Mutation, ...] = (
    # ---- the row's end
    mutation("tail guard dropped", "a vector past the row is read and written", LN, r"col < 1000\)", "true)",
             everywhere=True),
    mutation("tail guard one vector early", "the last vector is skipped", LN_STREAM, r"col < 2056", "col < 2048",
             everywhere=True),
    mutation("tail guard early in one pass", "the sum misses the last vector, the result has it", SOFTMAX_SHORT,
             r"col < 20\)", "col < 16)"),
    mutation("element guard off by one", "one element past the array is written", FLAT,
             r"(store_each_within.*?col \+ j <) cols", r"\1= cols"),
    mutation("vector guard off by one", "the vector at the end reaches one element past it", FLAT,
             r"\(col \+ 8 <= n\)", "(col + 8 <= n + 1)"),
    mutation("last element left out", "the scalar end stops one short", FLAT,
             r"(store_each_within.*?col \+ j < )cols", r"\1cols - 1"),
    mutation("written past the row", "the row's end is not looked for where values go one by one", HANDED,
             r"if \(at < cols\) row\[at\]", "if (at <= cols) row[at]"),
    mutation("block past the row", "a block is written whole that the row ends in", HANDED,
             r"!ends_last && from \+ N <= cols", "!ends_last && from < cols"),
    mutation("wrong phase", "pieces are shifted as if the row began an element later", RMS_MISALIGNED,
             r"phase<piece>\(row\) \* sizeof", "phase<piece>(row + 1) * sizeof"),
    mutation("neighbour of a neighbour", "a block begins with the values of the lane two before", HANDED,
             r"\(lane \+ 31\) % 32", "(lane + 30) % 32"),
    mutation("last lane unfinished", "nobody writes what the last lane's values leave over", HANDED,
             r"ends_last && j < before \? 32 \* N : 0", "0"),
    mutation("row not waited for", "blocks are written of what other threads have yet to stage", RMS_MISALIGNED,
             r"__syncthreads\(\);  // the row is complete", ""),
    mutation("staged block past the row", "a block is written whole that the row ends in", RMS_MISALIGNED,
             r"if \(col \+ N <= cols\) store", "if (col < cols) store"),
    mutation("row's ends not written", "what no block holds is lost", RMS_MISALIGNED,
             r"i < edge; i", "i < head; i"),
    mutation("blocks begin elsewhere", "the first whole block is looked for a value too late", RMS_MISALIGNED,
             r"= \(N - phase<N", "= (N + 1 - phase<N"),
    mutation("value of the remainder not summed", "the value behind the last vector is left out of the sum",
             RMS_REMAINDER,
             r"(if \(in_remainder\) \{.*?)sum_of_squares_part \+= square;", r"\1"),
    mutation("value of the remainder of the next column", "what is behind the last vector is read a column late",
             RMS_REMAINDER,
             r"remainder_col = (\w+) \+ lane", r"remainder_col = \1 + 1 + lane"),
    mutation("block of the vector", "a pass by blocks takes the one that a thread's vector begins in",
             COPIED_MISALIGNED,
             r"kept\[behind / N\]", "kept[0]"),
    mutation("ends of a pass by blocks", "what no block holds is not computed", COPIED_MISALIGNED,
             r"if \(lane < edge\)", "if (lane < head)"),
    mutation("pieces behind the tensor", "the last row's pieces are read whole", RMS_MISALIGNED,
             r"if \(!ends \|\|", "if (true ||"),
    mutation("copies behind the tensor", "the last row's blocks are copied whole", COPIED_MISALIGNED,
             r"left = ends \?", "left = false ?"),
    mutation("block behind a warp's not copied", "the last lane's vector goes on in nothing", COPIED_MISALIGNED,
             r"last \|\| threadIdx\.x % 32 == 31", "last"),
    mutation("lanes of a copy don't meet", "a lane reads the block that the next has yet to copy", COPIED_MISALIGNED,
             r"__syncwarp\(\);", ""),
    # ---- which rows
    mutation("live-row guard dropped", "rows past the last one are worked on", SOFTMAX_SHORT,
             r"live = own_row < rows", "live = true"),
    mutation("live-row guard off by one", "one row too many", CAUSAL,
             r"live = own_row < rows", "live = own_row <= rows"),
    mutation("row that stands in written", "two threads write the last row's values", SOFTMAX_SHORT,
             r"if \(live\) store<", "store<"),
    mutation("row off by one", "every row takes its neighbour's place", LN,
             r"x_ptr \+ row \* x_stride", "x_ptr + (row + 1) * x_stride"),
    mutation("row stride missing", "every row reads row 0", LN, r"x_ptr \+ row \* x_stride", "x_ptr"),
    mutation("row stride taken for the row length", "right until an operand is padded", LN,
             r"row \* residual_stride", "row * 1000", quick=False),
    mutation("output stride taken for another's", "right until layouts differ", TWO,
             r"row \* y_stride", "row * x_stride", quick=False),
    mutation("row axes exchanged", "batch and query index trade places", CAUSAL,
             r"(B_H_at = static_cast<unsigned>\(row\)) /", r"\1 %"),
    mutation("HIP: lines of the grid forgotten", "right until the grid has several", HIP_LN,
             r"static_cast<long long>\(blockIdx\.y\) \* gridDim\.x \+ ", ""),
    mutation("HIP: last line not cut off", "the grid's last line is longer than the rows", HIP_LN,
             r"if \(row >= rows\) return;[^\n]*\n", ""),
    mutation("32-bit row offset", "wraps in arrays of 2^31 elements and more", LN,
             r"row \* x_stride", "static_cast<int>(row * x_stride)"),
    mutation("32-bit output offset", "wraps in arrays of 2^31 elements and more", TWO,
             r"row \* y_stride", "static_cast<int>(row * y_stride)"),
    mutation("32-bit element number", "wraps in arrays of 2^31 elements and more", FLAT,
             r"static_cast<long long>\(blockIdx\.x\) \* tile_cols", "static_cast<int>(blockIdx.x) * tile_cols"),
    mutation("32-bit offset of a row that copies bring", "wraps in arrays of 2^31 elements and more", COPIED_MISALIGNED,
             r"row \* logits_stride", "static_cast<int>(row * logits_stride)"),
    mutation("32-bit offset of a query", "wraps where queries lie 2^31 elements apart", CAUSAL,
             r"S_at \* scores_stride_S", "static_cast<int>(S_at * scores_stride_S)", quick=False),
    mutation("32-bit row offset of a selection", "wraps in arrays of 2^31 elements and more", CHOSEN,
             r"row \* logits_stride", "static_cast<int>(row * logits_stride)"),
    mutation("32-bit offset of chosen columns", "wraps in arrays of 2^31 elements and more", SMALL_K,
             r"row \* columns_stride", "static_cast<int>(row * columns_stride)"),
    mutation("HIP: 32-bit row offset", "both factors are cut, not the product", HIP_LN,
             r"row \* x_stride", "static_cast<int>(row) * static_cast<int>(x_stride)"),
    mutation("HIP: 32-bit block number", "wraps where the grid's lines hold 2^32 blocks", HIP_LN,
             r"static_cast<long long>\(blockIdx\.y\) \* gridDim", "blockIdx.y * gridDim"),
    mutation("HIP: 32-bit row offset of a selection", "wraps in arrays of 2^31 elements and more", HIP_LARGE_K,
             r"row \* logits_stride", "static_cast<int>(row * logits_stride)"),
    mutation("32-bit row number", "wraps from row 2^31 on", LN, r"const long long row =", "const int row =",
             blind="no bug: a block has one row here, and a grid of CUDA's fewer than 2^31 blocks"),
    # ---- values
    mutation("scale off by a tenth of a percent", "a literal cut short", CAUSAL, r"\* 0\.125f", "* 0.1251f"),
    mutation("gelu coefficient cut short", "0.1029 for 0.10294", LN, r"0\.102943[0-9]*f", "0.1029f"),
    mutation("bias forgotten", "an operand is not used", LN, r"= x \+ bias;", "= x;"),
    mutation("vector operand at the wrong column", "gamma's first vector for all", LN,
             r"load<(\d)>\(gamma_ptr \+ col\)", r"load<\1>(gamma_ptr)"),
    mutation("mean over N - 1", "the sample variance", LN, r"(variance = sum_of_squares / )1000\.0f", r"\g<1>999.0f"),
    mutation("variance by E[x^2] - E[x]^2", "cancels where the mean is large", LN_SHARED,
             r"= centered \* centered;", "= h * h;", r"(variance = sum_of_squares / 1000\.0f);", r"\1 - mean * mean;"),
    mutation("epsilon forgotten", "shows where values are small", RMS, r"= mean \+ 1e-06f;", "= mean;"),
    mutation("epsilon off", "1e-5 for 1e-6", RMS, r"1e-06f", "1e-05f"),
    mutation("rough reciprocal root", "an approximation of 16 bits", RMS, r"rsqrtf\((\w+)\)",
             r"(rsqrtf(\1) * 1.00001f)"),
    mutation("output truncated", "rounded toward zero in place of nearest", LN,
             r"__float2half_rn\((\w+)\)",
             r"__float2half_rn(__int_as_float(__float_as_int(\1) & 0xffffe000))"),
    mutation("accumulated in f16", "the row sum is rounded at every step", LN, r"sum_of_h_part \+= h;",
             "sum_of_h_part = __half2float(__float2half_rn(sum_of_h_part + h));"),
    mutation("kept value of another vector", "registers indexed by 0 for v", LN,
             r"(const float centered = \w+_kept)\[v\]",
             r"\1[0]"),
    mutation("kept value never kept", "registers read as they were left", LN, r"h_kept\[v\]\[j\] = h;", ""),
    mutation("kept value of another thread", "shared memory indexed by the neighbour", TWO,
             r"(const float h = h_kept\[.*?) \+ lane\]", r"\1 + (lane ^ 1)]"),
    # ---- masks
    mutation("causal <= became <", "a query does not see itself", CAUSAL, r"col_index <= last", "col_index < last"),
    mutation("causal mask by vector", "every element of a vector takes its first column", CAUSAL,
             r"col_index = col \+ j", "col_index = col"),
    mutation("mask polarity", "True drops in place of keeps", SOFTMAX, r"mask \? (\w+) : \(-INFINITY\)",
             r"mask ? (-INFINITY) : \1"),
    mutation("empty row gives NaN", "the guard of the maximum is gone", SOFTMAX, r"(pivot = )\w+ \? 0\.0f : top",
             r"\1top"),
    mutation("division by an empty sum", "the guard of the total is gone", SOFTMAX,
             r"= \w+ \? 0\.0f : (one_over_\w+);", r"= \1;"),
    mutation("maximum not taken off", "exponentials overflow", SOFTMAX, r"= z - pivot;", "= z;"),
    # ---- reductions
    mutation("maximum starts at 0", "wrong where all are negative", MAX, r"(_part = )-INFINITY", r"\g<1>0.0f"),
    mutation("maximum drops NaN", "the other instruction, in which NaN loses", MAX, r"max\.NaN\.f32", "max.f32"),
    mutation("HIP: maximum drops NaN", "fmaxf for the larger where NaN wins", HIP_MAX,
             r"return a > b \|\| a != a \? a : b;", "return fmaxf(a, b);"),
    mutation("sum added twice", "a pass accumulates an element two times", SOFTMAX, r"sum_of_exps_part \+= e;",
             "sum_of_exps_part += e + e;"),
    mutation("sum starts from a leftover", "the partial sum is not zeroed", RMS_WARP, r"(sum_of_squares_part = )0\.0f;",
             r"\1static_cast<float>(lane == 3);"),
    mutation("shuffle starts at half", "half of the warp is never added", LN, r"int step = 16;", "int step = 8;"),
    mutation("shuffle stops early", "neighbours are never added", RMS_WARP,
             r"step > 0; step /= 2", "step > 1; step /= 2"),
    mutation("sum over too few warps", "the last warps' parts are left out", LN_SHARED,
             r"part\[threadIdx\.x % (\d+)\]", r"part[threadIdx.x % \1 / 2]"),
    mutation("part by the wrong lane", "a warp leaves another's slot", LN, r"part\[threadIdx\.x / 32\]",
             "part[threadIdx.x / 32 / 2]"),
    mutation("slot used again too early", "the second reduction takes the first one's slot", LN,
             r"part\[1\]\)", "part[0])"),
    mutation("rescaling forgotten", "the online sum keeps its old pivot", SOFTMAX_STREAM,
             r"total \*= exponential\(top - pivot\);", ""),
    mutation("a part's rescaling forgotten", "threads' sums are added as they are", SOFTMAX_STREAM,
             r"total \* exponential\(top - pivot\)", "total"),
    mutation("exponential of the wrong base", "2^x for e^x", SOFTMAX, r"1\.44269504f \* x", "x"),
    mutation("online maximum unguarded", "-inf - -inf before anything is seen", SOFTMAX_STREAM,
             r"pivot = peak == -INFINITY \? 0\.0f : peak", "pivot = peak"),
    mutation("Welford merge without counts", "halves weigh alike whatever they hold", LN_STREAM,
             r"all > 0\.0f \? other_count / all : 0\.0f", "0.5f"),
    mutation("Welford merge without the cross term", "the means' distance is left out", LN_STREAM,
             r" \+ delta \* count \* \(delta \* share\)", ""),
    mutation("Welford with the old mean twice", "delta squared for delta times the new one", LN_STREAM,
             r"delta \* \(delta - step\)", "delta * delta"),
    # ---- barriers
    mutation("barrier dropped", "parts are read before they are written", LN, r"  __syncthreads\(\);\n", ""),
    mutation("barrier moved up", "parts are written after the barrier", LN_SHARED,
             r"(  if \(threadIdx\.x % 32 == 0\) \{.*?\n  \}\n)  __syncthreads\(\);\n", r"  __syncthreads();\n\1"),
    mutation("barrier in a branch", "not every thread of the block arrives", LN, r"  __syncthreads\(\);\n",
             "  if (threadIdx.x < 32) __syncthreads();\n"),
    # ---- asynchronous copies and clusters
    mutation("prefetched vectors not awaited", "shared memory is read before the bulk copies land", LN_PREFETCHED,
             r"  wait_arrivals\(arrivals\);\n", ""),
    mutation("copies' barrier not published", "they may find another count than it was made with", LN_PREFETCHED,
             r'asm volatile\("fence\.mbarrier_init[^\n]*', ""),
    mutation("one prefetched vector not counted", "the wait ends when the first of them has landed", LN_PREFETCHED,
             r"expect_arrival\(arrivals, \d+\)", "expect_arrival(arrivals, 8192)"),
    mutation("vector prefetched in part", "its last block stays what it was", LN_PREFETCHED,
             r"(copy_bulk\(beta_prefetched, beta_ptr, )8192", r"\g<1>8176",
             r"expect_arrival\(arrivals, 16384\)", "expect_arrival(arrivals, 16368)"),
    mutation("prefetched by every thread", "the barrier of the copies is begun again and again", LN_PREFETCHED,
             r"if \(threadIdx\.x == 0\) (\{\s+start_arrivals)", r"\1"),
    mutation("prefetched vector of another thread", "a neighbour's columns of gamma", LN_PREFETCHED,
             r"(= gamma_prefetched\[.*?)lane\]", r"\1(lane ^ 1)]"),
    mutation("wait for a copy dropped", "shared memory is read before its copy lands", COPIED,
             r"wait_copies<\d+>\(\);", ""),
    mutation("wait for too few copies", "the last copies are not waited for", COPIED,
             r"wait_copies<(\d+)>\(\);\n", r"wait_copies<\1 + 1>();\n"),
    mutation("copy to another thread's place", "each reads what its neighbour asked for", COPIED,
             r"(copy_async<\d>\(&\w+\[v \* \w+ \+ )lane", r"\1(lane ^ 1)"),
    mutation("kept part taken for the whole", "shared memory is read past what is kept", PARTLY,
             r"(pass 2 of.*?)v < \d+ \?", r"\1true ?"),
    mutation("cluster's parts of one block only", "every block keeps its own sum", CLUSTER,
             r"__cluster_map_shared_rank\((\w+), threadIdx\.x\)", r"static_cast<void*>(\1)"),
    mutation("cluster barrier dropped", "other blocks' parts are read before they are written", CLUSTER,
             r"  __cluster_barrier_arrive\(\);\n  __cluster_barrier_wait\(\);\n", ""),
    mutation("cluster writes before its blocks run", "the first barrier is not waited for", CLUSTER,
             r"\n *__cluster_barrier_wait\(\);  // so does[^\n]*", ""),
    mutation("row by block, not by cluster", "two blocks of a cluster take two rows", CLUSTER,
             r"row = blockIdx\.x / row_blocks", "row = blockIdx.x"),
    # ---- rows and columns that an index names
    mutation("row of a table off by one", "the neighbour of the row that is named", GATHERED,
             r"\(table_found \? ids : 0\)", "(table_found ? ids + 1 : 0)"),
    mutation("first row taken for none", "an index that names nothing gives row 0", GATHERED,
             r"= table_found \? (__bfloat162float\(.*?\)) : 0\.0f", r"= \1", everywhere=True),
    mutation("row behind a table", "the row after the last is read", GATHERED,
             r"ids < table_count", "ids <= table_count"),
    mutation("row before a table", "indices below 0 are not looked for", GATHERED, r"ids >= 0 && ", ""),
    mutation("rows of a table not counted", "any index is followed", GATHERED,
             r"table_found = .*?;", "table_found = true;"),
    mutation("32-bit offset of a table's row", "wraps in tables of 2^31 elements and more", GATHERED,
             r"(\(table_found \? ids : 0\) \* table_stride)", r"static_cast<int>(\1)", quick=False),
    mutation("column behind a row", "the column after the last is read", GATHERED, r"label < cols", "label <= cols"),
    mutation("column before a row", "indices below 0 are not looked for", GATHERED, r"label >= 0 && ", ""),
    mutation("HIP: row of a table by the thread's", "the table's row is the thread's own", HIP_GATHERED,
             r"\(table_found \? ids : 0\)", "(table_found ? row : 0)"),
    mutation("HIP: column not looked for", "any index is followed", HIP_GATHERED,
             r"label >= 0 && label < cols \? (.*?) : ", r"true ? \1 : "),
    # ---- outputs
    mutation("second output not written", "a store is lost", TWO, r"store<\d>\(h_row \+ col, h_vec\);", ""),
    mutation("outputs exchanged", "the norm lands in h", TWO, r"store<(\d)>\(y_row \+ col, y_vec\);",
             r"store<\1>(h_row + col, y_vec);"),
    mutation("row value of row 0 not written", "the first row's result is lost", MAX,
             r"if \((live && )?lane == 0\)", r"if (\1lane == 0 && row > 0)"),
    mutation("columns of a tile twice", "two tiles of a row overlap", TILES,
             r"(= |\(|\+ )lane \* (\d+)", r"\1(lane / 2) * \2"),
    mutation("relu drops NaN", "fmaxf turns NaN into 0", TILES,
             r"larger\((\w+), 0\.0f\)", r"fmaxf(\1, 0.0f)"),
    # ---- k columns of a row
    mutation("ties by the last column", "the larger column wins", CHOSEN, r"\(last_column - col\)", "col",
             r"last_column - \(entry & last_column\)", "entry & last_column"),
    mutation("NaN not chosen", "a NaN comes below every number", GREEDY, r"if \(key != key\) return 0xffffffffu;",
             "if (key != key) return 0x00800000u;"),
    mutation("threshold too high", "fewer than k reach it", CHOSEN, r"int want = \d+, enough = \d+",
             "int want = 1, enough = 1"),
    mutation("threshold drops what equals it", "ties with the bound of the same turn are lost", CHOSEN,
             r"limit = below\(order\)", "limit = key_at(order)"),
    mutation("ties with later columns", "a threshold of later segments lets go of what must stay", SEGMENTED,
             r"bar = beyond\(order\)", "bar = __int_as_float(0x7f800000)"),
    mutation("cut too high", "the last of the k best falls away", CHOSEN, r"return low - 1;",
             "return low + (Entry(1) << (column_bits + 20));"),
    mutation("a candidate too few is enough", "a cut leaves k - 1", CHOSEN,
             r"above \+ own\[q\] >= 128", "above + own[q] >= 127"),
    mutation("a warp too few is enough", "k - 1 warps reach the threshold", RANKED, r"rank >= 7 \? own",
             "rank >= 6 ? own"),
    mutation("masked columns chosen", "-inf counts as a key", CHOSEN, r"!\(keys\[j\] <= limit\)",
             "!(keys[j] < limit)", r"!\(peak <= limit\)", "!(peak < limit)",
             r"(Entry cutoff = )static_cast<Entry>\(masked\) << column_bits \| last_column", r"\g<1>0"),
    mutation("rank counts itself", "every candidate a place too low", CHOSEN, r"binned\[other\] > entry",
             "binned[other] >= entry"),
    mutation("notes looked into twice", "they are not forgotten", CHOSEN, r"\n( +)noted = 0;", "\n"),
    mutation("notes beyond their room", "a warp writes over its neighbour's", SEGMENTED, r"noted < \d+",
             "noted < 100000"),
    mutation("notes over keys not yet read", "lanes go on by themselves", CHOSEN,
             r"meet\(\);  // all lanes have read[^\n]*", ""),
    mutation("NaN not noted", "a vector with a NaN does not exceed the threshold", GREEDY,
             r"!\(peak <= limit\)", "peak > limit"),
    mutation("candidates in one place", "lanes do not count those below them", CHOSEN,
             r"\[held \+ count\(who & lanes_below\)\] = static", "[held] = static"),
    mutation("candidates lost when they do not fit", "their vectors are done with", CHOSEN, r"seen -= 32;", ""),
    mutation("candidates listed twice", "what was listed before a cut is not remembered", CHOSEN,
             r"fresh &= ~listed;", ""),
    mutation("candidates beyond their room", "a warp writes over its neighbour's", CHOSEN,
             r"held \+ count\(who\) > room", "false"),
    mutation("bins counted too early", "a barrier dropped behind the counts", CHOSEN,
             r"(\[\(entry - lowest\) >> by\], 1u\);\n  \}\n)  __syncthreads\(\);\n", r"\1"),
    mutation("chosen read too early", "a barrier dropped behind the ranks", CHOSEN,
             r"(picks\[i\] = 0;\n)  __syncthreads\(\);\n", r"\1"),
    mutation("nothing left is column 0", "-1 forgotten", CHOSEN, r"column_of\(entry\) : -1", "column_of(entry) : 0"),
    mutation("sorted the other way", "ties in one bin come last first", CHOSEN, r"\(low & run\) == 0",
             "(low & run) != 0"),
    mutation("columns beyond the row", "a ragged vector's rest is chosen from", CHOSEN_RAGGED,
             r"keys\[1\] = -INFINITY;", ";", r"fresh &= ~\(~0u >> \d\);", ";"),
    mutation("a sum of exponentials as it was", "it does not follow the pivot", CHOSEN,
             r"total \*= power_of_2\(now - shift\);", ""),
    mutation("a sum of exponentials that overflowed", "a row of large keys is not read again", CHOSEN,
             r"if \(lost\(\w+, \w+\)\)", "if (false)"),
    mutation("a cluster's candidates one place on", "what lies before them was never written", CHOSEN_MET,
             r"picker\.incoming = 0;", "picker.incoming = 1;"),
    mutation("a cluster's candidates over each other", "warps do not ask where to write", CHOSEN_MET,
             r"merged\[0\]\[start \+ ", "merged[0]["),
    mutation("a cluster's candidates read too early", "the barrier behind them is dropped", CHOSEN_MET,
             r"__cluster_barrier_arrive\(\);\n *__cluster_barrier_wait\(\);\n( *if \(__clusterRelative)", r"\1"),
    mutation("warp: ties with the bound lost", "only what exceeds it is a candidate", ROUTED,
             r"!\(keys\[v\]\[j\] < bar\)", "keys[v][j] > bar", everywhere=True),
    mutation("warp: a round too many", "the bound is above the last of the lanes' largest", ROUTED,
             r"const float bar = ", "const float bar = 0.01f + "),
    mutation("warp: the lanes' places", "lanes do not count those below them", ROUTED,
             r"place = upto - count\(passing\)", "place = 0"),
    mutation("warp: compared with what was never written", "the list is not filled up", ROUTED,
             r"picker\.candidates\[at\]\[all \+ lane\] = 0;", ";"),
    mutation("warp: the bound of another rank", "fewer than k lanes reach it", ROUTED, r"ahead < \d+ \?",
             "ahead < 2 ?"),
    mutation("warp: a candidate too few is enough", "the bound is the largest of the lane before", ROUTED,
             r"ahead < 8 \?", "ahead < 7 ?"),
    mutation("one by one: one too few", "the last of k is not looked for", ROUTED_FEW, r"r < 4; \+\+r", "r < 3; ++r"),
    mutation("one by one: ties by the last column", "the larger column wins", ROUTED_FEW, r"orders\[j\] > best \? col",
             "orders[j] >= best ? col"),
    mutation("one by one: ties of two lanes", "the larger column wins", ROUTED_FEW, r"v < other \? v : other",
             "v > other ? v : other", r"\? experts : \d+", "? experts : -1"),
    mutation("one by one: ties taken out together", "all that are as large are gone", ROUTED_FEW,
             r"col \+ j == experts", "orders[j] == best"),
    mutation("one by one: masked columns chosen", "-inf counts as a key", ROUTED_FEW, r"best > masked \?",
             "best >= masked ?"),
    mutation("warp: ranks of candidates that are not there", "meet() forgotten", ROUTED,
             r"__syncwarp\(\);", ""),
    mutation("warp: nothing where too few are left", "picks as they were", ROUTED,
             r"for \(unsigned i = all \+ lane;[^\n]*\n", "\n"),
    mutation("small k: fewer than k reach the bar", "one warp is enough", SMALL_K, r"above < \d+ \? own",
             "above < 1 ? own"),
    mutation("small k: a thread reaches itself alone", "a warp says its largest", SMALL_K, r"above < \d+ \? order",
             "above < 1 ? order"),
    mutation("small k: ties with the bar lost", "only what exceeds it is a candidate", SMALL_K,
             r"!\(keys\[v\]\[j\] < bar\)", "keys[v][j] > bar"),
    mutation("small k: masked columns chosen", "the bar may be -inf", SMALL_K, r"least > masked \? least : masked \+ 1",
             "least"),
    mutation("small k: the last of a thread's candidates", "one is enough", SMALL_K, r"while \(marks\) \{",
             "if (marks) {"),
    mutation("small k: candidates beyond their room", "as many as there are", SMALL_K, r"if \(place < room\) ", ""),
    mutation("small k: too many taken for enough", "what had no room is lost", SMALL_K,
             r"all <= room && ", ""),
    mutation("small k: a candidate too few is enough", "the search for a bar ends where k - 1 reach it", SMALL_K_RAGGED,
             r"all >= 50 \|\| cutoff == bottom", "all >= 49 || cutoff == bottom"),
    mutation("small k: too few for good", "it is never found to be so", SMALL_K, r"    few = cutoff;\n", ""),
    mutation("small k: counted on", "candidates of the last try are not forgotten", SMALL_K,
             r"picker\.found\[side \^ 1\] = 0;", ";"),
    mutation("small k: candidates counted too early", "a barrier dropped behind them", SMALL_K,
             r"__syncthreads\(\);\n(    if \(threadIdx\.x == 0\) \{\n      picker\.counts)", r"\1"),
    mutation("small k: the bar read too early", "the barrier behind it is dropped", SMALL_K,
             r"__syncthreads\(\);\n(\s+// ---- collect)", r"\1"),
    mutation("small k: bins counted too early", "a barrier dropped behind the counts", SMALL_K,
             r"(\[\(entry - lowest\) >> by\], 1u\);\n  \}\n)  __syncthreads\(\);\n", r"\1"),
    mutation("small k: rank counts itself", "every candidate a place too low", SMALL_K, r"binned\[other\] > entry",
             "binned[other] >= entry"),
    mutation("small k: the peak before", "a turn's exponentials are not rescaled", SMALL_K,
             r"exponentials \*= exponential\(peak - below\);", ""),
    mutation("small k: a warp's sum by its own peak", "lanes' sums are added as they are", SMALL_K,
             r"warp_sum\(exponentials \* exponential\([^;]*;", "warp_sum(exponentials);"),
    mutation("small k: columns beyond the row", "a ragged vector's rest is chosen from", SMALL_K_RAGGED,
             r"if \([^\n]*col \+ j < 2053\) \{\n( +const float \w+ = )", r"if (true) {\n\1"),
    mutation("small k: another block's key", "marks are looked up in a neighbour's column", SMALL_K_RAGGED,
             r"(picker\.keys\[element\]\[threadIdx\.x)", r"\1 ^ 1"),
    mutation("small k: a cluster's first block in place of each", "blocks hear of nobody else", SMALL_K_MET,
             r"picker_of\(picker, lane_of_warp\)", "picker_of(picker, 0)"),
    mutation("small k: warps in each other's place", "blocks of a cluster take the same", SMALL_K_MET,
             r"block \* warps \+ warp", "warp", everywhere=True),
    mutation("small k: a cluster does not meet", "it is not waited for", SMALL_K_MET,
             r"  __cluster_barrier_wait\(\);\n\}",
             "}"),
    mutation("small k: written to before it runs", "a block does not wait for the others to be there", SMALL_K_MET,
             r"__cluster_barrier_wait\(\);  // so does every block[^\n]*\n", "", ),
    mutation("large k: the bar of one warp", "fewer than k reach it", LARGE_K,
             r"warp_least\(picker\.reached\[threadIdx\.x % warps\]\)", "picker.reached[0]"),
    mutation("large k: ties with the bar lost", "only what exceeds it is a candidate", LARGE_K,
             r"!\((keys\[[^\]]*\]) < bar\)", r"(\1 > bar)", everywhere=True),
    mutation("large k: masked columns chosen", "the bar may be -inf", LARGE_K, r"unsigned low = masked \+ 1",
             "unsigned low = masked"),
    mutation("large k: candidates over each other", "warps do not ask where to write", LARGE_K,
             r"place \+= w < warp \? picker\.totals\[w\] : 0;", ""),
    mutation("large k: read before they are packed", "the barrier behind them is dropped", LARGE_K,
             r"(\+\+to;\n[ }\n]+)__syncthreads\(\);\n", r"\1\n"),
    mutation("large k: beyond their room", "ties are packed all the same", LARGE_K, r"if \(held > limit\) \{",
             "if (false) {"),
    mutation("large k: a candidate too few is enough", "the search for a cutoff ends where k - 1 reach it",
             LARGE_K_RAGGED,
             r"if \(more >= 50 && more <= limit\)", "if (more >= 49 && more <= limit)"),
    mutation("large k: what is let go stays", "ties are counted as before", LARGE_K,
             r"reaches\((orders[^,]*), col \+ j, cutoff\) \? key_at\([^)]*\) : -INFINITY",
             r"key_at(\1)"),
    mutation("large k: ties with later columns", "the larger column stays", LARGE_K, r"col <= column_of\(cutoff\)",
             "col >= column_of(cutoff)"),
    mutation("large k: bins counted too early", "a barrier dropped behind the counts", LARGE_K,
             r"(found\[0\]\[i\]\)\)\], 1u\);\n  \}\n)  __syncthreads\(\);\n", r"\1"),
    mutation("large k: rank counts itself", "every candidate a place too low", LARGE_K, r"binned\[other \+ q\] > entry",
             "binned[other + q] >= entry"),
    mutation("large k: compared with what was never written", "the list is not filled up", LARGE_K,
             r"if \(threadIdx\.x < compared\) [^\n]*\n", "\n"),
    mutation("large k: a lane's sum", "a warp's exponentials are not added", LARGE_K, r"= warp_sum\(exponentials\);",
             "= exponentials;"),
    mutation("large k: chosen read too early", "a barrier dropped behind the ranks", LARGE_K,
             r"(picks\[i\] = 0;\n)  __syncthreads\(\);\n", r"\1"),
    mutation("large k: columns beyond the row", "a ragged vector's rest is chosen from", LARGE_K_RAGGED,
             r"if \([^\n]*col \+ j < 1003\) \{\n( +const float \w+ = )", r"if (true) {\n\1"),
    mutation("HIP: dense counts of half a wave", "lanes 32 and up are not added", HIP_LARGE_K,
             r"int step = 32(; step > 0; step /= 2\) v \+= __shfl_xor\(v, step\);\n *return v;)", r"int step = 16\1"),
    mutation("HIP: held exponentials of half a wave", "lanes 32 and up are not added", HIP_SMALL_K,
             r"int step = 32(; step > 0; step /= 2\) v \+=)", r"int step = 16\1"),
    mutation("HIP: the most of half a wave", "lanes 32 and up are not asked", HIP_CHOSEN,
             r"(warp_most\(unsigned v\) \{\n  for \(int step = )32", r"\g<1>16"),
    mutation("HIP: votes of 32 lanes", "the upper half's candidates are lost", HIP_CHOSEN, r"return __ballot\(says\);",
             "return __ballot(says) & 0xffffffffull;"),
    mutation("HIP: the warp's ties by the last column", "the larger column wins", HIP_ROUTED, r"\(last_column - col\)",
             "col", r"last_column - \(entry & last_column\)", "entry & last_column"),
    # ---- whole numbers
    mutation("largest integer by f32", "an i32 goes through f32", INTEGERS, r"max\((\w+_part), x\)",
             r"static_cast<int>(fmaxf(\1, x))"),
    mutation("integers added as f32", "a sum rounds", INTEGERS, r"unsigned (\w+_part) = 0u", r"float \1 = 0.0f"),
    mutation("smaller integer by f32", "a choice rounds", INTEGERS, r"min\(x, 16777217\)",
             "static_cast<int>(fminf(x, 16777217))"),
    mutation("integer keys as f32", "neighbours are ties", INTEGER_KEYS, r"static_cast<unsigned>\(key\) \^",
             "static_cast<unsigned>(__float2int_rn(static_cast<float>(key))) ^"),
    mutation("integer keys unsigned", "negative keys are the largest", INTEGER_KEYS,
             r"static_cast<unsigned>\(key\) \^ top_bit", "static_cast<unsigned>(key)"),
    # ---- HIP: warps of 64
    mutation("HIP: a warp of 32 assumed", "half of the wavefront is never added", HIP_LN,
             r"int step = 32;", "int step = 16;"),
    mutation("HIP: parts by warps of 32", "two warps' worth of slots for one", HIP_LN,
             r"threadIdx\.x / 64", "threadIdx.x / 32"),
    mutation("HIP: barrier dropped", "parts are read before they are written", HIP_SOFTMAX,
             r"  __syncthreads\(\);\n", ""),
    mutation("HIP: mask polarity", "True drops in place of keeps", HIP_SOFTMAX, r"mask \? (\w+) : \(-INFINITY\)",
             r"mask ? (-INFINITY) : \1"),
    mutation("HIP: mean over N - 1", "the sample variance", HIP_LN,
             r"(variance = sum_of_squares / )2000\.0f", r"\g<1>1999.0f"),
    mutation("HIP: rounded to the wrong type", "bf16 through f16", HIP_TWO,
             r"static_cast<__bf16>\((\w+)\)", r"static_cast<__bf16>(static_cast<float>(static_cast<_Float16>(\1)))"),
    mutation("HIP: shuffle starts at half", "half of the row is never added", HIP_TWO,
             r"int step = 32;", "int step = 16;"),
)  # fmt: skip
