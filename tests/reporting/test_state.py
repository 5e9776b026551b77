"""States as JSON: what is written is read back, and what nobody wrote is refused with its place."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusegen.errors import RequestError
from fusegen.reporting.benches import Benches
from fusegen.reporting.pages import page, page_of_two
from fusegen.reporting.state import load
from tests.reporting.states import JOINED, PROGRAM, ROWS, Page, changed, proven, state


@pytest.mark.parametrize("names", [(ROWS, PROGRAM), (JOINED,)])
def test_a_state_is_read_back_as_it_was(names: tuple[str, ...], tmp_path: Path) -> None:
    made = state(*names)
    made.save(tmp_path / "state.json")
    assert load(tmp_path / "state.json") == made


def test_numbers_that_json_has_no_word_for_come_back(tmp_path: Path) -> None:
    made = changed(
        proven(ROWS),
        lambda document: document["chains"][0]["validation"]["cases"][0].update(share="inf", max_abs="nan"),
    )
    made.save(tmp_path / "state.json")
    case = load(tmp_path / "state.json").chains[0].validation.cases[0]
    assert case.share == float("inf")
    assert case.max_abs != case.max_abs


Change = Callable[[Any], Any]


def kernel(document: Any) -> Any:
    return document["chains"][0]["kernels"][0]


WRONG: dict[str, tuple[Change, str]] = {
    "a text for a number": (lambda d: d["chains"][0].update(time_us="1"), r"time_us is \"1\", and a number"),
    "a number for a text": (lambda d: d["chains"][0].update(name=1), r"chains\[0\].name is 1, and a text was wanted"),
    "true for a number": (lambda d: kernel(d).update(moved=True), r"moved is true, and a whole number"),
    "half a number": (lambda d: kernel(d).update(moved=0.5), r"moved is 0.5, and a whole number"),
    "a number of no end": (lambda d: kernel(d).update(moved=10**400), "a number below"),
    "an infinity": (lambda d: d["chains"][0].update(time_us=float("1e999")), "is no JSON|a number that a float can be"),
    "nothing": (lambda d: kernel(d).update(source=None), r"source is null, and a text"),
    "a field too few": (lambda d: kernel(d).pop("source"), r"kernels\[0\] lacks source"),
    "a field too many": (lambda d: kernel(d).update(virus=1), r"has \"virus\", which this version"),
    "an object for a list": (lambda d: d.update(chains={}), r"chains is {}, and a list"),
    "no kernels": (lambda d: d["chains"][0].update(kernels=[]), r"chains\[0\] has no kernels"),
    "no parts": (lambda d: kernel(d).update(parts=[]), r"kernels\[0\] has no parts"),
    "an item that is none": (lambda d: kernel(d)["links"][0].update(makes=[99]), r"links\[0\].items has 99, and there"),
    "an item below none": (lambda d: kernel(d)["links"][0].update(makes=[-1]), r"links\[0\].items has -1"),
    "a line that is none": (lambda d: kernel(d)["links"][0].update(line=0), "line has 0, and there are 1 to"),
    "a circle": (lambda d: d["chains"][0]["items"][5].update(reads=[5]), r"items\[5\].reads has 5"),
    "a kernel that is none": (lambda d: d["chains"][0]["items"][5].update(kernels=[7]), r"items\[5\].kernels has 7"),
    "a kind that is none": (lambda d: d["chains"][0]["items"][5].update(kind="x"), "it is operand or operator"),
    "half a letter": (lambda d: d["chains"][0].update(name="\ud800"), "half a character"),
    "another format": (lambda d: d.update(format=2), "is of format 2, and this version of fusegen reads 1"),
    "a format of another kind": (lambda d: d.update(format=[1]), "is of format"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_nobody_wrote_is_refused(what: str, tmp_path: Path) -> None:
    change, said = WRONG[what]
    document = json.loads(json.dumps(state(ROWS).to_json()))
    change(document)
    file = tmp_path / "state.json"
    file.write_text(json.dumps(document))
    with pytest.raises(RequestError, match=said):
        load(file)


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '{"chains": []}', "[" * 100_000, "\x00"])
def test_what_is_no_state_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text(text)
    with pytest.raises(RequestError, match=r"is no JSON|is no report's state"):
        load(file)


def test_a_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    with pytest.raises(RequestError, match="can't be read: No such file"):
        load(file)
    file.write_bytes(b'{"format": "\xff"}')
    with pytest.raises(RequestError, match="is no text"):
        load(file)


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value of a document."""
    yield path
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in pairs:
        yield from places(value, (*path, key))


