"""Deliberately broken kernels of attention: the edits of tests/mutations.py, for their template."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen import Chain
from fusegen.emitting.rendering import render
from fusegen.planner import CONTIGUOUS
from fusegen.planner.model import Layout, Source
from tests import attentions, free_attentions
from tests.attentions import plan_for
from tests.mutations import Mutation


@dataclass(frozen=True, eq=False)  # a chain has no hash
class AttentionSubject:
    """One kernel to break: the candidate of that tile for a chain at these sizes."""

    spec: Chain
    tile: str
    sizes: tuple[tuple[str, int], ...]
    target: str

    @property
    def chain(self) -> str:
        return self.spec.name

    def source(self, layout: Layout = CONTIGUOUS) -> Source:
        return render(plan_for(self.spec, self.target, self.tile, layout, **dict(self.sizes)))


def subject(spec: Chain, tile: str, target: str = "cuda:a100", **sizes: int) -> AttentionSubject:
    return AttentionSubject(spec, tile, tuple(sizes.items()), target)


CAUSAL = subject(attentions.lse, "32x64", S=100, T=200, D=32, E=32)
WINDOW = subject(attentions.window, "32x64", S=150, T=200, D=16)
DOCUMENT = subject(attentions.document, "32x64", S=100, T=200, D=16)
SINK = subject(attentions.sink, "32x64", S=100, T=150, D=16)
BIAS = subject(attentions.bias, "32x64", S=100, T=150, D=16)
RETAINED = subject(free_attentions.retained, "32x64", S=150, D=32, E=32)
RECENT = subject(free_attentions.recent, "32x64")
DROPPED = subject(attentions.dropped, "32x64", S=100, T=200, D=16)
WAVES = subject(attentions.lse, "32x32", "hip:gfx90a", S=100, T=200, D=32, E=32)
WIDE_BANKS = subject(attentions.lse, "32x32", "hip:gfx950", S=100, T=200, D=32, E=72)


def mutation(name: str, models: str, of: AttentionSubject, *edits: str, **options: bool | str) -> Mutation:
    pairs: tuple[tuple[str, str], ...] = tuple(zip(edits[::2], edits[1::2], strict=True))
    return Mutation(name, models, of, pairs, **options)  # type: ignore[arg-type]


MUTATIONS: tuple[Mutation, ...] = (
    # ---- what is carried
    mutation("the product is not rescaled", "what was summed keeps an older maximum", CAUSAL,
             r"_sums\[d\]\[i\] \*= shrinks\[i / 2\]", "_sums[d][i] *= 1.0f"),
    mutation("the sum is not rescaled", "sums of exponentials keep an older maximum", CAUSAL,
             r"summed\[r\] \*= shrinks\[r\];", ""),
    mutation("rescaled by the inverse", "old and new maximum change places", CAUSAL,
             r"power_of_2\(pivots\[r\] - pivot\)", "power_of_2(pivot - pivots[r])"),
    mutation("the pivot of the tile before", "exponentials against an older maximum", CAUSAL,
             r"  pivots\[r\] = pivot;\n", "  if (tile == 0) pivots[r] = pivot;\n"),
    mutation("the maximum of one lane", "lanes that share a row take pivots of their own", CAUSAL,
             r"for \(int step = 1; step < 4; step \*= 2\) peaks", "for (int step = 1; step < 2; step *= 2) peaks"),
    mutation("the sum of one lane", "of four lanes that share a row", CAUSAL,
             r"for \(int step = 1; step < 4; step \*= 2\) summed", "for (int step = 1; step < 2; step *= 2) summed"),
    mutation("an empty row divides by 0", "a row of -inf alone has no pivot", DOCUMENT,
             r"peaks\[r\] == -INFINITY \? 0\.0f : ", ""),
    mutation("natural powers taken for those of 2", "the factor log2 e is left out of the pivot", CAUSAL,
             r"(0\.0f : peaks\[r\]) \* 1\.44269504f", r"\1"),
    mutation("sums stay at the largest logit", "the chain's own pivot is not made", SINK, r" \* brought;", ";",
             everywhere=True),
    # ---- tiles
    mutation("a tile skipped too early", "the last tile that the last row needs is left out", CAUSAL,
             r"key0 < end_key; key0", "key0 < end_key - tile_keys; key0"),
    mutation("a tile skipped at the start", "the first tile that the first row needs is left out", WINDOW,
             r"/ tile_keys \* tile_keys;", "/ tile_keys * tile_keys + tile_keys;"),
    mutation("the ends of the first row alone", "rows below need more keys", CAUSAL,
             r"most\(top_ends\.end, last_ends\.end\)", "top_ends.end"),
    mutation("the ends of one thread's row", "threads do not bring their ends together", DOCUMENT,
             r"(met_end = met\[\d\]\[1\]) > met_end \? met\[\d\]\[1\] : met_end;", r"\1;"),
    mutation("the ends of a warp's first row", "lanes do not bring their ends together", DOCUMENT,
             r"meet_most\(within_keys\(own\.end\)\)", "within_keys(own.end)"),
    mutation("no barrier between the ends", "ends are read before all warps wrote them", DOCUMENT,
             r"(own_free_end;\n)  __syncthreads\(\);\n", r"\1"),
    mutation("free one key too far", "the tile that holds the diagonal's last key is not tested", CAUSAL,
             r"key0 \+ tile_keys <= free_end", "key0 + tile_keys <= free_end + tile_keys"),
    mutation("a mask one off at its edge", "each row sees the key behind its last", CAUSAL,
             r"col_index <= last\w*", r"\g<0> + 1"),
    mutation("a window one off at its edge", "each row sees the key before its first", WINDOW,
             r"col_number > sub", "col_number >= sub"),
    mutation("keys beyond the last are seen", "a ragged tile's zeros are exponentiated", BIAS,
             r"col < keys \? (\w+) : -INFINITY", r"\1"),
    mutation("keys beyond the last are read", "memory behind the operand", BIAS,
             r"key0 \+ k_row \+ v \* \d+ < keys \? 8\s+: 0", "8"),
    mutation("queries beyond the last are read", "memory behind the operand", CAUSAL,
             r"q_row \+ v \* \d+ < rows_here \? 8\s+: 0", "8"),
    mutation("rows beyond the last are written", "memory behind the output", CAUSAL, r"if \(m < rows_here\) \{",
             "if (true) {"),
    # ---- on the way
    mutation("a copy is not waited for", "a tile is multiplied before it lands", CAUSAL,
             r"(const int stage = tile % 2;\n +)wait_copies<0>\(\);", r"\1"),
    mutation("no barrier before a tile", "warps read what others have not brought yet", CAUSAL,
             r"(wait_copies<0>\(\);\n) +__syncthreads\(\);\n( +if \(key0)", r"\1\2"),
    mutation("the next tile in this one's place", "a tile is overwritten while it is read", CAUSAL,
             r"\(tile \+ 1\) % 2", "tile % 2"),
    mutation("values of the tile before", "weights meet other keys' values", CAUSAL,
             r"v_lane \+ stage \*", "v_lane + (tile > 0 ? 1 - stage : stage) *"),
    mutation("HIP: queries overwritten by the first tile", "no barrier behind the queries' fragments", WAVES,
             r"(q_part\[0\] = [^\n]*\n)  __syncthreads\(\);", r"\1"),
    mutation("sums before the last tile is read", "no barrier before sums take its place", CAUSAL,
             r"(row_largest \+ tile_rows;\n)  __syncthreads\(\);\n", r"\1"),
    mutation("sums are read too early", "no barrier behind them", CAUSAL,
             r"(= e_times_v_sums\[d\]\[i\];\n +\}\n +\}\n)  __syncthreads\(\);\n", r"\1"),
    mutation("halves of a fragment change places", "weights of other keys", CAUSAL,
             r"q_times_k_sums\[2 \* n\]\[2\], q_times_k_sums\[2 \* n\]\[3\]",
             "q_times_k_sums[2 * n + 1][0], q_times_k_sums[2 * n + 1][1]"),
    mutation("the weights of the step before", "a fragment of other keys", CAUSAL,
             r"rounded_pair\(q_times_k_sums\[2 \* n \+ 1\]\[0\]", "rounded_pair(q_times_k_sums[2 * n][0]"),
    mutation("a bias of the row above", "the pointer of the lane's other row", BIAS, r"bias_here\[i / 2\]",
             "bias_here[0]"),
    mutation("32-bit offset of a key's row", "wraps in operands of 2^31 elements and more", CAUSAL, r"\* k_ld",
             "* static_cast<int>(k_ld)", everywhere=True, quick=False),
    mutation("32-bit offset of a head", "wraps in operands of 2^31 elements and more", CAUSAL,
             r"B_H_at \* q_stride_B_H", "static_cast<int>(B_H_at * q_stride_B_H)"),
    # ---- without a softmax
    mutation("no mask where an end cuts", "weights of later keys", RETAINED, r"ge \? (\w+) : 0\.0f", r"\1"),
    mutation("weights of 1 where a mask hides", "what weighs nothing is no power", RETAINED,
             r"(ge \? \w+) : 0\.0f", r"\1 : 1.0f"),
    mutation("tiles free one row too far", "the first row of a tile sees its last key", RETAINED,
             r"key0 \+ tile_keys <= free_end", "key0 + tile_keys <= free_end + tile_rows"),
    mutation("the last tile of keys is not read", "the diagonal is left out", RETAINED,
             r"key0 < end_key; key0", "key0 < end_key - tile_keys; key0"),
    mutation("one row's ages for both", "numbers of the first row's diagonals", RETAINED, r" - i / 2 % 2 \* 8", "",
             everywhere=True),
    mutation("keys beyond the last have weights", "infinities times zeros", RECENT,
             r"col_index < keys \? (\w+) : 0\.0f", r"\1"),
    # ---- random numbers
    mutation("both lanes draw for one row", "the other row's numbers", DROPPED,
             r"lane % 2 \? first_element\[1\] : first_element\[0\]", "first_element[0]"),
    mutation("a lane keeps the half that it should give", "numbers of the other row", DROPPED,
             r"odd \? words\[j\] : words\[2 \+ j\]", "odd ? words[2 + j] : words[j]"),
    mutation("numbers of the head before", "rows are counted in one head alone", DROPPED,
             r"\(\(B_at \* H_size \+ H_at\) \* S_size \+ row\)", "row"),
    # ---- HIP
    mutation("HIP: the product is not rescaled", "what was summed keeps an older maximum", WAVES,
             r"_sums\[d\]\[i\] \*= shrinks\[0\]", "_sums[d][i] *= 1.0f"),
    mutation("HIP: the maximum of half a row", "lanes that share a row take pivots of their own", WAVES,
             r"for \(int step = 16; step < 64; step \*= 2\) peaks", "for (int step = 16; step < 32; step *= 2) peaks"),
    mutation("HIP: overwritten before it is read", "no barrier behind a tile", WAVES,
             r"(, 0, 0, 0\);\n +\}\n +\}\n) +__syncthreads\(\);\n", r"\1"),
    mutation("HIP: values turned the wrong way", "a column of values for a row", WAVES,
             r"\(j \* 4 \+ v_col / 8\) \* v_pitch", "((7 - j) * 4 + v_col / 8) * v_pitch"),
    mutation("HIP: a fragment's columns taken for neighbours", "they lie 8 apart", WAVES,
             r"row_sums\[m \* sums_stride \+ [^\]]*\]", "row_sums[m * sums_stride + d * 16 + lane / 16 * 4 + i]"),
    mutation("HIP: fours of keys where they were", "in every other 8 columns they changed places", WIDE_BANKS,
             r" \^ lane % 16 / 8 \* 4", ""),
)  # fmt: skip
