"""Slots sorted by the group that each of them names, as tokens of a mixture by their experts."""

from __future__ import annotations

from fusegen.errors import SpecError
from fusegen.language.gathering import need_whole_numbers
from fusegen.language.graph import Node
from fusegen.language.op_table import OPS
from fusegen.language.rearranging import rearrange
from fusegen.language.trace import Value, caller, current
from fusegen.language.types import Dim, Size, i32, shape_text


def sort_by_group(ids: Value, groups: Size) -> tuple[Value, Value, Value]:
    """Slots in the order of their groups, where each group ends, and where each slot went: `order, ends, places =
    F.sort_by_group(ids, E)`, all i32.

    ids [T, 8] names a group for each of T * 8 slots, or ids [S] for each of S. `order` [T * 8] are the slots by their
    groups, those of one group in their own order; so slot s is of token s // 8. `ends` [E] says behind which of them
    each group ends, as F.grouped_matmul takes it. `places` has ids' shape and says where in `order` each slot is. Slots
    whose id is no group, such as -1 or E, lie behind the last end, in their own order.

    One kernel counts and places all slots. How many there are is a constant of it. No float is added, and nothing
    depends on the order of threads. Raises SpecError for ids that are no i32 of one or two axes.
    """
    if not isinstance(ids, Value):
        raise SpecError(f"sort_by_group: the ids are {ids!r:.80}, not a traced value", caller())
    need_whole_numbers("sort_by_group", "ids", ids)
    if len(ids.shape) not in (1, 2):
        raise SpecError(f"sort_by_group: found ids {shape_text(ids.shape)}, wanted [T, 8] or [S]", caller())
    if isinstance(groups, bool) or not isinstance(groups, int | Dim) or (isinstance(groups, int) and groups < 1):
        raise SpecError(f"sort_by_group: groups is {groups!r}; it is a number of at least 1, or a dim", caller())
    with current().operator("sort_by_group") as operator:
        slots = (ids if len(ids.shape) == 1 else rearrange(ids, "t k -> (t k)")).node
        ends = Node(OPS["group_ends"], (slots,), (groups,), i32, operator, text=ends_text(groups))
        found = (
            Value(Node(OPS[op], (slots, ends), slots.shape, i32, operator)) for op in ("slot_order", "slot_places")
        )
        order, places = found
        if len(ids.shape) == 2:
            places = rearrange(places, "(t k) -> t k", k=ids.shape[1])
    return order, Value(ends), places


def ends_text(groups: Size) -> str:
    """What `ends` means, in numpy: so many groups."""
    return f"ends_of_groups({{0}}, {groups})"
