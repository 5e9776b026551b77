"""Deliberately broken kernels of chains with products: the edits of tests/mutations.py, for their template."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen import Chain
from fusegen.emitting.rendering import render
from fusegen.planner import CONTIGUOUS
from fusegen.planner.model import Layout, Source
from fusegen.targets import Target
from tests import gemms, grouped
from tests.gemms import FEW, Fits, banded, clustered, persistent, plan_for, streamed, streamed_waves, tiled
from tests.mutations import Mutation


@dataclass(frozen=True, eq=False)  # a chain has no hash
class GemmSubject:
    """One kernel to break: the first candidate for a chain at these sizes that fits."""

    spec: Chain
    fits: Fits
    sizes: tuple[tuple[str, int], ...]
    target: str | Target = "cuda:h200"

    @property
    def chain(self) -> str:
        return self.spec.name

    def source(self, layout: Layout = CONTIGUOUS) -> Source:
        return render(plan_for(self.spec, self.target, self.fits, layout, **dict(self.sizes)))


def subject(spec: Chain, fits: Fits, target: str | Target = "cuda:h200", **sizes: int) -> GemmSubject:
    return GemmSubject(spec, fits, tuple(sizes.items()), target)


TILED = subject(gemms.bias_gelu, tiled, M=160, N=320, K=264)
PERSISTENT = subject(gemms.bias_gelu, persistent, FEW, M=300, N=512, K=512)
TURNED = subject(gemms.turned, tiled, M=96, N=200, K=136)
STREAMED = subject(gemms.bias_gelu, streamed, M=8, N=96, K=1032)
CLUSTERED = subject(gemms.bias_gelu, clustered, M=8, N=96, K=1032)
RESIDUAL = subject(gemms.residual, tiled, M=96, N=200, K=136)
GATED = subject(gemms.norm_swiglu, tiled, M=96, N=200, K=136)
NORMED = subject(gemms.norm, streamed, M=8, N=96, K=1032)
DEEP_RESIDUAL = subject(gemms.residual, tiled, M=160, N=320, K=264)
TILED_NORMED = subject(gemms.norm, tiled, M=160, N=320, K=264)
SPANS = subject(gemms.qkv, tiled, B=2, M=60, N=96, L=40, K=72)
BATCHED = subject(gemms.batched, tiled, B=3, M=70, N=96, K=72)
WAVES = subject(gemms.bias_gelu, tiled, "hip:gfx90a", M=96, N=200, K=136)
BANDS = subject(gemms.bias_gelu, banded, "hip:gfx90a", M=160, N=200, K=136)
ROUNDED = subject(gemms.tf32, tiled, M=96, N=200, K=136)
ROUNDED_ACROSS = subject(gemms.tf32_turned, tiled, M=96, N=200, K=136)
F32_WAVES = subject(gemms.tf32, tiled, "hip:gfx90a", M=96, N=200, K=136)
GROUPED = subject(grouped.plain, tiled, T=200, N=96, K=72, E=4)
GROUPED_STREAMS = subject(grouped.gated, streamed, T=40, N=96, K=1032, E=5)
GROUPED_PERSISTENT = subject(grouped.plain, persistent, FEW, T=500, N=256, K=256, E=4)
GROUPED_AT_ONCE = subject(grouped.plain, persistent, T=300, N=512, K=256, E=4)  # each tile has a block
TURNED_WAVES = subject(gemms.turned, tiled, "hip:mi300x", M=160, N=200, K=136)
WHOLE_SLICES = subject(gemms.turned, tiled, "hip:mi300x", M=160, N=200, K=128)  # the last row's are whole too
SMALL_WAVES = subject(gemms.norm, streamed_waves, "hip:mi300x", M=8, N=96, K=1032)


def mutation(name: str, models: str, of: GemmSubject, *edits: str, **options: bool | str) -> Mutation:
    pairs: tuple[tuple[str, str], ...] = tuple(zip(edits[::2], edits[1::2], strict=True))
    return Mutation(name, models, of, pairs, **options)  # type: ignore[arg-type]


MUTATIONS: tuple[Mutation, ...] = (
    # ---- slices on their way
    mutation("a copy is not waited for", "a slice is multiplied before it lands", TILED,
             r"(k == \d+ && !last\) \{\n +)wait_copies<stages - 2>\(\);", r"\1"),
    mutation("waits for one slice too few", "the newest slice may still be on its way", TILED,
             r"wait_copies<stages - 2>\(\)", "wait_copies<stages - 1>()", everywhere=True),
    mutation("no barrier between slices", "warps read what others have not brought yet", TILED,
             r"\} else if \(!last\) \{\n +__syncthreads\(\);", "} else if (!last) {"),
    mutation("no barrier before the first slice", "fragments of nothing", TILED,
             r"__syncthreads\(\);\n( +)load_parts\(0, 0, 0\)", r"load_parts(0, 0, 0)"),
    mutation("a stream's warp does not meet", "lanes read what others have not brought yet", STREAMED,
             r"__syncwarp\(\);", "", everywhere=True),
    mutation("a ring shorter than it is", "a slice is overwritten while it is read", TILED,
             r"step % stages \*", "step % (stages - 1) *", everywhere=True),
    mutation("every slice in the first one's place", "a slice is overwritten before it is read", STREAMED,
             r"own_address\(ring_at [^\n]*\);", "own_address(ring_at);"),
    mutation("elements counted as bytes", "chunks of the right factor overlap", STREAMED,
             r"(slice \+ \(w_at \+ place<\d+>\([^)]*\)\) \*) 2;", r"\1 1;"),
    mutation("the last slice left out", "the sum ends early", TILED, r"take_slice\(steps - 1, true\);", ""),
    mutation("a slice taken twice", "the loop begins one slice late and ends as ever", STREAMED,
             r"(x_from \+= split_k \* tile_k);", r"\1 * (step != 1);"),
    mutation("depth beyond the end is read", "what lies behind a row is multiplied", TILED,
             r"k_at \+ \w+_k < full_k", "true", everywhere=True),
    mutation("rows beyond the last are read", "memory behind the operand", TILED,
             r"x_m \+ v \* \d+ < rows_here \? 8 : 0|x_m( \+ v \* \d+)? < rows_here && ", r"true && "),
    mutation("columns beyond the last are read", "memory behind the factor", TURNED,
             r"col0 \+ w_n < cols", "true", everywhere=True),
    mutation("transposed rows counted by chunks", "a chunk that the rows end in is read whole", TURNED,
             r"within\(rows_here - \w+\)", "8"),
    mutation("parts of K overlap", "two groups take one slice", STREAMED, r"k_group \* tile_k",
             "k_group / 2 * 2 * tile_k", everywhere=True),
    mutation("leading dimension taken for the row length", "right until a factor is padded", TILED, r"\* w_ld", "* 264",
             everywhere=True, quick=False),
    mutation("32-bit row offset", "wraps in operands of 2^31 elements and more", TILED,
             r"\(row0 \+ x_m\) \* x_stride", "static_cast<int>((row0 + x_m) * x_stride)"),
    mutation("32-bit row offset of a stream", "wraps in operands of 2^31 elements and more", STREAMED,
             r"\(row0 \+ x_m\) \* x_stride", "static_cast<int>((row0 + x_m) * x_stride)"),
    mutation("32-bit row offset behind the products", "wraps in operands of 2^31 elements and more", RESIDUAL,
             r"row \* r_value_stride", "static_cast<int>(row * r_value_stride)"),
    mutation("32-bit leading dimension", "wraps in factors of 2^31 elements and more", TILED, r"\* w_ld",
             "* static_cast<int>(w_ld)", everywhere=True, quick=False),
    mutation("32-bit offset of a batch", "wraps in factors of 2^31 elements and more", BATCHED,
             r"B_at \* w_stride_B", "static_cast<int>(B_at * w_stride_B)"),
    mutation("HIP: 32-bit row offset", "wraps in operands of 2^31 elements and more", WAVES,
             r"\(row0 \+ x_m\) \* x_stride", "static_cast<int>((row0 + x_m) * x_stride)"),
    # ---- slices on their way among the products
    mutation("persistent: a copy is not waited for", "a slice is multiplied before it lands", PERSISTENT,
             r"(k == \d+\) \{\n +)wait_copies<stages - 3>\(\);", r"\1"),
    mutation("persistent: waits for one slice too few", "the next slice may still be on its way", PERSISTENT,
             r"(k == \d+\) \{\n +)wait_copies<stages - 3>", r"\1wait_copies<stages - 2>"),
    mutation("persistent: no barrier between slices", "warps read what others have not brought yet", PERSISTENT,
             r"(k == \d+\) \{\n.*\n +)__syncthreads\(\);", r"\1"),
    mutation("persistent: a slice in the place before its own", "it is overwritten while it is read", PERSISTENT,
             r"\(slot \+ stages - 1\) % stages", "(slot + stages - 2) % stages"),
    mutation("persistent: around the ring on the spot", "the first slices again", PERSISTENT, r"advance\(stages\);",
             ""),
    mutation("persistent: a chunk left out", "a step's last copy is not made", PERSISTENT, r"at < (\d+) && copies",
             r"at < \1 - 1 && copies"),
    mutation("persistent: fragments of the slice before", "a slice's first step is the last one's", PERSISTENT,
             r"\(slot \+ 1\) % stages", "slot"),
    mutation("persistent: the last time around left out", "the sum ends early", PERSISTENT, "step < steps; step",
             "step < steps - stages; step"),
    mutation("persistent: the same tile again", "copies go on where they are", PERSISTENT,
             r"if \(more\) aim\([^\n]*\);", ""),
    mutation("persistent: the next tile aimed at too late", "its first slice is one of this tile", PERSISTENT,
             r"if \(slot == 0\) \{", "if (slot == 1) {"),
    mutation("persistent: tiles behind the last one", "memory behind the right factor", PERSISTENT,
             r"more = tile[^;]*;", "more = true;"),
    mutation("persistent: rows of the tile before", "rows beyond the last are read", PERSISTENT,
             r"rows_here = rows - row0 < [^\n]*", "rows_here = 128;"),
    mutation("persistent: one tile a block", "the others are never written", PERSISTENT,
             r"tile \+= gridDim\.x\)", "tile += 99)"),
    # ---- products
    mutation("fragments of the wrong depth", "columns of one half of a slice meet rows of the other", TILED,
             r"(load_matrices\(w_part.*?\^ \()k \* 32\)", r"\1(k ^ 1) * 32)"),
    mutation("left halves exchanged", "8 rows trade places with their neighbours", TILED,
             r"\[m % 2 \* 2\]", "[(m + 1) % 2 * 2]"),
    mutation("a product forgotten", "the second operand's sums stay 0", GATED,
             r"multiply_add\(matmul_w_up_sums[^;]*;", ""),
    mutation("gate and up exchanged", "each is multiplied by the other's factor", GATED,
             r"(multiply_add\(matmul_w_gate_sums\[\w\]\[\w\], )w_gate_part", r"\1w_up_part"),
    mutation("swizzled the wrong way", "a tile's chunks are looked for where they are not", TILED,
             r"(k / 8 \^ )xor_mask", r"\1(xor_mask ^ (threadIdx.x / 32 == 1))"),
    # ---- sums
    mutation("a sum's row off by one", "neighbours' sums", RESIDUAL, r"lane % 4 \* 2 \+ i % 2",
             "lane % 4 * 2 + 1 - i % 2"),
    mutation("a register's row off by one", "neighbours' sums", TILED, r"(matmul_sums.* \+ )v % 2\]",
             r"\g<1>1 - v % 2]"),
    mutation("columns not dealt", "each lane has every 16th column, and takes them for neighbours", TILED,
             r"w_col = [^;]*;", "w_col = w_n;"),
    mutation("columns of later copies not dealt", "half of a lane's columns are others'", TILED,
             r"away = [^;]*;", "away = v * 8;"),
    mutation("no barrier before the sums", "sums overwrite slices that others still read", DEEP_RESIDUAL,
             r"(neighbouring columns of a row\n +)__syncthreads\(\);", r"\1"),
    mutation("no barrier behind the sums", "sums are read before they are written", RESIDUAL,
             r"(= matmul_sums\[n\]\[m\]\[i\];[\s}]*\n +)__syncthreads\(\);", r"\1"),
    mutation("no barrier behind the statistics", "they are read before they are written", TILED_NORMED,
             r"(= sum_of_squares_part\[v\];\s+\}\n +)__syncthreads\(\);", r"\1"),
    mutation("no barrier before the statistics", "they overwrite slices that others still read", TILED_NORMED,
             r"(operand meet in shared memory\n +)__syncthreads\(\);", r"\1"),
    mutation("one slice-K group's sums left out", "the last part of K is missing", STREAMED,
             r"group < (\d+); \+\+group",
             r"group < \1 - 1; ++group"),
    mutation("one block's sums left out", "the cluster's last share is missing", CLUSTERED,
             r"block < 2; \+\+block", "block < 1; ++block"),
    mutation("a cluster does not meet", "other blocks' sums are read before they are written", CLUSTERED,
             r"__cluster_barrier_arrive\(\);\n +__cluster_barrier_wait\(\);\n", ""),
    mutation("a cluster's block leaves early", "its sums are gone while others read them", CLUSTERED,
             r"__cluster_barrier_arrive\(\);  // this.*?\n.*?\n", ""),
    # ---- before the products
    mutation("not prepared", "the gain is left out", GATED, r"prepare_slice\(step \+ 1\);", ""),
    mutation("gain of another column", "the vector's first elements for all", GATED, r"gain_ptr \+ k_at \+ x_k",
             "gain_ptr + x_k"),
    mutation("gain read late", "the slice before has its gain", GATED, r"fetch_slice\(step \+ 1\)",
             "fetch_slice(step)"),
    mutation("a statistic of one lane", "the others' parts are left out", NORMED,
             r"for \(int step = \d+; step > 0; step /= 2\) sum_of_squares_part",
             "for (int step = 0; step > 0; step /= 2) sum_of_squares_part"),
    mutation("a statistic of other rows", "rows trade their scales", NORMED,
             r"(sum_of_squares_shared\[k_group \* group_floats \+ )x_m", r"\1(x_m ^ 1)"),
    mutation("mean over K + 1", "the row's length is off by one", NORMED, r"/ 1032\.0f", "/ 1033.0f"),
    mutation("epsilon off", "1e-5 for 1e-6", NORMED, r"1e-06f", "1e-05f"),
    # ---- behind the products
    mutation("bias forgotten", "an operand is not used", TILED, r"= (\w+) \+ bias;", r"= \1;"),
    mutation("bias of another column", "the tile's first columns for all tiles", TILED, r"bias_ptr \+ col\b",
             "bias_ptr + n"),
    mutation("residual of another row", "every row reads the first", RESIDUAL, r"r_value_ptr \+ row \* r_value_stride",
             "r_value_ptr + 0 * r_value_stride"),
    mutation("rows beyond the last are written", "memory behind the output", TILED, r"if \(row < rows", "if (true"),
    mutation("columns beyond the last are written", "the next row's first elements", TURNED, " && col < cols", ""),
    mutation("second output not written", "a store is lost", RESIDUAL, r"store<\d>\(y_ptr.*?\);", ""),
    mutation("spans trade factors", "k is multiplied by v's weights", SPANS, r"group == 1 \? wk_ptr : wv_ptr",
             "group == 1 ? wv_ptr : wk_ptr"),
    mutation("a span's columns counted from the first's", "columns of another tile", SPANS,
             r"group == 1 \? (\d+) : (\d+)\)\)", r"group == 1 ? \1 : \1))"),
    mutation("a batch's own factor forgotten", "every batch is multiplied by the first's", BATCHED,
             r" \+ B_at \* w_stride_B", ""),
    mutation("a batch's rows forgotten", "every batch reads the first's rows", BATCHED, r" \+ B_at \* x_stride_B", ""),
    mutation("rounded toward zero", "the output is cut off", TILED, r"__float2bfloat16_rn\(gelu\)",
             "__float2bfloat16_rn(__int_as_float(__float_as_int(gelu) & 0xffff0000))"),
    mutation("tiles of rows overlap", "half of the rows are computed twice", TILED, r"\* tile_rows;",
             "* (tile_rows / 2);"),
    # ---- f32 as tf32
    mutation("tf32: factors cut off", "the tensor core takes no notice of the lower bits", ROUNDED,
             r"(load_matrices\(.*?)to_tf32\(to\[i\]\)", r"\1to[i]"),
    mutation("tf32: NaN lost", "rounding by an addition makes a zero of a NaN whose bits are all set", ROUNDED,
             r'asm\("cvt\.rn\.tf32[^\n]*', "y = bits + 0x1000u;"),
    mutation("tf32: fragments of halves", "a step takes 16 of what is summed, and the instruction 8", ROUNDED,
             r"\^ \(k \* 32\)", "^ (k * 64 % 128)", everywhere=True),
    mutation("tf32: bytes of halves", "half of each ragged chunk is zeros", ROUNDED, r"count \* 4\)", "count * 2)",
             everywhere=True),
    mutation("tf32: transposed rows exchanged", "8 columns trade places with those 4 deeper", ROUNDED_ACROSS,
             r"\(address \^ i % 2 \* 32\) \+ i / 2 \* 4", "(address ^ i / 2 * 32) + i % 2 * 4"),
    mutation("tf32: transposed lines too far", "every second line is taken twice", ROUNDED_ACROSS,
             r"i % 2 \* 4 \* Line", "i % 2 * 2 * Line"),
    mutation("tf32: a transposed chunk swizzled otherwise", "single elements are looked for where they are not",
             ROUNDED_ACROSS, r"% \(period / 2\) \* 2;", "% (period / 2) * 2 ^ (threadIdx.x / 32 == 1);"),
    # ---- waves of 64
    mutation("HIP: a quarter of K", "the last instruction is left out", F32_WAVES,
             r"sums = __builtin[^;]*part\[3\][^;]*;", ""),
    mutation("HIP: no barrier between slices", "waves read what others have not brought yet", WAVES,
             r"\} else if \(!last\) \{\n +__syncthreads\(\);", "} else if (!last) {"),
    mutation("HIP: a sum's column by 32 lanes", "the wave's halves trade columns", WAVES,
             r"lane / 32 \* 4", "(1 - lane / 32) * 4"),
    mutation("HIP: half of K", "the second instruction is left out", WAVES,
             r"sums = __builtin[^;]*part\[1\][^;]*;", ""),
    mutation("HIP: rows behind the last are read", "a tile is taken for whole that has fewer", WHOLE_SLICES,
             r"rows_here == tile_rows && ", ""),
    mutation("HIP: columns behind the last are read", "a tile is taken for whole that has fewer", WHOLE_SLICES,
             r" && col0 \+ tile_cols <= cols", ""),
    mutation("HIP: K's end is not met", "the last slice is taken for whole", TURNED_WAVES,
             r" && k_at \+ tile_k <= full_k", ""),
    mutation("HIP: a band left out", "the last rows are not written", BANDS, r"band < (\d+); \+\+band",
             r"band < \1 - 1; ++band"),
    mutation("HIP: bands do not meet", "a band's sums overwrite those before", BANDS,
             r"if \(band > 0\) __syncthreads\(\);", ""),
    # ---- groups of rows
    mutation("an end beyond the rows", "memory behind the operands", GROUPED, r"end < most \? end : most",
             "end", quick=False),
    mutation("an end before the one above it", "rows that two groups have", GROUPED,
             r"end < begin \? begin : ", "", quick=False),
    mutation("ends of one lane", "lanes do not bring their ends together", GROUPED,
             r"if \(lane >= step && other > own\.end\) own\.end = other;", ""),
    mutation("tiles of one lane", "tiles of the groups before are not counted", GROUPED_PERSISTENT,
             r"if \(lane >= step\) own\.behind \+= other;", ""),
    mutation("a group's last tile left out", "tiles are rounded down", GROUPED_STREAMS,
             r"\(static_cast<unsigned>\(end - begin\) \+ tile_rows - 1\)", "static_cast<unsigned>(end - begin)"),
    mutation("rows of the next group", "a tile goes on behind its group", GROUPED, r"segment_end - row0",
             "rows - row0", everywhere=True),
    mutation("a stream's rows of the next group", "a tile goes on behind its group", GROUPED_STREAMS,
             r"segment_end - row0", "rows - row0", everywhere=True),
    mutation("one matrix for all groups", "right where rows are of one group", GROUPED, r"segment \* w_group",
             "0 * w_group"),
    mutation("the next group's matrix", "groups are counted from 1", GROUPED_STREAMS, r"segment \* up_group",
             "(segment + 1) % segments * up_group"),
    mutation("32-bit offset of a group", "wraps in factors of 2^31 elements and more", GROUPED, r"segment \* w_group",
             "static_cast<int>(segment * w_group)", quick=False),
    mutation("rows of no group are the last one's", "they are multiplied", GROUPED,
             r"(found \? end : rows), found\}", r"\1, true}", quick=False),
    mutation("the last group left out", "its rows are of none", GROUPED, r"s < segments \?",
             "s < segments - 1 ?"),
    mutation("persistent: rows of no group have sums", "a tile is multiplied before its group is asked for",
             GROUPED_PERSISTENT, r"of_group \? ", "true ? ", quick=False),
    mutation("persistent: a block without a tile goes on", "it asks for slices that are not there", GROUPED_AT_ONCE,
             r"if \(blockIdx\.x >= tiles(_down)?\) return;[^\n]*", "", quick=False),
    mutation("persistent: no tiles of rows of no group", "they are never written", GROUPED_PERSISTENT,
             r"(return [^;+]*own\.behind[^;+]*) \+ [^;]*;", r"\1;", quick=False),
    mutation("persistent: the group of the tile before", "copies are of another matrix", GROUPED_PERSISTENT,
             r"const int segment = at\.segment;", "const int segment = at.segment ? at.segment - 1 : 0;"),
    mutation("HIP: a statistic of one lane", "the others' parts are left out", SMALL_WAVES,
             r"for \(int step = \d+; step > 0; step /= 2\) sum_of_squares_part",
             "for (int step = 0; step > 0; step /= 2) sum_of_squares_part"),
)  # fmt: skip
