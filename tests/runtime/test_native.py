"""The module of the shortcut in C: compiled once, kept, checked before it is loaded; and what is done without it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fusegen.errors import CompileError, MissingError
from fusegen.runtime import native
from fusegen.storage import Store, libraries


def raising(*_: object) -> Any:
    raise ZeroDivisionError("raised on purpose")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Nothing is known, in this process or in the cache, whose folder this is."""
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    native.getting.cache_clear()
    yield tmp_path
    native.getting.cache_clear()


def reason(caplog: pytest.LogCaptureFixture) -> str:
    """Why there is no module."""
    with caplog.at_level(logging.DEBUG, logger="fusegen.shortcuts"):
        assert native.module() is None
    (said,) = (record.getMessage() for record in caplog.records if record.name == "fusegen.shortcuts")
    assert said.startswith("this shortcut is a function in Python, which takes some 1 us more for each call: ")
    return str(said)


def test_the_module_is_compiled_once_and_kept(module: Any, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.begin()
    found = native.module()
    assert found is not None
    assert found is native.module()
    (entry,) = (anew / "extensions").iterdir()
    assert entry.name.startswith("shortcut-")
    monkeypatch.setattr(libraries, "made", raising)
    assert native.get() is not found
    assert [name for name in sys.modules if name.rpartition(".")[2] == "shortcut"] in ([], [native.NAME])


@pytest.mark.parametrize("damage", ["another text", "half of it", "another's"])
def test_what_others_left_in_the_cache_is_not_loaded(
    module: Any, anew: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.get()
    (entry,) = (anew / "extensions").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(
        {"another text": b"\x7fELF", "half of it": whole[: len(whole) // 2]}.get(damage, whole[:-1] + b".")
    )
    built: list[object] = []
    original = libraries.made

    def counted(*given: Any) -> bytes:
        built.append(given)
        return original(*given)

    monkeypatch.setattr(libraries, "made", counted)
    native.get()
    assert len(built) == 1
    assert entry.read_bytes() == whole, "replaced"


def test_a_module_that_can_not_be_loaded(
    module: Any, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Store, "load", lambda *_: b"no library")
    assert ".so: " in reason(caplog)


def test_a_cache_that_can_not_be_written(module: Any, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (anew / "file").touch()
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(anew / "file" / "below"))
    assert native.module() is not None


def test_no_compiler(anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(anew))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "no C compiler here\n  to get it: apt install gcc python3-dev" in reason(caplog)
    (anew / "clang").touch(0o755)
    assert native.compiler() == ("clang",)
    monkeypatch.setenv("CC", "clang -m64")
    assert native.compiler() == ("clang", "-m64")


def test_zig_is_a_compiler_too(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(anew))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "ziglang" or None)
    assert native.compiler() == (sys.executable, "-m", "ziglang", "cc")


def test_no_headers(anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(anew))
    monkeypatch.setattr(native, "compiler", lambda: ("cc",))
    assert f"no Python.h in {anew}\n  to get them: apt install gcc python3-dev" in reason(caplog)


def test_a_compiler_that_fails(
    module: Any, anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = anew / "shortcut.c"
    source.write_text("#error on purpose")
    monkeypatch.setattr(native, "SOURCE", source)
    with pytest.raises(CompileError, match="on purpose"):
        native.get()
    assert "refuses it" in reason(caplog)


def test_a_python_without_its_lock(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(MissingError, match="global lock"):
        native.get()


def test_a_compiler_that_takes_long(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it again, and when it is done the module is there."""
    done = threading.Event()
    monkeypatch.setattr(native, "get", lambda wait: done.wait() and native)
    monkeypatch.setattr(native, "PATIENCE_S", 0.01)
    try:
        assert "it is still being compiled" in reason(caplog)
        monkeypatch.setattr(native, "PATIENCE_S", 1e9)
        assert native.module() is None
    finally:
        done.set()
    found, _ = native.getting()
    assert found.result() is native.module() is native


def test_no_thread_can_be_started(
    anew: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    native.begin()
    assert "can't start new thread" in reason(caplog)


def test_the_text_has_no_warnings(module: Any, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = (
        "-Wall",
        "-Wextra",
        "-Wpedantic",
        "-Wno-cast-function-type",
        "-Werror",
        "-Wno-unused-command-line-argument",
    )
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, *strict))
    native.get()
