"""Boxes of an op graph: none over another, each below what it reads, and all within the picture."""

from __future__ import annotations

import itertools
import random

import pytest

from fusegen.reporting.items import picture
from fusegen.reporting.layout import HEIGHT, drawing
from fusegen.reporting.state import Item
from tests.specs import SHIPPED


def check(items: tuple[Item, ...]) -> None:
    made = drawing(items)
    assert made is not None
    assert len(made.boxes) == len(items)
    for box in made.boxes:
        assert box.x >= 0
        assert box.x + box.width <= made.width
        assert 0 <= box.y <= made.height - HEIGHT
    for one, other in itertools.combinations(made.boxes, 2):
        apart = one.x + one.width < other.x or other.x + other.width < one.x
        assert apart or one.y != other.y, f"{one.title} and {other.title} overlap"
    assert len(made.edges) == sum(len(item.reads) for item in items)
    for source, target, path in made.edges:
        assert made.boxes[source].y < made.boxes[target].y
        assert "nan" not in path


@pytest.mark.parametrize(
    "name", ["copy", "bias_gelu_residual_ln", "attention", "mlp", "decoder_layer", "groupnorm_silu"]
)
def test_graphs_of_specs(name: str) -> None:
    check(picture(SHIPPED[name].graph, None).items)


@pytest.mark.parametrize("seed", range(20))
def test_graphs_of_any_shape(seed: int) -> None:
    draw = random.Random(seed)
    items: list[Item] = []
    for place in range(draw.randrange(1, 40)):
        reads = tuple(sorted(draw.sample(range(place), min(place, draw.randrange(4)))))
        kind = "operator" if reads else "operand"
        name = "x" * draw.randrange(1, 60)
        items.append(Item(kind, name, name, "f32[M]", "", "", 0, reads, tuple(range(draw.randrange(3))), ()))
    check(tuple(items))


def test_what_nobody_could_read_is_not_drawn() -> None:
    items = [
        Item("operator", "x", "x", "f32[M]", "", "", 0, tuple(range(max(0, at - 40), at)), (), ()) for at in range(900)
    ]
    assert drawing(items) is None


def test_nothing_to_draw() -> None:
    check(())
