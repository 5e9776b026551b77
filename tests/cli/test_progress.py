"""The bar: where it is shown, and what it says."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from fusegen.cli import asking, showing
from fusegen.errors import RequestError
from fusegen.targets import H200, MI300X
from tests.conftest import ROOT


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What stderr is from now on. No fixture: pytest puts its own stderr in place behind them."""
    stream = Terminal()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def shown(terminal: Terminal) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())


def test_many_steps_show_their_rate_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with showing.progress(4) as bar:
        bar.step("first")
        for done in range(1, 4):
            time.sleep(0.05)
            bar.reach(done, 4, "copy for cuda:h200, " + 80 * "x")
        bar.live.refresh()
        line = next(line for line in reversed(shown(terminal).splitlines()) if "copy" in line)
    assert re.search(r" 3/4 +\d+/s +\d:\d\d:\d\d left copy for cuda:h200, x+…", line)
    assert len(line.rstrip()) <= 80


def test_a_single_step_shows_a_clock_once_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_a_terminal(monkeypatch)
    with showing.progress(1) as bar:
        bar.step("quick")
    assert shown(terminal) == ""
    monkeypatch.setattr(showing, "PATIENCE_S", 0.02)
    with showing.progress(1) as bar:
        bar.step("slow")
        while not bar.live.live.is_started:
            time.sleep(0.01)
    assert re.search(r"\d:\d\d:\d\d slow", shown(terminal))
    assert "left" not in shown(terminal)


def test_nothing_is_shown_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with showing.progress(3) as bar:
        bar.step("one")
        bar.reach(2, 3, "two")
    assert capsys.readouterr() == ("", "")


def test_rates_in_words() -> None:
    speeds = {0.0: "", 123.4: "123/s", 12.0: "12/s", 3.21: "3.2/s", 0.25: "15/min", 0.02: "1.2/min", 0.001: "3.6/h"}
    assert {speed: showing.rate(speed) for speed in speeds} == speeds


def test_several_sizes_and_targets() -> None:
    rmsnorm = str(ROOT / "specs" / "rmsnorm.py")
    found = asking.ask_chains([rmsnorm], ["M=1,16", "N=64,4096,64"])
    assert [dict(chain.graph.sizes) for chain in found] == [
        {"M": 1, "N": 64}, {"M": 1, "N": 4096}, {"M": 16, "N": 64}, {"M": 16, "N": 4096},
    ]  # fmt: skip
    both = asking.ask_chains([rmsnorm, str(ROOT / "specs" / "copy.py")], ["M=1,16"])
    assert [chain.name for chain in both] == ["rmsnorm", "rmsnorm", "copy"], "copy has no M"
    assert asking.ask_several_targets("cuda:h200,hip:mi300x,cuda:h200") == (H200, MI300X)
    with pytest.raises(RequestError, match="2 chains, and this takes one"):
        asking.ask_chain(rmsnorm, ["M=1,16"])
    for wrong in ("M=1,", "M=,", "M=1;2", "=1,2"):
        with pytest.raises(RequestError, match="write a dim and its size"):
            asking.ask_chains([rmsnorm], [wrong])
