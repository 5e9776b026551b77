"""The page of a report: it needs nothing but itself, its links lead somewhere, and a state's texts stay texts."""

from __future__ import annotations

import json
import re
from collections import Counter
from html import unescape

import pytest

from fusegen.errors import RequestError
from fusegen.reporting.machine_code import mix
from fusegen.reporting.pages import hashed, page, page_of_two
from fusegen.reporting.plots import roofline
from fusegen.reporting.reading import read
from fusegen.reporting.state import State, lines_of
from tests.reporting.states import COPY, HOSTILE, JOINED, PROGRAM, ROWS, Page, changed, hostile, proven, state

BENCHED = {
    "device": "a GPU", "conditions": "cold", "copy_gbs": 1.0, "predicted_read": 1, "predicted_written": 1, "read": 1,
    "written": 1, "uncounted": "",
    "entries": [{"name": "fusegen", "kind": "fusegen", "us": 1.0, "low_us": 1.0, "high_us": 1.0, "share": 1.0,
                 "refused": "x"}],
}  # fmt: skip
ALL = (ROWS, PROGRAM, JOINED, COPY)


def pages() -> dict[str, str]:
    both = page_of_two(state(ROWS, PROGRAM), state(ROWS, JOINED, target="hip:mi300x"))
    return {"several": page(state(*ALL)), "one": page(state(ROWS)), "two states": both, "proven": page(proven(ROWS))}


