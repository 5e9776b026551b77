"""Deliberately broken kernels of latent attention on Hopper: the edits of tests/mutations.py, for their template."""

from __future__ import annotations

from dataclasses import dataclass

from fusegen import Chain
from fusegen.planner import CONTIGUOUS
from fusegen.planner.model import Layout, Source
from tests.emitting.test_attention_wide_wgmma import keys_are_values, source
from tests.mutations import Mutation


@dataclass(frozen=True, eq=False)  # a chain has no hash
class LatentSubject:
    """The rule's plan for a chain at its own sizes."""

    spec: Chain
    target: str = "cuda:h200"

    @property
    def chain(self) -> str:
        return self.spec.name

    def source(self, layout: Layout = CONTIGUOUS) -> Source:
        return source(self.spec, layout)


ROWS = LatentSubject(keys_are_values.at(B=1))


def mutation(name: str, models: str, pattern: str, replacement: str) -> Mutation:
    return Mutation(name, models, ROWS, ((pattern, replacement),))  # type: ignore[arg-type]


MUTATIONS = (
    # ---- what is carried
    mutation("sums are not rescaled by own tiles", "what was summed keeps an older maximum",
             r"shrink_sums\(\);(\n\s*multiply_values)", r"\1"),
    mutation("sums are not rescaled by the other's tiles", "the largest logit of half of the keys",
             r"shrink_sums\(\);(\n\s*\};)", r"\1"),
    mutation("the sum of exponentials is not rescaled by the other's tiles", "it keeps an older maximum",
             r"(told_shrinks\[m\];\n[^\n]*\n\s*)summed\[r\] \*= shrinks\[r\];", r"\1"),
    mutation("the other's largest logit is not taken", "each goes on from its own tiles'",
             r"largest\[r\] = told_largest\[m\];", ""),
    mutation("the largest logit of other rows", "where a warp's rows are told",
             r"(told_largest\[)m\] = largest", r"\1m - warp_row] = largest"),
    mutation("the sum of one consumer", "each has summed every other tile",
             r"summed\[r\] \+= told_summed[^\n]*", ""),
    mutation("no barrier before sums of exponentials", "they are added before the other told its own",
             r"asm volatile\(\"bar.sync 5, 256;\"[^\n]*", ""),
    # ---- tiles
    mutation("weights of the tile before", "they are rounded for the first tile alone",
             r"(for \(int i = 0; i < 16; \+\+i\) weights\[i\] = )(rounded_pair_bf16\(([a-z_]+_sums))",
             r"if (summed[0] < 0.0f) \1\2"),
    mutation("the wrong half of the values", "both consumers multiply the same columns",
             r"half = own \* own_segments", "half = (own ^ 1) * own_segments"),
    mutation("the first half of the values twice", "one half of the columns is the other's",
             r"half = own \* own_segments \* key_segment", "half = 0"),
    mutation("scores of the other's tile", "it may not be there yet",
             r"(keys_lie = [^\n]*)own_tile", r"\1other_tile"),
    mutation("weights of its own tile twice", "the other's are never multiplied",
             r"weights_at \+ \(1 - own\) \* next_weights", "weights_at + own * next_weights"),
    mutation("weights in the lines of the first warp", "rows of other warps are lost",
             r"next_weights \+ \(warp_row \+ lane % 16\)", "next_weights + (lane % 16)"),
    mutation("weights without their swizzle", "a line's pieces lie where wgmma does not look",
             r"\(\(n \+ lane / 16\) \^ lane % 8\)", "(n + lane / 16)"),
    mutation("a mask one key off at a tile's edge", "no test where one key is masked",
             r"key0 \+ tile_keys <= free_end", "key0 + tile_keys <= free_end + 1"),
    mutation("the last tile is skipped", "one tile of keys too few",
             r"\(end_key - first_key \+ tile_keys - 1\) / tile_keys", "(end_key - first_key) / tile_keys"),
    # ---- waits
    mutation("no wait for the keys", "scores read what is still coming",
             r"wait_at\(keys_full \+ 8 \* \(own[^\n]*", ""),
    mutation("no wait for the other's weights", "they are read before they are told",
             r"asm volatile\(\"bar.sync %0, 256;\" :: \"r\"\(2 - own\)[^\n]*", ""),
    mutation("no fence behind the weights", "wgmma reads what is not there yet",
             r"asm volatile\(\"fence\.proxy\.async[^\n]*", ""),
    mutation("no wait for an empty place", "a tile overwrites one that is being read",
             r"wait_at\(keys_empty[^\n]*", ""),
    mutation("no wait for the scores", "they are read while they are made",
             r"asm volatile\(\"wgmma.wait_group.sync.aligned 0;\"[^\n]*(\n\s*weigh)", r"\1"),
    mutation("values of the other's tile let go too early", "their place is given back while they are multiplied",
             r"asm volatile\(\"wgmma.wait_group.sync.aligned 1;\"[^\n]*", ""),
    mutation("values let go too early", "their place is given back while they are multiplied",
             r"asm volatile\(\"wgmma.wait_group.sync.aligned 0;\"[^\n]*((\n[^\n]*){2}\n\s*if \(lane == 0\) arrive_at)",
             r"\1"),
    mutation("sums before the products are done", "the last wait is left out",
             r"(multiply_other\(other\);\n[^\n]*commit_group[^\n]*\n)\s*asm volatile\(\"wgmma.wait_group[^\n]*",
             r"\1"),
)  # fmt: skip
