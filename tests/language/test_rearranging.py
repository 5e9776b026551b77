"""Views and joins of a chain: their reference text against numpy, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusegen import chain, dims, f32
from fusegen import ops as F
from fusegen.errors import SpecError
from fusegen.language.reference import reference
from fusegen.language.sizes import dims_in
from fusegen.validation.bounds import analyse_nodes

D, H, M, N = dims("D H M N")
SIZES = {"D": 6, "H": 4, "M": 3, "N": 5}
Array = np.ndarray[Any, np.dtype[Any]]


def untyped(value: Any) -> Any:
    """The same, whatever a type checker thinks of it."""
    return value


def traced(body: Callable[..., Any], out: Any, x: Any = f32[M, H * D], **more: Any) -> Any:
    """The chain of one body, its operands annotated."""

    names = ["x", *more]
    scope: dict[str, Any] = {"body": body}
    exec(f"def spec({', '.join(names)}):\n    return body({', '.join(names)})\n", scope)
    spec = scope["spec"]
    spec.__annotations__ = {"x": x, **more, "return": out}
    named = {dim.name for type in (x, *more.values(), out) for dim in dims_in(type.shape)}
    return chain(**{name: size for name, size in SIZES.items() if name in named})(spec)


def array(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


CASES: dict[str, tuple[Callable[[Any], Any], Any, Callable[[Array], Array]]] = {
    "half": (lambda x: x[..., : H * D // 2] * 2, f32[M, H * D // 2], lambda x: x[:, :12] * 2),
    "column": (lambda x: x[:, 3] + 1, f32[M], lambda x: x[:, 3] + 1),
    "pairs": (lambda x: x[:, ::2] - x[:, 1::2], f32[M, H * D // 2], lambda x: x[:, ::2] - x[:, 1::2]),
    "flip": (lambda x: F.flip(x) + x, f32[M, H * D], lambda x: x[:, ::-1] + x),
    "flip rows": (lambda x: F.flip(x, 0), f32[M, H * D], lambda x: x[::-1]),
    "transpose": (lambda x: F.exp(x.T), f32[H * D, M], lambda x: np.exp(x.T)),
    "heads": (
        lambda x: F.rearrange(x, "m (h d) -> h m d", h=H),
        f32[H, M, D],
        lambda x: x.reshape(3, 4, 6).transpose(1, 0, 2),
    ),
    "there and back": (
        lambda x: F.rearrange(F.rearrange(x, "m (h d) -> m h d", d=D), "m h d -> m (h d)"),
        f32[M, H * D],
        lambda x: x,
    ),
    "turned heads": (
        lambda x: F.rearrange(x, "m (h d) -> m (d h)", h=H),
        f32[M, H * D],
        lambda x: x.reshape(3, 4, 6).transpose(0, 2, 1).reshape(3, 24),
    ),
    "dots": (
        lambda x: F.rearrange(x, "... (h d) -> h ... d", h=H),
        f32[H, M, D],
        lambda x: x.reshape(3, 4, 6).transpose(1, 0, 2),
    ),
    "new axis": (lambda x: F.rearrange(x, "m n -> m 1 n"), f32[M, 1, H * D], lambda x: x[:, None]),
    "roll": (lambda x: F.roll(x, 2), f32[M, H * D], lambda x: np.roll(x, 2, -1)),
    "roll back": (lambda x: F.roll(x, -1, axis=0), f32[M, H * D], lambda x: np.roll(x, -1, 0)),
    "swapped halves": (
        lambda x: F.concat([F.split(x, 2)[1], -F.split(x, 2)[0]]),
        f32[M, H * D],
        lambda x: np.concatenate([x[:, 12:], -x[:, :12]], -1),
    ),
    "parts": (
        lambda x: F.concat(F.split(x, [D, 3 * D])[::-1]),
        f32[M, 4 * D],
        lambda x: np.concatenate([x[:, 6:], x[:, :6]], -1),
    ),
    "stack": (lambda x: F.stack([x, F.exp(x)], axis=1), f32[M, 2, H * D], lambda x: np.stack([x, np.exp(x)], 1)),
    "repeat": (lambda x: F.broadcast(x, (2, M, H * D)), f32[2, M, H * D], lambda x: np.broadcast_to(x, (2, 3, 24))),
    "row sums": (lambda x: F.sum(x), f32[M], lambda x: x.sum(-1)),
    "rows of a part": (lambda x: F.sum(x[:, 1:-1]), f32[M, 1], lambda x: x[:, 1:-1].sum(-1, keepdims=True)),
}


@pytest.mark.parametrize("name", [n for n in CASES if n != "parts"])
def test_views_are_numpys(name: str) -> None:
    body, out, wanted = CASES[name]
    made = traced(body, out)
    x = array(3, 24)
    np.testing.assert_allclose(reference(made.graph)(x), wanted(x))
    law = analyse_nodes(made.graph, [x], {})[made.graph.outputs[0].node]
    np.testing.assert_allclose(law.value, wanted(x))
    assert np.broadcast_to(law.error, law.value.shape).shape == wanted(x).shape


def test_parts_of_given_sizes() -> None:
    body, out, wanted = CASES["parts"]
    made = traced(body, out, f32[M, 4 * D])
    np.testing.assert_allclose(reference(made.graph)(array(3, 24)), wanted(array(3, 24)))


def test_errors_go_with_their_elements() -> None:
    made = traced(lambda x: F.concat([F.exp(x[..., :2]), x[..., 2:]]), f32[M, H * D])
    x = array(3, 24)
    law = analyse_nodes(made.graph, [x], {})[made.graph.outputs[0].node]
    assert (law.error[:, :2] > 0).all()
    assert (law.error[:, 2:] == 0).all()


def test_views_hold_at_other_sizes() -> None:
    made = traced(lambda x: x[..., : H * D // 2] * x[..., H * D // 2 :], f32[M, H * D // 2]).at(M=2, H=5, D=4)
    x = array(2, 20)
    np.testing.assert_allclose(reference(made.graph)(x), x[:, :10] * x[:, 10:])
    with pytest.raises(SpecError, match=r"the size D \* H // 2 does not come out even at D=3, H=5"):
        made.at(D=3)
    with pytest.raises(SpecError, match="slice: element 10 of an axis of 4"):
        traced(lambda x: x[:, :11], f32[M, 11]).at(H=1, D=4)


@pytest.mark.parametrize(
    ("halves", "numpy"),
    [
        (lambda x: F.rearrange(x[:, 1:-1], "m (t n) -> m t n", t=2), lambda x: x[:, 1:-1].reshape(3, 2, 3)),
        (lambda x: F.stack(F.split(x[:, 1:-1], 2), 1), lambda x: x[:, 1:-1].reshape(3, 2, 3)),
        (lambda x: F.groups(x[:, 2:], 2).mT, lambda x: x[:, 2:].reshape(3, 3, 2).swapaxes(1, 2)),
    ],
    ids=["rearrange", "split", "groups"],
)
def test_a_part_of_an_axis_is_halved(halves: Callable[[Any], Any], numpy: Callable[[Any], Any]) -> None:
    """N - 2 is no product, and may be even."""
    made = traced(halves, f32[M, 2, D * H // 2 - 1])
    x = array(3, 8)
    np.testing.assert_array_equal(reference(made.at(M=3, D=8, H=1).graph)(x), numpy(x))
    with pytest.raises(SpecError, match=r"the size D \* H // 2 - 1 does not come out even at D=7, H=1"):
        made.at(M=3, D=7, H=1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (lambda x: x[x], "an index that is itself traced"),
        (lambda x: x[..., 0.5], "an index of float"),
        (lambda x: x[..., ::0], "a slice's step is a whole number"),
        (lambda x: x[..., :9][..., :10], "the bound 10 of a slice lies outside of an axis of 9"),
        (lambda x: F.split(x, 0), "an axis of D \\* H has no 0 equal parts"),
        (lambda x: F.split(x, [D, D]), "parts of D \\+ D are 2 \\* D, and the axis has D \\* H"),
        (lambda x: F.split(x, 2, axis=2), "axis=2; there are axes -2 to 1"),
        (lambda x: F.concat([x, x[:, 0]]), "differ in more than axis -1"),
        (lambda x: F.concat(x), "wanted a list of values"),
        (lambda x: F.concat([x, x > 0]), "a mask \\(b8\\) beside numbers"),
        (lambda x: F.stack([x, x[:, :2]]), "differ"),
        (lambda x: F.rearrange(x, "m n"), "is no pattern"),
        (lambda x: F.rearrange(x, "m (h d) -> m h d"), "give the size of h or of d, as in h=8"),
        (lambda x: F.rearrange(x, "m (h d) -> m h", h=H), "d: each axis stands once on both sides"),
        (lambda x: F.rearrange(x, "m n -> n m", k=2), "has no axis 'k'"),
        (lambda x: F.rearrange(x, "m n k -> n m k"), "takes 3 axes"),
        (lambda x: F.broadcast(x, (M, 2)), "does not broadcast"),
        (lambda x: F.flip(untyped(N)), "found N, a dim"),
        (lambda x: x[:, 0].mT, "there are no two axes to swap"),
    ],
)
def test_what_is_refused(body: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        traced(body, f32[M, H * D])
    assert "test_rearranging.py" in str(caught.value)


Step = tuple[Callable[[Any], Any], Callable[[Array], Array]]


@given(st.data())
def test_random_chains_of_views(data: st.DataObject) -> None:
    """Views and joins drawn with hypothesis; numpy itself says what they mean."""
    x = array(4, 6, 8, seed=data.draw(st.integers(0, 99)))
    now, steps = x, []
    for _ in range(data.draw(st.integers(1, 5))):
        step, plainly = drawn_step(data, now)
        now = plainly(now)
        steps.append(step)

    def body(value: Any) -> Any:
        for step in steps:
            value = step(value)
        return value

    made = traced(body, f32[now.shape], f32[4, 6, 8])
    np.testing.assert_allclose(reference(made.graph)(x), now)
    law = analyse_nodes(made.graph, [x], {})[made.graph.outputs[0].node]
    np.testing.assert_allclose(law.value, now)


def drawn_step(data: st.DataObject, now: Array) -> Step:
    axis = data.draw(st.integers(0, now.ndim - 1))
    before: tuple[Any, ...] = (slice(None),) * axis
    kind = data.draw(st.sampled_from(["slice", "flip", "transpose", "concat", "stack", "roll", "rearrange", "map"]))
    if kind == "slice":
        start = data.draw(st.integers(0, now.shape[axis] - 1))
        part = slice(start, None, data.draw(st.sampled_from([1, 2, -1, -2])))
        return lambda x: x[(*before, part)], lambda x: x[(*before, part)]
    if kind == "flip":
        return lambda x: F.flip(x, axis), lambda x: np.flip(x, axis)
    if kind == "transpose" and now.ndim > 1:
        return lambda x: x.mT, lambda x: np.swapaxes(x, -1, -2)
    if kind == "concat":
        return lambda x: F.concat([x, -x], axis), lambda x: np.concatenate([x, -x], axis)
    if kind == "stack" and now.ndim < 5:
        return lambda x: F.stack([x, x * 2], axis), lambda x: np.stack([x, x * 2], axis)
    if kind == "roll":
        shift = data.draw(st.integers(-3, 3))
        return lambda x: F.roll(x, shift, axis), lambda x: np.roll(x, shift, axis)
    if kind == "rearrange" and now.shape[-1] % 2 == 0 and now.ndim > 1:
        return (
            lambda x: F.rearrange(x, "... m (a b) -> ... b (a m)", a=2),
            lambda x: np.swapaxes(x.reshape(*x.shape[:-1], 2, -1), -3, -1).reshape(*x.shape[:-2], x.shape[-1] // 2, -1),
        )
    return lambda x: x + 1, lambda x: x + 1
