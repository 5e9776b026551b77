"""Deliberately broken kernels of attention on Hopper: the edits of tests/mutations.py, for their template."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen import Chain
from fusegen.planner import CONTIGUOUS
from fusegen.planner.model import Layout, Source
from tests.emitting.test_attention_wgmma import capped, causal, source
from tests.free_attentions import retained
from tests.mutations import Mutation


@dataclass(frozen=True, eq=False)  # a chain has no hash
class HopperSubject:
    """The plan of that tile for a chain at its own sizes."""

    spec: Chain
    tile: str
    target: str = "cuda:h200"

    @property
    def chain(self) -> str:
        return self.spec.name

    def source(self, layout: Layout = CONTIGUOUS) -> Source:
        return source(self.spec, self.tile, layout)


TURNS = HopperSubject(causal, "128x128")
RETAINED = HopperSubject(retained.at(S=300), "64x128")
ALONE = HopperSubject(causal, "64x128")
CAPPED = HopperSubject(capped, "64x128")


def mutation(name: str, models: str, of: HopperSubject, pattern: str, replacement: str) -> Mutation:
    return Mutation(name, models, of, ((pattern, replacement),))  # type: ignore[arg-type]


MUTATIONS = (
    # ---- what is carried
    mutation("the product is not rescaled", "what was summed keeps an older maximum", ALONE,
             r"_sums\[i\] \*= shrinks\[i / 2 % 2\]", "_sums[i] *= 1.0f"),
    mutation("the sum is not rescaled", "sums of exponentials keep an older maximum", ALONE,
             r"summed\[r\] \*= shrinks\[r\];", ""),
    mutation("weights of the tile before", "they are rounded for the first tile alone", ALONE,
             r"(values_empty \+ 8 \* \(\(tile - 1\) % stages\)\);\n\s*)round_weights\(\);", r"\1"),
    mutation("the largest logit without its scale", "it stands in the logsumexp as the score that it is of", ALONE,
             r"largest\[r\] \* 0\.125f", "largest[r]"),
    mutation("one row's pivot for both", "a thread has two rows", ALONE,
             r"-pivots\[i / 2 % 2\]", "-pivots[0]"),
    mutation("one chain of additions is lost", "every other column is not summed", ALONE,
             r"added\[r\]\[0\] \+ added\[r\]\[1\]", "added[r][0]"),
    mutation("one chain of largest logits is lost", "a power of 2 of what is larger overflows", ALONE,
             r"float peak = larger\(peaks\[r\]\[0\], peaks\[r\]\[1\]\)", "float peak = peaks[r][0]"),
    mutation("one score's reach for all", "the last score decides", CAPPED,
             r"reach = fmaxf\(reach, ", "reach = fmaxf(0.0f, "),
    mutation("sums keep their size where a pivot is raised", "they are of an older one", TURNS,
             r"if \(raised\) \{(\s*#pragma unroll\s*for \(int i = 0; i < \d+; \+\+i\) e_times_v)", r"if (false) {\1"),
    mutation("pivots are never raised", "weights are too large", TURNS,
             r"raised = !__all_sync\(0xffffffffu, near_pivots\)", "raised = false"),
    # ---- tiles
    mutation("the last tile is skipped", "one tile of keys too few", ALONE,
             r"\(end_key - first_key \+ tile_keys - 1\) / tile_keys", "(end_key - first_key) / tile_keys"),
    mutation("a mask one key off at a tile's edge", "no test where one key is masked", ALONE,
             r"key0 \+ tile_keys <= free_end", "key0 + tile_keys <= free_end + 1"),
    mutation("keys of the other stage", "scores of a tile that is not there yet", ALONE,
             r"keys_lie \+ stage \*", "keys_lie + (stage ^ 1) *"),
    mutation("half a step along the values", "16 keys are two times 8 lines", ALONE,
             r"k \* \(16 \* line_bytes / 16\)", "k * (8 * line_bytes / 16)"),
    # ---- without a softmax
    mutation("no mask where an end cuts", "weights of later keys", RETAINED, r"ge \? (\w+) : 0\.0f", r"\1"),
    mutation("one row's number for both", "a thread has two rows", RETAINED,
             r"row_number_here\[i / 2 % 2\]", "row_number_here[0]"),
    mutation("only the first tile's weights", "they are rounded for the first tile alone", RETAINED,
             r"(values_empty \+ 8 \* \(\(tile - 1\) % stages\)\);\n\s*)round_weights\(\);", r"\1"),
    # ---- waits
    mutation("no wait for the values", "the products read what is still coming", ALONE,
             r"wait_at\(values_full[^\n]*", ""),
    mutation("no wait for the keys", "the products read what is still coming", ALONE,
             r"wait_at\(keys_full[^\n]*", ""),
    mutation("no wait for an empty place of keys", "a tile overwrites one that is being read", ALONE,
             r"wait_at\(keys_empty[^\n]*", ""),
    mutation("values let go too early", "their place is given back while they are multiplied", ALONE,
             r"multiply_keys\(tile\);\n(\s*)multiply_values\(tile - 1\);",
             r"multiply_keys(tile);\n\1multiply_values(tile - 1);\n"
             r"\1if (lane == 0) arrive_at(values_empty + 8 * ((tile - 1) % stages));",
             ),
    mutation("sums before the products are done", "the last wait is left out", ALONE,
             r"(multiply_values\(tiles - 1\);\n)\s*asm volatile\(\"wgmma.wait_group.sync.aligned 0;\"[^\n]*", r"\1"),
    mutation("a turn is not passed", "the other consumer waits for ever", TURNS,
             r"multiply_values\(tile - 1\);\n(\s*)pass_turn\(\);", r"multiply_values(tile - 1);\n"),
    mutation("no fence before the store", "the copy engine reads what is not there yet", ALONE,
             r"asm volatile\(\"fence\.proxy\.async[^\n]*", ""),
)  # fmt: skip
