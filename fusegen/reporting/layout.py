"""Where the boxes of an op graph are drawn: in layers from the top down, each below all that it reads.

Layers as Sugiyama, Tagawa and Toda have them (1981): long edges get a place in every layer that they cross, and a layer
is put in the order of the middle of what each of its boxes is joined to, up and down a few times. An operand lies just
above the first operator that reads it. Lengths are CSS pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusegen.reporting.state import Item

LETTER, PADDING, HEIGHT, BETWEEN, GAP = 7.3, 12.0, 42.0, 34.0, 18.0
MARGIN, BADGE = 4.0, 22.0
LONGEST = 34  # letters of a line in a box
SWEEPS = 8
MOST_PLACES = 20_000  # boxes, and corners of long edges: beyond that nobody could read it


@dataclass(frozen=True, slots=True)
class Box:
    """An item's box, by its upper left corner."""

    item: int
    x: float
    y: float
    width: float
    title: str
    under: str

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(frozen=True, slots=True)
class Drawing:
    """The boxes, and a path of SVG for each edge (from, to, path)."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int, str], ...]


def drawing(items: Sequence[Item]) -> Drawing | None:
    """The graph of these items, which come after all that they read; None where that is too large to be drawn."""
    layers = layers_of(items)
    if (
        len(items) + sum(layers[place] - layers[read] for place, i in enumerate(items) for read in i.reads)
        > MOST_PLACES
    ):
        return None
    rows: list[list[int]] = [[] for _ in range(max(layers, default=0) + 1)]
    for place, layer in enumerate(layers):
        rows[layer].append(place)
    joined: dict[int, list[int]] = {place: [] for place in range(len(items))}  # upwards; what is past them is no box
    chains = []
    for place, item in enumerate(items):
        for read in item.reads:
            path = [read]
            for layer in range(layers[read] + 1, layers[place]):
                path.append(corner := len(joined))
                joined[corner] = [path[-2]]
                rows[layer].append(corner)
            joined[place].append(path[-1])
            chains.append([*path, place])
    ordered(rows, joined)
    widths = {place: width_of(item) for place, item in enumerate(items)}
    centres = placed(rows, joined, widths)
    left = min((centres[p] - widths.get(p, 0) / 2 for p in centres), default=0) - MARGIN
    right = max((centres[p] + widths.get(p, 0) / 2 for p in centres), default=0) + MARGIN
    heights = {place: MARGIN + number * (HEIGHT + BETWEEN) for number, row in enumerate(rows) for place in row}
    boxes = tuple(
        Box(place, round(centres[place] - left - widths[place] / 2, 1), heights[place], widths[place], *texts(item))
        for place, item in enumerate(items)
    )
    edges = tuple((path[0], path[-1], curve(path, centres, heights, left, len(items))) for path in chains)
    return Drawing(round(right - left, 1), len(rows) * (HEIGHT + BETWEEN) - BETWEEN + 2 * MARGIN, boxes, edges)


def texts(item: Item) -> tuple[str, str]:
    """What stands in a box: `h = add`, and below it the type."""
    plain = item.kind == "operand" or item.value.rstrip("_") == item.name
    title = item.name if plain else f"{item.value} = {item.name}"
    return clipped(title), clipped(item.stored or item.type)


def clipped(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def width_of(item: Item) -> float:
    return max(map(len, texts(item))) * LETTER + 2 * PADDING + (BADGE * len(item.kernels) if item.kernels else 0)


def layers_of(items: Sequence[Item]) -> list[int]:
    """Operators below all that they read, operands just above the first that reads them."""
    layers = [0] * len(items)
    for place, item in enumerate(items):
        if item.reads:
            layers[place] = 1 + max(layers[read] for read in item.reads)
    readers: dict[int, list[int]] = {}
    for place, item in enumerate(items):
        for read in item.reads:
            readers.setdefault(read, []).append(layers[place])
    for place, item in enumerate(items):
        if item.kind == "operand" and place in readers:
            layers[place] = min(readers[place]) - 1
    return layers


def ordered(rows: list[list[int]], joined: Mapping[int, Sequence[int]]) -> None:
    """Put each row into the order of the middles of what its boxes are joined to."""
    below: dict[int, list[int]] = {place: [] for place in joined}
    for place, above in joined.items():
        for other in above:
            below[other].append(place)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        sides = joined if down else below
        sequence = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
        for number in sequence:
            nearby = {place: at for at, place in enumerate(rows[number - 1 if down else number + 1])}
            own = {place: at for at, place in enumerate(rows[number])}
            middles = {place: mean([nearby[o] for o in sides[place] if o in nearby], own[place]) for place in own}
            rows[number].sort(key=lambda place: (middles[place], own[place]))


def mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def placed(
    rows: Sequence[Sequence[int]], joined: Mapping[int, Sequence[int]], widths: Mapping[int, float]
) -> dict[int, float]:  # fmt: skip
    """The middle of each box: as near to the middle of what it is joined to as its neighbours let it be."""
    below: dict[int, list[int]] = {place: [] for place in joined}
    for place, above in joined.items():
        for other in above:
            below[other].append(place)
    centres: dict[int, float] = {}
    for row in rows:
        at = 0.0
        for place in row:
            centres[place] = at + widths.get(place, 0) / 2
            at += widths.get(place, 0) + GAP
        shift = (at - GAP) / 2
        centres.update({place: centres[place] - shift for place in row})
    for sweep in range(2 * SWEEPS):
        sides = joined if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = [mean([centres[other] for other in sides[place]], centres[place]) for place in row]
            spread(row, wanted, centres, widths)
    return centres


def spread(
    row: Sequence[int], wanted: Sequence[float], centres: dict[int, float], widths: Mapping[int, float]
) -> None:  # fmt: skip
    """Put a row's boxes where they are wanted; those that would overlap share the way that they are off."""
    groups: list[tuple[list[int], list[float], float]] = []  # places, their offsets from the first, where that is

    def first_of(places: Sequence[int], offsets: Sequence[float]) -> float:
        return mean([wish[place] - offset for place, offset in zip(places, offsets, strict=True)], 0.0)

    wish = dict(zip(row, wanted, strict=True))
    for place in row:
        group: tuple[list[int], list[float], float] = ([place], [0.0], wish[place])
        while groups:
            places, offsets, at = groups[-1]
            apart = offsets[-1] + (widths.get(places[-1], 0) + widths.get(group[0][0], 0)) / 2 + GAP
            if at + apart <= group[2]:
                break
            groups.pop()
            both, moved = [*places, *group[0]], [*offsets, *(apart + offset for offset in group[1])]
            group = (both, moved, first_of(both, moved))
        groups.append(group)
    for places, offsets, at in groups:
        centres.update({place: at + offset for place, offset in zip(places, offsets, strict=True)})


def curve(
    path: Sequence[int], centres: Mapping[int, float], heights: Mapping[int, float], left: float, boxes: int
) -> str:  # fmt: skip
    """From the foot of a box to the head of another, straight through the rows between them."""
    points = [(centres[place] - left, heights[place], place < boxes) for place in path]
    x, y, _ = points[0]
    y += HEIGHT
    words = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y, box in points[1:]:
        half = (to_y - y) / 2
        words.append(f"C{x:.1f} {y + half:.1f} {to_x:.1f} {to_y - half:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
        if not box:
            y = to_y + HEIGHT
            words.append(f"V{y:.1f}")
    return "".join(words)
