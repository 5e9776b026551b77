"""How chains, plans and reports draw themselves in a notebook: what draws them is above them, and says so here.

`fusegen/__init__.py` sets `drawer`; a room imports only from rooms below it.
"""

from __future__ import annotations

from collections.abc import Callable

drawer: Callable[[object], str] | None = None
"""Makes HTML of any of them. None: a notebook shows its `repr`."""


def drawn(thing: object) -> str | None:
    """The HTML of `thing`, None where nothing draws it: notebooks take that for an answer."""
    return None if drawer is None else drawer(thing)
