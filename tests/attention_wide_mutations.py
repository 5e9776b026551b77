"""Deliberately broken kernels of attention of long rows: the edits of tests/mutations.py, for their template."""

from __future__ import annotations

from tests import attentions
from tests.attention_mutations import mutation, subject
from tests.mutations import Mutation

ROWS = subject(attentions.long_rows, "wide 32x32", S=40, T=150, D=288, E=320)
LATENT = subject(attentions.latent, "wide 64x64", S=40, T=150, D=288)
WAVES = subject(attentions.long_rows, "wide 32x32", "hip:gfx90a", S=40, T=150, D=288, E=320)

MUTATIONS: tuple[Mutation, ...] = (
    # ---- warps that share rows
    mutation("the largest logit of one warp", "warps that share rows take pivots of their own", ROWS,
             r"w < beside; \+\+w\) peaks", "w < 1; ++w) peaks"),
    mutation("largest logits of other rows", "where a row's warps tell them", ROWS,
             r"told\[w \* tile_rows \+ warp_row", "told[w * tile_rows"),
    mutation("no barrier before largest logits", "they are read before all warps told theirs", ROWS,
             r"(= peaks\[r\];\n +\}\n) +__syncthreads\(\);\n", r"\1"),
    mutation("no barrier before weights", "they are read before all warps put theirs", ROWS,
             r"(rounded_pair\([^\n]*\n +\}\n +\}\n) +__syncthreads\(\);\n", r"\1"),
    mutation("the sum of one warp", "of those that share a row", ROWS,
             r"w < beside; \+\+w\) sum \+=", "w < 1; ++w) sum +="),
    mutation("no barrier before sums of exponentials", "they are added before all warps told theirs", ROWS,
             r"(= summed\[r\];\n +\}\n) +__syncthreads\(\);\n", r"\1"),
    mutation("scores of the first warp's keys", "warps make the same scores", ROWS,
             r"\(warp_key \+ lane % 8", "(lane % 8"),
    mutation("keys' numbers of the first warp", "a mask is that of other keys", ROWS,
             r"key0 = tile_key \+ warp_key", "key0 = tile_key"),
    mutation("weights put in the first warp's place", "those of other keys are lost", ROWS,
             r"weights_pitch \+ warp_key \+ lane", "weights_pitch + lane"),
    mutation("weights of other rows", "all warps take those of the first", ROWS,
             r"weights_at \+ \(warp_row \+ lane % 16\)", "weights_at + (lane % 16)"),
    mutation("columns of the first warp", "warps multiply the same columns", ROWS,
             r"v_pitch \+ warp_col \+ lane", "v_pitch + lane"),
    mutation("a fragment of weights once more", "weights of other keys", ROWS,
             r"weights_lane \+ n \* 32", "weights_lane"),
    mutation("the product is not rescaled", "what was summed keeps an older maximum", ROWS,
             r"_sums\[d\]\[i\] \*= shrinks\[i / 2\]", "_sums[d][i] *= 1.0f"),
    # ---- tiles
    mutation("keys beyond the last are seen", "a ragged tile's zeros are exponentiated", LATENT,
             r"key0 \+ warp_keys <= keys", "key0 <= keys"),
    mutation("no barrier before a tile", "warps read what others have not brought yet", ROWS,
             r"(wait_copies<0>\(\);\n) +__syncthreads\(\);\n( +if \(tile_key)", r"\1\2"),
    mutation("the next tile in this one's place", "a tile is overwritten while it is read", ROWS,
             r"\(tile \+ 1\) % 2", "tile % 2"),
    mutation("values behind the keys", "where they would be if they were not their columns", LATENT,
             r"(k_values|k)_at = 0,", r"\1_at = 16,"),
    # ---- behind
    mutation("largest logits of the first row alone", "warps leave theirs where others do", ROWS,
             r"row_largest\[warp_row \+ lane / 4 \+ r \* 8\]", "row_largest[lane / 4 + r * 8]"),
    mutation("sums are read too early", "no barrier behind them", ROWS,
             r"(= \w+_sums\[d\]\[i\];\n +\}\n +\}\n) +__syncthreads\(\);\n", r"\1"),
    mutation("columns overwritten before they are read", "no barrier behind some columns of sums", ROWS,
             r"( +\}\n +\}\n) +__syncthreads\(\);\n(  \}\n\})", r"\1\2"),
    mutation("the same columns each time", "sums are those of the first columns", ROWS,
             r"i % 2 - first_col;", "i % 2;"),
    # ---- HIP
    mutation("HIP: values across", "a key's neighbouring columns for keys below each other", WAVES,
             r"from\[i \* Pitch\]", "from[i]"),
    mutation("HIP: queries of another row", "lanes of the warps below take the first one's", WAVES,
             r"own_row < rows_here \? own_row", "own_row < rows_here ? lane % 16"),
    mutation("HIP: queries beyond the last are read", "memory behind the operand", WAVES,
             r"own_row < rows_here \? own_row : rows_here - 1", "own_row"),
    mutation("HIP: overwritten before it is read", "no barrier behind a tile", WAVES,
             r"(, 0, 0, 0\);\n +\}\n +\}\n) +__syncthreads\(\);\n", r"\1"),
)  # fmt: skip
