"""Slots sorted by the group that each of them names, as tokens of a mixture by their experts."""

from __future__ import annotations

from fusegen.errors import SpecError
from fusegen.language.axes import LAST, reduce
from fusegen.language.elementwise import col_index, row_index, where
from fusegen.language.gathering import need_whole_numbers
from fusegen.language.rearranging import broadcast, rearrange
from fusegen.language.trace import Value, caller, composite
from fusegen.language.types import Dim, Size, shape_text

BEHIND_ALL = 2**31 - 1


@composite
def sort_by_group(ids: Value, groups: Size) -> tuple[Value, Value, Value]:
    """Slots in the order of their groups, where each group ends, and where each slot went: `order, ends, places =
    F.sort_by_group(ids, E)`, all i32.

    ids [T, 8] names a group for each of T * 8 slots, or ids [S] for each of S. `order` [T * 8] are the slots by their
    groups, those of one group in their own order; so slot s is of token s // 8. `ends` [E] says behind which of them
    each group ends, as F.grouped_matmul takes it. `places` has ids' shape and says where in `order` each slot is. Slots
    whose id is no group, such as -1, lie behind the last end.

    A slot's place is the number of those before it, by comparing all with all: for the thousands of slots of tokens
    that are decoded, not for a million. The number of slots is a constant of the kernels. No float is added, and
    nothing depends on the order of threads. Raises SpecError for ids that are no i32 of one or two axes.
    """
    if not isinstance(ids, Value):
        raise SpecError(f"sort_by_group: the ids are {ids!r:.80}, not a traced value", caller())
    need_whole_numbers("sort_by_group", "ids", ids)
    if len(ids.shape) not in (1, 2):
        raise SpecError(f"sort_by_group: found ids {shape_text(ids.shape)}, wanted [T, 8] or [S]", caller())
    if isinstance(groups, bool) or not isinstance(groups, int | Dim) or (isinstance(groups, int) and groups < 1):
        raise SpecError(f"sort_by_group: groups is {groups!r}; it is a number of at least 1, or a dim", caller())
    slots = ids if len(ids.shape) == 1 else rearrange(ids, "t k -> (t k)")
    named = where(slots < 0, BEHIND_ALL, slots)
    count = slots.shape[0]
    number = row_index(broadcast(named, (groups, count)))
    upto = reduce("sum", where(named <= number, 1, 0), LAST)
    ends = upto[:, 0]
    slot, other = row_index(broadcast(named, (count, count))), col_index(named)
    own = named[:, None]
    ahead = (named < own) | ((named == own) & (other < slot))
    before_it = reduce("sum", where(ahead, 1, 0), LAST)
    places = before_it[:, 0]
    slot_there = reduce("sum", where(places == slot, other, 0), LAST)
    order = slot_there[:, 0]
    return order, ends, places if len(ids.shape) == 1 else rearrange(places, "(t k) -> t k", k=ids.shape[1])
