"""Scales by blocks of what a slice of 8-bit floats is multiplied to: how they come to those who multiply, by wgmma.

Sums of a slice are scaled in registers, by a scale for each row and one for each 128 columns. Two warps of the producer
copy them to shared memory beside the slice, 4 bytes each (cp.async), and tell its mbarrier. Where those who multiply
asked memory for their own, one slice ahead, these loads and their addresses took the tensor cores' time: cycles of a
slice on one H200, of K = 7168, at 1.6 GHz,

                                     128 x 192    256 x 128
    loaded by those who multiply       1039         1325
    no scales                           885         1218
    none, and places are constants      834         1109
    tensor cores                        768         1024

us of products, in registers before, of the best tile, and now (one run each on the same H200, medians of 15, cold L2):

    4096 x 7168 x 16384                 720          680      1415 TFLOP/s
    4096 x 24576 x 1536                 263          246
    8192 x 4096 x 7168                  364          344
    512 x 4096 x 7168                    31.6         30.5
    128 x 7168 x 2048                    12.3         11.9
    64 x 7168 x 16384                    45.4         43.9
    64 x 24576 x 1536                    20.6         19.1

Scales of a slice are read once its products have been asked for: of 8 groups of 1024 rows, K = 7168, a slice of
128 x 256 takes 1132 cycles so, and 1159 where they are read before. Consumers that took turns, so that one's sums were
promoted while the other one's products ran, took 0.98 to 1.10 of the time without turns in 99 pairs of kernels, 1.02 in
the mean, here and where rows and columns are scaled. So they take none. Left factors that are read into registers once
for both halves of 128 x 256 took 6 to 12 % more, and consumers half a slice apart no less (one H200, 2026-12-01).
"""

from __future__ import annotations

from fusegen.language.block_products import BLOCK

WARPS = 2  # that copy scales
FEW_SLOTS, MOST_ROWS = 2, 128  # slices whose scales tiles of more rows have room for, where others have all of theirs


def blocks_across(width: int) -> int:
    """How many scales a row of so many columns of a product has: of blocks of 128, or of each half of one where tiles
    begin within blocks."""
    return 1 if BLOCK % width == 0 else width // BLOCK if width % BLOCK == 0 else width // (BLOCK // 2)


def scale_slots(rows: int, stages: int) -> int:
    """Slices whose scales are in shared memory at a time, of tiles of so many rows whose ring has so many slices."""
    return FEW_SLOTS if rows > MOST_ROWS else stages


def slice_scales(held_rows: int, cols: int) -> int:
    """Room for the scales of a slice, of its rows and of its columns, in whole vectors of four."""
    return held_rows + -(-cols // (BLOCK // 2) // 4) * 4


def scale_bytes(rows: int, held_rows: int, cols: int, stages: int) -> int:
    """Of all scales in shared memory."""
    return 4 * scale_slots(rows, stages) * slice_scales(held_rows, cols)