@pytest.mark.parametrize("name", ["several", "one", "two states", "proven"])
def test_a_page_stands_alone(name: str) -> None:
    text = pages()[name]
    found = Page(text)
    assert not found.wrong
    assert not [name for name, times in Counter(found.ids).items() if times > 1], "an id is there twice"
    assert not [link for link in found.links if link.removeprefix("#") not in found.ids], "a link leads nowhere"
    assert all(link.startswith("#") for link in found.links)
    fetching = [a for a in found.attributes if a[1] in ("src", "srcset", "action", "data", "poster", "xlink:href")]
    assert not fetching
    assert not {"link", "img", "iframe", "object", "form"} & set(found.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert not re.search(r"https?://", text), "nothing is fetched, and nothing is linked to elsewhere"


def test_only_its_own_script_may_run() -> None:
    found = Page(page(state(ROWS)))
    (script,) = found.scripts
    (policy,) = [
        value for tag, name, value in found.attributes if (tag, name) == ("meta", "content") and "src" in value
    ]
    assert f"script-src '{hashed(script)}'" in policy
    assert "default-src 'none'" in policy
    assert not [a for a in found.attributes if a[1].startswith("on")]


def test_what_people_ask_for_is_there() -> None:
    shown = state(ROWS)
    (chain,) = shown.chains
    (kernel,) = chain.kernels
    text = Page(page(shown)).text
    for tensor in kernel.parts[0].tensors:
        assert tensor.tensor in text
    for candidate in kernel.parts[0].candidates:
        assert candidate.configuration in text
    for section in kernel.parts[0].sections:
        assert all(point.text in text for point in section.points)
    assert all(line in unescape(text) for line in lines_of(kernel.source))
    assert all(line in unescape(text) for line in lines_of(kernel.reference))


def test_each_case_is_shown_with_its_worst_element() -> None:
    shown = proven(ROWS)
    (chain,) = shown.chains
    assert chain.validation.ok
    worst = [case.worst for case in chain.validation.cases if case.worst]
    assert worst
    text = Page(page(shown)).text
    assert all(one in text for one in worst)


def test_a_wrong_kernel_is_called_wrong() -> None:
    def spoil(document: State) -> None:
        validation = document["chains"][0]["validation"]  # type: ignore[index]
        validation.update(ok=False, text="one case is wrong")
        validation["cases"][0].update(problem="3 of 40 elements are wrong", share="inf", max_abs="nan")

    text = Page(page(changed(proven(ROWS), spoil))).text
    assert "3 of 40 elements are wrong" in text
    assert "wrong" in text


def test_texts_of_a_state_stay_texts() -> None:
    """Whatever stands in a state, the page has the tags and attributes of the page of a tame one, and one script."""
    tame = changed(state(ROWS, PROGRAM), lambda document: document["chains"][0].update(bench=BENCHED))
    wild: State = read(State, hostile(tame.to_json()), "wild")
    before, after = Page(page(tame)), Page(page(wild))
    assert not after.wrong
    assert len(after.scripts) == 1
    assert after.scripts == before.scripts
    assert set(after.tags) == set(before.tags)
    assert {(tag, name) for tag, name, _ in after.attributes} == {(tag, name) for tag, name, _ in before.attributes}
    assert after.text.count(HOSTILE) > 100
    assert "49" not in after.text.replace("{{ 7 * 7 }}", "")[:200]
    assert not [link for link in after.links if not link.startswith("#")]


def test_texts_of_two_states_stay_texts() -> None:
    tame = state(ROWS)
    wild: State = read(State, hostile(tame.to_json()), "wild")
    found = Page(page_of_two(tame, wild, (HOSTILE, HOSTILE)))
    assert not found.wrong
    assert len(found.scripts) == 1
    assert "img" not in found.tags
    assert HOSTILE in found.text


def test_a_roofline_has_a_dot_for_each_kernel() -> None:
    (chain,) = state(PROGRAM).chains
    found = roofline(chain)
    assert found is not None
    assert [dot.kernel for dot in found.dots] == [0, 1]
    assert all(dot.roof_y <= dot.y for dot in found.dots), "no kernel is above its roof"
    (copied,) = state(COPY).chains
    assert roofline(copied) is None


def test_a_roofline_has_room_for_no_nonsense() -> None:
    def spoil(document: State) -> None:
        document["chains"][0].update(dram_gbs=1e-300)  # type: ignore[index]
        document["chains"][0]["kernels"][0].update(time_us=1e-300, roof_tflops=1e300)  # type: ignore[index]

    (chain,) = changed(state(ROWS), spoil).chains
    assert roofline(chain) is None


def test_two_states_differ_in_what_differs() -> None:
    before = state(ROWS, COPY)
    same = Page(page_of_two(before, before)).text
    assert "0 differ" in same
    after = changed(before, lambda document: document["chains"][0]["kernels"][0].update(time_us=1.0))
    text = Page(page_of_two(before, after)).text
    assert "1 differs" in text
    assert "better" in text
    other = Page(page_of_two(state(ROWS), state(ROWS, target="hip:mi300x"))).text
    assert "better" not in other, "one GPU is no better a change than another"
    assert "+#include <hip" in other or "-#include <cuda_fp16.h>" in other


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0060*/               @P0 BRA `(.L_x_1) ;
        /*0070*/              @!UP1 UMOV UR4, 0x400 ;
        /*0080*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0090*/                   FFMA R3, R4, R5, R6 ;
        /*00a0*/                   FFMA R3, R4, R5, R6 ;
        /*00b0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
"""
GCN = """
     0  s_load_dwordx4 s[4:7], s[0:1], 0x18
     8  global_load_dwordx4 v[2:5], v[0:1], off
    10  v_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]
    18  v_exp_f32_e32 v1, v2
    1c  v_add_f32_e32 v1, v1, v2
"""


def test_instructions_are_counted_by_their_kinds() -> None:
    found = {share.kind: dict(share.names) for share in mix(SASS, "cuda")}
    assert found == {
        "f32 and f16 arithmetic": {"FFMA": 2}, "constants": {"LDC": 1}, "flow": {"BRA": 1},
        "integers and addresses": {"UMOV": 1}, "global memory": {"LDG": 1}, "matrix products": {"HGMMA": 1},
    }  # fmt: skip
    kinds = {share.kind: share.count for share in mix(GCN, "hip")}
    assert kinds == {
        "constants": 1, "global memory": 1, "matrix products": 1, "special functions": 1, "f32 and f16 arithmetic": 1,
    }  # fmt: skip


def test_a_number_that_is_none_is_refused() -> None:
    document = json.loads(json.dumps(state(ROWS).to_json()))
    document["chains"][0]["time_us"] = "nan"
    with pytest.raises(RequestError, match="time_us"):
        read(State, document, "it")
