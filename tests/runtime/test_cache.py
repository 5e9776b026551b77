"""The compile cache: what is kept, what is refused, and many processes at once."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import stat
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusegen.compiling import Binary, Resources
from fusegen.emitting.rendering import render
from fusegen.planner import plan
from fusegen.planner.model import Source
from fusegen.runtime import cache
from fusegen.runtime.cache import Entry, KernelCache, Key
from fusegen.storage import cache_root
from fusegen.storage.entries import MAGIC
from fusegen.targets import H200
from tests.specs import SHIPPED

KEY = Key("softmax", "sm_90a", "0" * 64, 256, 1024, "nvrtc 13.5", "-arch=sm_90a", "0.1.0")


def binary(code: bytes = bytes(range(256)) * 40) -> Binary:
    resources = Resources(32, 0, 0, 0, 0, 128, 1024, len(code))
    return Binary(H200, "softmax", 256, code, "ptxas info\nline two", "nvrtc 13.5", 0.25, resources)


def test_what_is_stored_comes_back(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "not" / "there" / "yet")
    assert cache.load(KEY, H200) is None
    entry = Entry(binary(), {"ok": True, "worst": 1e-3})
    cache.store(KEY, entry)
    assert cache.load(KEY, H200) == entry
    cache.store(KEY, Entry(binary(b"\n\n")))  # in its place; newlines in the code are code
    assert cache.load(KEY, H200) == Entry(binary(b"\n\n"))
    assert list(cache.folder.glob("[!.]*")) == [cache.path(KEY)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("entry", "other"), ("arch", "sm_80"), ("text", "1" * 64), ("threads", 128), ("shared_bytes", 0),
        ("compiler", "nvrtc 13.6"), ("options", "-arch=sm_90a --use_fast_math"), ("fusegen", "0.2.0"),
    ],
)  # fmt: skip
def test_everything_in_the_key_counts(tmp_path: Path, field: str, value: object) -> None:
    cache = KernelCache(tmp_path)
    cache.store(KEY, Entry(binary()))
    assert cache.load(replace(KEY, **{field: value}), H200) is None  # type: ignore[arg-type]


def corrupt_text(data: bytes, old: bytes, new: bytes) -> bytes:
    """`data` with its header changed and its checksum made right again: damage that a checksum can't see."""
    body = data[len(MAGIC) :].partition(b"\n")[2].replace(old, new)
    return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


