"""A state as one page of HTML that needs nothing else: its style, script and pictures are in it.

Templates escape whatever a state holds. Beyond that the page forbids itself the network, and every script but its own,
which it names by hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusegen.emitting.rendering import template_folder
from fusegen.planner.heading import plural
from fusegen.reporting.comparing import compared
from fusegen.reporting.highlighting import Word, highlighted
from fusegen.reporting.layout import HEIGHT, drawing
from fusegen.reporting.plots import figure, roofline
from fusegen.reporting.state import Bytes, Chain, Kernel, Linked, State

COLOURS = 8  # of kernels, one after another
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
MOST_LINES_LINKED = 8  # of an operator's lines those that are listed


def page(state: State) -> str:
    """One state."""
    return render("page.html.j2", state=state, title=title_of(state), charts=charts(state.chains, "c"))


def page_of_two(before: State, after: State, names: tuple[str, str] = ("before", "after")) -> str:
    """Two states side by side, what differs first; `names` are what people call them."""
    found = compared(before, after)
    return render("comparison.html.j2", title=f"{names[0]} and {names[1]}", names=names, found=found)


def title_of(state: State) -> str:
    targets = ", ".join(dict.fromkeys(chain.target for chain in state.chains))
    what = state.chains[0].name if len(state.chains) == 1 else f"{len(state.chains)} chains"
    return f"{what} for {targets}" if targets else "no chains"


# ---------------------------------------------------------------- what the templates see


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a text: its number, its words, and the items that it is of, those that it makes first."""

    number: int
    words: Sequence[Word]
    makes: tuple[int, ...]
    names: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """What is worked out of a chain for its picture."""

    id: str
    chain: Chain
    drawing: Any
    roofline: Any
    spec: tuple[Line, ...]
    sources: tuple[tuple[Line, ...], ...]
    references: tuple[tuple[Line, ...], ...]
    reference: tuple[Line, ...]

    @property
    def viewed(self) -> bool:
        """Is there an operator that is no kernel's own, as a view is?"""
        return any(item.kind == "operator" and not item.kernels for item in self.chain.items)

    def lines_of(self, item: int) -> list[tuple[int, int]]:
        """The lines that make an item's values: (kernel, line)."""
        return [
            (place, line.number) for place, source in enumerate(self.sources) for line in source if item in line.makes
        ]

    @staticmethod
    def before(lines: Sequence[Line]) -> int:
        """How many lines stand in front of the function that has the first one that is of an item."""
        first = next((at for at, line in enumerate(lines) if line.makes or line.names), 0)
        blank = [at for at in range(first) if not lines[at].words]
        return blank[-1] + 1 if blank else 0

    def linked(self, kernel: int) -> tuple[int, int]:
        """How many lines of a kernel's own text are of an item, and how many there are between its first and last."""
        numbers = [line.number for line in self.sources[kernel] if line.makes or line.names]
        if not numbers:
            return 0, 0
        inside = self.sources[kernel][numbers[0] - 1 : numbers[-1]]
        return len(numbers), sum(is_code(line) for line in inside)


def is_code(line: Line) -> bool:
    text = "".join(text for kind, text in line.words if kind != "c").strip()
    return text not in ("", "{", "}")


def charts(chains: Sequence[Chain], prefix: str) -> list[Chart]:
    return [chart(chain, f"{prefix}{number}") for number, chain in enumerate(chains)]


def chart(chain: Chain, name: str) -> Chart:
    spec = highlighted("\n".join(chain.spec), "python")
    own: dict[int, list[int]] = {}
    for place, item in enumerate(chain.items):
        if item.line:
            own.setdefault(item.line, []).append(place)
    return Chart(
        id=name,
        chain=chain,
        drawing=drawing(chain.items),
        roofline=roofline(chain),
        spec=tuple(Line(n, words, tuple(own.get(n, ())), ()) for n, words in enumerate(spec, 1)),
        sources=tuple(lines(kernel.source, kernel.links, "cuda") for kernel in chain.kernels),
        references=tuple(lines(kernel.reference, kernel.reference_links, "python") for kernel in chain.kernels),
        reference=lines(chain.reference, chain.reference_links, "python"),
    )


def lines(text: str, links: Sequence[Linked], language: str) -> tuple[Line, ...]:
    of = {link.line: link for link in links}
    return tuple(
        Line(n, words, of[n].makes if n in of else (), of[n].names if n in of else ())
        for n, words in enumerate(highlighted(text, language), 1)
    )


# ---------------------------------------------------------------- words and numbers


def sized(count: float) -> str:
    """`201.4 MB`, by powers of ten."""
    for unit, name in UNITS:
        if abs(count) >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def micros(us: float | None) -> str:
    return "" if us is None else f"{us:.1f} µs" if us < 1000 else f"{us / 1000:.2f} ms"


def count(number: float) -> str:
    return f"{number:,.0f}"


def share(part: float, whole: float) -> float:
    """In percent, from 0 to 100."""
    return round(min(max(100 * part / whole, 0), 100), 2) if whole > 0 else 0.0


def factor(more: float, less: float) -> str:
    return f"{more / less:.2f}x" if less > 0 else ""


def widest(tensors: Sequence[Bytes]) -> int:
    """What bars are measured by."""
    return max((max(t.per_element, t.ideal, t.moved) for t in tensors), default=0)


def colour(kernel: int) -> str:
    return f"k{kernel % COLOURS}"


def flop_text(kernel: Kernel) -> str:
    flops = kernel.product_flops or kernel.flops
    return f"{flops / 1e9:.1f} GFLOP" if flops >= 1e9 else f"{flops / 1e6:.1f} MFLOP"


def verdict(ok: bool | None) -> str:
    return {True: "validated", False: "wrong", None: "not validated"}[ok]


# ---------------------------------------------------------------- templates


@cache
def environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(template_folder() / "report"),
        undefined=StrictUndefined,
        autoescape=True,  # whatever a state holds is text
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(sized=sized, micros=micros, short=figure, count=count)
    made.globals.update(
        share=share, factor=factor, widest=widest, colour=colour, flop_text=flop_text, verdict=verdict,
        box_height=HEIGHT, plural=plural, most_lines=MOST_LINES_LINKED,
    )  # fmt: skip
    return made


@cache
def inlined(name: str) -> str:
    """A style or script of fusegen's own, which goes into the page as it is."""
    return (template_folder() / "report" / name).read_text(encoding="utf-8")


def hashed(text: str) -> str:
    """As a Content-Security-Policy names what it lets run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def render(template: str, **given: Any) -> str:
    from markupsafe import Markup

    script = inlined("report.js")
    own: Mapping[str, Any] = {
        "style": Markup(inlined("report.css")), "script": Markup(script), "script_hash": hashed(script),
    }  # fmt: skip
    text: str = environment().get_template(template).render(**own, **given)
    return text
