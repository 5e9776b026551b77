"""In which parts a product's sums over K are made, for those who bound their errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summed:
    """How a product's sums over K are made: as `split_k` sums, each of every so-many-th slice of K, `k` long, in
    ascending order, which are added up at the end. One of everything, unless said otherwise. Of so much of K at a
    time, `scaled`, sums are made by themselves, scaled, and added to the others; 0: of all that there is. The sums of
    each `promote` elements begin at 0, and are added in f32; 0: all of them are added where they are made. Each of the
    `split_k` sums is made as `parts` of them, of every so-many-th `part_k` elements."""

    split_k: int = 1
    k: int = 0
    scaled: int = 0
    promote: int = 0
    parts: int = 1
    part_k: int = 0

    @property
    def shares(self) -> int:
        """Sums that are added up at the end."""
        return self.split_k * self.parts

    def share(self, k: int) -> int:
        """Which of them element k of K goes to."""
        of_block = k // self.k % self.split_k if self.k else 0
        return of_block * self.parts + (k // self.part_k % self.parts if self.part_k else 0)
