"""States of a few chains that the tests of reports share, and a parser that says what is wrong with a page."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

from fusegen.reporting.reading import read
from fusegen.reporting.report import report
from fusegen.reporting.state import State
from tests.specs import SHIPPED

ROWS, PROGRAM, JOINED, COPY = "bias_gelu_residual_ln", "mlp", "rope_qk", "copy"
HOSTILE = """"'></style></script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;{{ 7 * 7 }}"""
VOID = frozenset({"meta", "br", "img", "input", "link"})


@functools.cache
def state(*names: str, target: str = "cuda:h200") -> State:
    """Planned and built, where something builds here, and not validated."""
    return report(*(SHIPPED[name] for name in names), target=target, validate=False).state


@functools.cache
def proven(name: str) -> State:
    """The same with its validation, in the emulator."""
    return report(SHIPPED[name], target="cuda:h200", on="emulator").state


def changed(state: State, change: Callable[[Any], None]) -> State:
    """What the state is after a change of its JSON."""
    document = json.loads(json.dumps(state.to_json()))
    change(document)
    made: State = read(State, document, "changed")
    return made


def hostile(value: Any, key: str = "") -> Any:
    """The document with every text replaced by one that would like to be HTML."""
    if isinstance(value, dict):
        names = key in ("sizes", "names")  # of which the keys are texts too
        return {HOSTILE + name if names else name: hostile(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, key) for item in value]
    return HOSTILE + value if isinstance(value, str) and key != "kind" else value


class Page(HTMLParser):
    """What a page is made of: ids, links and where each stands, scripts, and what is wrong with its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # tag, name, value
        self.texts: list[str] = []
        self.wrong: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        self.wrong += [f"<{tag}> is open at the end" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if len({name for name, _ in attrs}) < len(attrs):
            self.wrong.append(f"<{tag}> has an attribute twice: {attrs}")
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open[-1] != tag:
            self.wrong.append(f"</{tag}> closes {self.open[-1:] or 'nothing'} at {self.getpos()}")
        else:
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)
