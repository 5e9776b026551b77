"""Views and joins as torch has them: what they say in numpy, in torch's words.

Sizes stand in the text by their names; `size_line` says what they are at the sizes of the chain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fusegen.language.graph import Graph, Kind, Node
from fusegen.language.types import size_of
from fusegen.language.views import View

TORCHS_WORDS = {
    "np.concatenate(": "torch.cat(", "np.stack(": "torch.stack(", "np.flip(": "torch.flip(",
    "np.swapaxes(": "torch.swapaxes(", "np.broadcast_to(": "torch.broadcast_to(",
    ".transpose(": ".permute(", "axis=": "dim=",
}  # fmt: skip
BACKWARD = re.compile(r":-\d+(?=[,\]])")  # the step of a slice, which torch wants above 0


def view_text(node: Node, names: Sequence[str], graph: Graph) -> str:
    """A view or a join of arrays by their names: `x.reshape(M, H, D)`, `torch.cat([a, b], dim=-1)`."""
    if node.view is not None and BACKWARD.search(node.text):
        return backward_text(node.view, names[0], graph)
    text = node.text
    if text.startswith("np.flip("):  # torch flips a list of axes
        text = re.sub(r", (-?\d+)\)$", r", [\1])", text)
    for numpys, torchs in TORCHS_WORDS.items():
        text = text.replace(numpys, torchs)
    return text.format(*names)


def backward_text(view: View, name: str, graph: Graph) -> str:
    """A slice with steps below 0: of the axes flipped, since torch has only steps above 0."""
    flipped: list[int] = []
    slices: list[str] = []
    for axis, (sizes, offset, row) in enumerate(zip(view.base, view.offset, view.steps, strict=True)):
        (size,) = (size_of(size, graph.sizes) for size in sizes)
        start = size_of(offset, graph.sizes)
        moving = next((at for at, step in enumerate(row) if step != 0), None)
        step = 1 if moving is None else size_of(row[moving], graph.sizes)
        count = 1 if moving is None else size_of(view.shape[moving], graph.sizes)
        if step < 0:
            flipped.append(axis)
            start, step = size - 1 - start, -step
        slices.append(f"{start}:{start + (count - 1) * step + 1}:{step}")
    shape = ", ".join(str(size_of(size, graph.sizes)) for size in view.shape)
    return f"torch.flip({name}, {flipped})[{', '.join(slices)}].reshape({shape})"


def size_line(graph: Graph) -> str:
    """`M, N = 8, 4096`: the dims that texts of views call by their names; empty where none does."""
    texts = " ".join(node.text for node in graph.nodes if node.op.kind in (Kind.VIEW, Kind.JOIN))
    spelled = set(re.findall(r"[A-Za-z_]\w*", texts))
    named = [name for name in graph.sizes if name in spelled]
    if not named:
        return ""
    return f"{', '.join(named)} = {', '.join(str(graph.sizes[name]) for name in named)}"