DAMAGE: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut short": lambda data: data[:-1],
    "cut in the header": lambda data: data[:100],
    "one bit": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
    "zeros": lambda data: bytes(len(data)),
    "another format": lambda data: data.replace(b"fusegen cache 1", b"fusegen cache 9"),
    "a pickle": lambda data: pickle.dumps({"code": data}),
    "another kernel": lambda data: corrupt_text(data, b"sm_90a", b"sm_100"),
    "a field gone": lambda data: corrupt_text(data, b'"spill_bytes"', b'"spilt_bytes"'),
    "a wrong type": lambda data: corrupt_text(data, b'"registers": 32', b'"registers": "32"'),
    "a header that is no table": lambda data: corrupt_text(data, b'{"key"', b'[{"key"'),
    "a verdict that is no table": lambda data: corrupt_text(data, b'"verdict": null', b'"verdict": [0]'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_that_says_so(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = KernelCache(tmp_path)
    cache.store(KEY, Entry(binary()))
    path = cache.path(KEY)
    data = path.read_bytes()
    path.write_bytes(DAMAGE[damage](data))
    with caplog.at_level(logging.DEBUG, "fusegen.cache"):
        assert cache.load(KEY, H200) is None
    assert "is damaged: " in caplog.text
    cache.store(KEY, Entry(binary()))
    assert path.read_bytes() == data
    assert cache.load(KEY, H200) is not None


def test_the_log_says_hit_or_why_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fusegen.cache")
    cache = KernelCache(tmp_path)
    cache.load(KEY, H200)
    assert "miss: softmax for sm_90a: never made before" in caplog.text
    cache.store(KEY, Entry(binary()))
    cache.load(KEY, H200)
    assert "hit: softmax for sm_90a" in caplog.text
    cache.load(replace(KEY, compiler="nvrtc 13.6", text="1" * 64), H200)
    assert "its text is different; compiler was nvrtc 13.5, is nvrtc 13.6" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with caplog.at_level(logging.DEBUG, "fusegen.cache"):
            KernelCache(tmp_path / "kernels").store(KEY, Entry(binary()))
        assert "not stored: softmax" in caplog.text
    finally:
        tmp_path.chmod(stat.S_IRWXU)


def test_a_folder_that_is_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").write_text("in the way")
    cache = KernelCache(tmp_path / "kernels")
    with caplog.at_level(logging.DEBUG, "fusegen.cache"):
        cache.store(KEY, Entry(binary()))
        assert cache.load(KEY, H200) is None
    assert "not stored: softmax" in caplog.text
    assert "can't be read" in caplog.text


def test_names_are_short_and_plain(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    key = replace(KEY, entry="norm_" * 100, arch="gfx90a:xnack-")
    cache.store(key, Entry(replace(binary(), entry=key.entry)))
    assert cache.load(key, H200) is not None
    assert len(cache.path(key).name) < 255
    assert "/" not in cache.path(replace(key, entry="../up")).name


def test_the_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    assert KernelCache().folder == tmp_path / "kernels"
    monkeypatch.delenv("FUSEGEN_CACHE_DIR")
    assert cache_root().name == "fusegen"


def hammer(folder: str, number: int) -> int:
    """Store and load by turns; the number of loads that gave something else than a whole entry or a miss."""
    cache = KernelCache(Path(folder))
    wrong = 0
    for turn in range(60):
        code = bytes([number, turn]) * 5000
        if (number + turn) % 3 == 0:
            cache.path(KEY).write_bytes(b"garbage")  # somebody's broken tool
        cache.store(KEY, Entry(binary(code)))
        entry = cache.load(KEY, H200)
        wrong += entry is not None and entry.binary.code != entry.binary.code[:2] * 5000
    return wrong


def test_eight_processes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(8, mp_context=context) as pool:  # a worker that dies is an error, where a Pool would wait
        assert list(pool.map(hammer, [str(tmp_path)] * 8, range(8))) == [0] * 8
    cache = KernelCache(tmp_path)
    cache.store(KEY, Entry(binary()))
    assert cache.load(KEY, H200) == Entry(binary())
    assert not list(tmp_path.glob("*.tmp"))
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_the_header_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    cache.store(KEY, Entry(binary()))
    header = json.loads(cache.path(KEY).read_bytes().split(b"\n")[2])
    assert header["key"]["compiler"] == "nvrtc 13.5"


def source() -> Source:
    return render(plan(SHIPPED["bias_relu"].graph, H200))


def test_what_is_done_meanwhile_is_done_beside_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, where there is something to compile; and waited for."""
    began, steps = threading.Event(), []
    made = binary()

    def compile_source(*_: Any, **__: Any) -> Binary:
        assert began.wait(60), "only what runs beside it can have begun"
        steps.append("compiled")
        return made

    def work() -> None:
        began.set()
        time.sleep(0.05)
        steps.append("done")

    monkeypatch.setattr(cache, "known_version", lambda vendor: made.compiler)
    monkeypatch.setattr(cache, "compile_source", compile_source)
    store = KernelCache(tmp_path)
    assert cache.compiled(source(), store, meanwhile=work) is made
    assert sorted(steps) == ["compiled", "done"]
    assert cache.compiled(source(), store, meanwhile=work).code == made.code
    assert len(steps) == 2


@pytest.mark.parametrize("how", ["it fails", "no thread"])
def test_what_is_done_meanwhile_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    made = binary()

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    if how == "no thread":
        monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(cache, "known_version", lambda vendor: made.compiler)
    monkeypatch.setattr(cache, "compile_source", lambda *_, **__: made)
    assert cache.compiled(source(), KernelCache(tmp_path), meanwhile=refuse) is made
