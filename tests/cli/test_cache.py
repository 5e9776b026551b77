"""`fusegen cache`: what it shows and removes, and what `--verbose` says of the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusegen.cli import app
from fusegen.cli.caching import Kind
from fusegen.storage import DEFAULT_BOUND, KINDS, Key, Store


def keep(kind: str, name: str, size: int, hours_ago: int = 0) -> None:
    """Keep an entry of about `size` KiB that was last used some hours ago."""
    store, key = Store(kind), Key(name, "sm_90a", "0" * 64)
    store.store(key, {}, bytes(size * 1024))
    then = time.time() - 3600 * hours_ago
    os.utime(store.path(key), (then, then))


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "cache"))
    for number in range(3):
        keep("kernels", f"kernel_{number}", 10, hours_ago=number + 1)
    keep("emulator", "library", 300)
    return tmp_path / "cache"


def cli(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["cache", *words])
    assert done.exit_code == code, done.output
    return done.stdout


def test_info(filled: Path) -> None:
    text = cli("info")
    assert text.startswith(f"the cache in {filled}\n")
    lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line}
    assert lines["kernels"] == "kernels compiled kernels 3 30.6 KiB 3 h ago 1 h ago"
    assert lines["emulator"] == "emulator emulator libraries 1 0.3 MiB just now just now"
    assert lines["all"] == "all 4 0.3 MiB"
    assert lines["bound"].startswith("bound 512.0 MiB; ")
    assert "FUSEGEN_CACHE_SIZE" in lines["bound"]
    assert "FUSEGEN_CACHE_DIR" in lines["folder"]
    facts = json.loads(cli("info", "--json"))
    assert set(facts) == {"folder", "bound_bytes", "entries", "bytes", "kinds"}
    assert (facts["entries"], facts["bound_bytes"]) == (4, DEFAULT_BOUND)
    assert facts["bytes"] == sum(kind["bytes"] for kind in facts["kinds"].values())
    assert facts["kinds"]["kernels"]["least_recent_use"] < facts["kinds"]["kernels"]["last_use"]


def test_clear(filled: Path) -> None:
    assert cli("clear", "emulator").startswith(f"removed 1 emulator libraries from {filled}: 0.3 MiB")
    assert cli("clear", "emulator") == f"nothing to remove: {filled} holds no emulator libraries\n"
    facts = json.loads(cli("clear", "--json"))
    assert facts["removed"]["kernels"] == {"entries": 3, "bytes": facts["bytes"]}
    assert facts["removed"]["emulator"] == {"entries": 0, "bytes": 0}
    assert (facts["ok"], facts["entries"], facts["kept"]) == (True, 3, [])
    assert cli("clear") == f"nothing to remove: {filled} holds no entries\n"
    assert json.loads(cli("info", "--json"))["entries"] == 0


def test_every_kind_can_be_cleared_alone() -> None:
    assert list(Kind) == list(KINDS)


def test_a_cache_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "none"))
    assert json.loads(cli("info", "--json"))["entries"] == 0
    assert "nothing to remove" in cli("clear")
    assert not (tmp_path / "none").exists(), "looking makes nothing"
    (tmp_path / "none").write_text("in the way")
    assert cli("info", code=3) == ""


def test_what_may_not_be_removed_is_said(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    text = cli("clear", code=3)
    assert "4 files could not be removed; the first is " in text
    assert ": Permission denied\n" in text
    facts = json.loads(cli("clear", "--json", code=3))
    assert (facts["ok"], len(facts["kept"]), facts["entries"]) == (False, 4, 0)


def test_verbose_says_hit_or_miss_and_why(tmp_path: Path) -> None:
    environment = {**os.environ, "FUSEGEN_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).resolve().parents[2]
    words = ["-v", "compile", "specs/copy.py", "--target", "cuda:h200", "--no-validate"]

    def said(*more: str) -> str:
        done = subprocess.run([sys.executable, "-m", "fusegen", *words, *more], cwd=root, env=environment,
                              capture_output=True, text=True, check=False)  # fmt: skip
        if done.returncode == 3:
            pytest.skip(done.stderr.splitlines()[-1])
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "fusegen.cache: miss: copy for sm_90a: never made before" in said()
    assert "fusegen.cache: hit: copy for sm_90a: copy-sm_90a-" in said()
    assert "fusegen.cache: miss: copy for sm_90a: its text is different" in said("--dtype", "f16")