def spoilt(document: Any, draw: random.Random) -> Any:
    """The document with a few values that nobody expects in place of others."""
    found = json.loads(json.dumps(document))
    for _ in range(draw.randrange(1, 3)):
        path = draw.choice([path for path in places(found) if path])
        *way, last = path
        holder = functools.reduce(lambda value, key: value[key], way, found)
        if draw.random() < 0.2 and isinstance(holder, list):
            holder.pop(last)
        elif draw.random() < 0.2 and isinstance(holder, list):
            holder.append(holder[last])
        elif isinstance(holder[last], (int, float)) and draw.random() < 0.8:
            kind = type(holder[last])
            holder[last] = kind(draw.choice([0, 1, -1, 7, 2**40, -(2**40), 2**62, 1e-300 if kind is float else 3]))
        else:
            holder[last] = draw.choice([None, "", "x\n\x0b\u2028\x00y", [], {}, -1, 1e308, "nan", True])
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_spoilt_state_is_refused_or_shown(seed: int, tmp_path: Path) -> None:
    """Nothing but RequestError, and where there is none a page that is sound."""
    draw = random.Random(seed)
    document = state(ROWS, JOINED).to_json() if seed % 2 else state(PROGRAM).to_json()
    file = tmp_path / "state.json"
    shown = 0
    for _ in range(25):
        file.write_text(json.dumps(spoilt(document, draw)))
        try:
            made = load(file)
        except RequestError:
            continue
        shown += 1
        for text in (page(made), page_of_two(state(ROWS), made)):
            found = Page(text)
            assert not found.wrong
            assert not [link for link in found.links if link.removeprefix("#") not in found.ids]
    assert shown


# ---------------------------------------------------------------- measurements

BENCH = {
    "chain": ROWS, "sizes": {"M": 8192, "N": 4096}, "target": "cuda:h200", "device": "NVIDIA H200", "copy_gbs": 4200.0,
    "conditions": "cold L2", "signature": "more than anyone asks for",
    "entries": [
        {"name": "fusegen", "kind": "fusegen", "us": 50.5, "low_us": 50.0, "high_us": 51.0, "share": 0.95,
         "refused": None, "gbs": 1.0},
        {"name": "torch eager", "kind": "torch", "us": None, "low_us": None, "high_us": None, "share": None,
         "refused": "torch is missing"},
    ],
    "counters": {"predicted_read": 134, "predicted_written": 67, "read": 135, "written": 60, "reason": ""},
}  # fmt: skip


def write_bench(folder: Path, **changes: Any) -> Path:
    file = folder / "bench.json"
    file.write_text(json.dumps({"benches": [{**BENCH, **changes}]}))
    return file


def test_a_measurement_is_found_by_chain_sizes_and_target(tmp_path: Path) -> None:
    found = Benches.read(write_bench(tmp_path))
    bench = found.of(ROWS, {"M": 8192, "N": 4096}, "cuda:h200")
    assert bench is not None
    assert (bench.read, bench.written) == (135, 60)
    assert found.times(bench, ROWS)[ROWS].us == 50.5
    assert found.of(ROWS, {"M": 1, "N": 4096}, "cuda:h200") is None
    assert found.of(ROWS, {"M": 8192, "N": 4096}, "cuda:h100") is None
    assert Benches.read(None).of(ROWS, {}, "cuda:h200") is None


def test_a_measurement_without_counters_says_so(tmp_path: Path) -> None:
    bench = Benches.read(write_bench(tmp_path, counters=None)).found[0][1]
    assert bench.read is None
    assert bench.uncounted


@pytest.mark.parametrize(
    ("change", "said"),
    [({"entries": None}, "entries is null, and a list"), ({"copy_gbs": "fast"}, 'copy_gbs is "fast", and a number'),
     ({"sizes": {"M": "x"}}, "sizes.M is"), ({"counters": [1]}, "counters is .*, and an object"),
     ({"device": None}, "device is null, and a text")],
)  # fmt: skip
def test_a_measurement_that_nobody_made_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        Benches.read(write_bench(tmp_path, **change))
