"""Deliberately broken kernels of written weights: the edits of tests/mutations.py, for their templates."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen import Chain
from fusegen.emitting.rendering import render
from fusegen.planner import CONTIGUOUS
from fusegen.planner.model import Layout, Source
from tests import written
from tests.mutations import Mutation
from tests.written import plan_for


@dataclass(frozen=True, eq=False)  # a chain has no hash
class WeightsSubject:
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


def subject(spec: Chain, tile: str, target: str, **sizes: int) -> WeightsSubject:
    return WeightsSubject(spec, tile, tuple(sizes.items()), target)


CAUSAL = subject(written.causal, "weights 32x64", "cuda:a100", S=100, T=200, D=32)
WINDOW = subject(written.window, "weights 32x64", "cuda:a100", S=150, T=200)
SINK = subject(written.sink, "weights 32x64", "cuda:a100")
RAGGED = subject(written.document, "weights 32x64", "cuda:a100")
WAVES = subject(written.causal, "weights 32x32", "hip:gfx90a", S=100, T=200, D=32)
HOPPER = subject(written.causal, "64x64 3", "cuda:h200", S=140, T=328)
HOPPER_WINDOW = subject(written.window, "64x64 3", "cuda:h200", S=200, T=328)


def mutation(name: str, models: str, of: WeightsSubject, pattern: str, replacement: str) -> Mutation:
    return Mutation(name, models, of, ((pattern, replacement),))  # type: ignore[arg-type]


MUTATIONS: tuple[Mutation, ...] = (
    # ---- what is carried
    mutation("the sum is not rescaled", "sums of exponentials keep an older maximum", CAUSAL,
             r"summed\[r\] \*= shrinks\[r\];", ""),
    mutation("weights against the tile's pivot", "the second pass takes a pivot before the last", CAUSAL,
             r"  pivots\[r\] = pivot;\n", "  if (tile == 0) pivots[r] = pivot;\n"),
    mutation("the sum of one lane", "of four lanes that share a row", CAUSAL,
             r"for \(int step = 1; step < 4; step \*= 2\) summed", "for (int step = 1; step < 2; step *= 2) summed"),
    mutation("sums stay at the largest logit", "they are not brought to the chain's own pivot", SINK,
             r"summed\[r\] \* brought", "summed[r]"),
    mutation("weights stay at the largest logit", "exponentials are not of the chain's own pivot", SINK,
             r"pivots\[r\] = \w+ \* 1\.44269504f;", ""),
    # ---- tiles
    mutation("a tile skipped too early", "the last tile that the last row needs is left out", CAUSAL,
             r"\(end_key - first_key \+ tile_keys - 1\) / tile_keys", "(end_key - first_key) / tile_keys"),
    mutation("the ends of the first row alone", "rows below need more keys", CAUSAL,
             r"most\(top_ends\.end, last_ends\.end\)", "top_ends.end"),
    mutation("free one key too far", "the tile that holds the diagonal's last key is not tested", CAUSAL,
             r"key0 \+ tile_keys <= free_end", "key0 + tile_keys <= free_end + tile_keys"),
    mutation("a mask one off at its edge", "each row sees the key behind its last", CAUSAL,
             r"col_index <= last\w*", r"\g<0> + 1"),
    mutation("keys beyond the last are seen", "a ragged tile's zeros are exponentiated", CAUSAL,
             r"col_index < keys \? (\w+) : -INFINITY", r"\1"),
    mutation("the second pass begins anew", "its keys are those of the first tile throughout", CAUSAL,
             r"\(tile < tiles \? tile : tile - tiles\)", "(tile < tiles ? tile : 0)"),
    mutation("nothing behind the last tile", "memory is left as it was", CAUSAL,
             r"for \(int col = last_key [^\n]*", ""),
    mutation("nothing before the first tile", "memory is left as it was", WINDOW,
             r"for \(int col = lane % 4 \* 8; col < first_key; [^\n]*", ""),
    mutation("zeros in rows of NaN", "what a mask leaves out is 0 whatever the row holds", CAUSAL,
             r"(\w+_masked\[r\]) = \w+;", r"\1 = 0.0f;"),
    mutation("rows beyond the last are written", "memory behind the output", CAUSAL,
             r"const bool inside = warp_row [^\n]*", "const bool inside = true;"),
    mutation("columns beyond the last are written", "the next row's first", RAGGED,
             r"inside && key0[^)]*< keys", "inside"),
    # ---- on the way
    mutation("a copy is not waited for", "a tile is multiplied before it lands", CAUSAL,
             r"(take_tile = \[&\]\(int tile\) \{\n +)wait_copies<0>\(\);", r"\1"),
    mutation("no barrier before a tile", "warps read what others have not brought yet", CAUSAL,
             r"(take_tile = \[&\]\(int tile\) \{\n +wait_copies<0>\(\);\n) +__syncthreads\(\);\n", r"\1"),
    mutation("the next tile in this one's place", "a tile is overwritten while it is read", CAUSAL,
             r"\(tile \+ 1\) % 2\)", "tile % 2)"),
    mutation("no tile for the second pass", "its first one is not asked for", CAUSAL,
             r"tile \+ 1 < 2 \* tiles", "tile + 1 < tiles || (tile >= tiles && tile + 1 < 2 * tiles)"),
    # ---- HIP
    mutation("HIP: the maximum of half a row", "lanes that share a row take pivots of their own", WAVES,
             r"for \(int step = 16; step < 64; step \*= 2\) peaks", "for (int step = 16; step < 32; step *= 2) peaks"),
    mutation("HIP: overwritten before it is read", "no barrier behind a tile", WAVES,
             r"(pivots\[0\]\)\);\n +\}\n) +__syncthreads\(\);\n", r"\1"),
    # ---- Hopper
    mutation("Hopper: the sum is not rescaled", "sums of exponentials keep an older maximum", HOPPER,
             r"summed\[r\] \*= largest\[r\] == -INFINITY \? 0\.0f : power_of_2\(pivots\[r\] - pivot\);", ""),
    mutation("Hopper: lanes' sums as they are", "they were carried against pivots of their own", HOPPER,
             r"summed\[r\] \* power_of_2\(pivots\[r\] - pivot\)", "summed[r]"),
    mutation("Hopper: the largest logit without its scale", "in the logsumexp it is the score that it is of", HOPPER,
             r"largest\[r\] \* 0\.125f", "largest[r]"),
    mutation("Hopper: one row's pivot for both", "a thread has two rows", HOPPER,
             r"-pivots\[i / 2 % 2\]", "-pivots[0]"),
    mutation("Hopper: one chain of additions is lost", "every other column is not summed", HOPPER,
             r"summed\[r\] \+= others\[r\]", "summed[r] += 0.0f"),
    mutation("Hopper: the last tile is skipped", "one tile of keys too few", HOPPER,
             r"\(end_key - first_key \+ tile_keys - 1\) / tile_keys", "(end_key - first_key) / tile_keys"),
    mutation("Hopper: a mask one key off at a tile's edge", "no test where one key is masked", HOPPER,
             r"key0 \+ tile_keys <= free_end", "key0 + tile_keys <= free_end + 1"),
    mutation("Hopper: keys of the other stage", "scores of a tile that is not there yet", HOPPER,
             r"keys_lie \+ stage \*", "keys_lie + (stage ^ 1) *"),
    mutation("Hopper: no wait for the keys", "the products read what is still coming", HOPPER,
             r"wait_at\(keys_full[^\n]*", ""),
    mutation("Hopper: no wait for an empty place of keys", "a tile overwrites one that is being read", HOPPER,
             r"wait_at\(keys_empty[^\n]*", ""),
    mutation("Hopper: keys let go too early", "their place is given back while they are multiplied", HOPPER,
             r"(asm volatile\(\"wgmma\.commit_group[^\n]*)", r"\1 if (lane == 0) arrive_at(keys_empty + 8 * stage);"),
    mutation("Hopper: scores before the products are done", "the wait is left out", HOPPER,
             r"asm volatile\(\"wgmma\.wait_group[^\n]*", ""),
    mutation("Hopper: no fence before the store", "the copy engine reads what is not there yet", HOPPER,
             r"(store_matrices\([^;]*;\n +\}\n +\}\n) +asm volatile\(\"fence\.proxy\.async[^\n]*", r"\1"),
    mutation("Hopper: staged before the last box was read", "the copy engine still reads what is overwritten", HOPPER,
             r"if \(lane == 0\) wait_stores<0>\(\);  // the last tile's[^\n]*", ""),
    mutation("Hopper: no zeros behind the last tile", "memory is left as it was", HOPPER,
             r"(int zero_rows = 0;[\s\S]*?)col < keys;", r"\1col < last_key;"),
    mutation("Hopper: no zeros before the first tile", "memory is left as it was", HOPPER_WINDOW,
             r"col < first_key; col", "col < 0; col"),
    mutation("Hopper: zeros that are none", "no fence behind them", HOPPER,
             r"own_zeros\[i\] = 0;", "own_zeros[i] = i;"),
    mutation("Hopper: the copy engine sees no zeros", "the fence behind them is left out", HOPPER,
             r"(own_zeros\[i\] = 0;\n) +asm volatile\(\"fence\.proxy\.async[^\n]*", r"\1"),
    mutation("Hopper: rows of zeros left out", "the last of a block's are not stored", HOPPER,
             r"zero_rows < rows_end; zero_rows", "zero_rows < rows_end - 16; zero_rows"),
    mutation("Hopper: zeros in rows of NaN", "what a mask leaves out is 0 whatever the row holds", HOPPER,
             r"__any_sync\(0xffffffffu, [^\n]*\)\) \{", "false) {"),
    mutation("Hopper: NaN before zeros are stored", "zeros may come last", HOPPER,
             r"wait_at\(zeros_stored, 0\);", ""),
)  # fmt: skip
