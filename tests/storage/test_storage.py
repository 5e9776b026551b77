"""The cache as a whole: its bound, what is evicted and cleared, disks that fail, and fifty processes at once."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusegen import storage
from fusegen.errors import RequestError
from fusegen.storage import (
    DEFAULT_BOUND,
    Key,
    Store,
    bounds,
    cache_bound,
    cache_root,
    clear,
    entries,
    make_room,
    survey,
)

KEY = Key("softmax", "sm_90a", "0" * 64)
MINUTE = 60


def payload_of(facts: Mapping[str, Any], payload: bytes) -> bytes:
    return payload


def kib(store: Store, name: str, size: int = 10) -> Path:
    """Keep an entry of about `size` KiB."""
    key = replace(KEY, entry=name)
    store.store(key, {}, bytes(size * 1024))
    return store.path(key)


def used(path: Path, minutes_ago: float) -> None:
    then = time.time() - minutes_ago * MINUTE
    os.utime(path, (then, then))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store that holds 100 KiB, and whose processes have not warned yet."""
    monkeypatch.setenv("FUSEGEN_CACHE_SIZE", "100K")
    return Store("kernels", tmp_path)


# ---------------------------------------------------------------- the bound


@pytest.mark.parametrize(
    ("text", "size"),
    [("", DEFAULT_BOUND), ("0", 0), ("4096", 4096), ("512M", 512 << 20), ("1.5g", 3 << 29), ("2 GiB", 2 << 30)],
)
def test_the_bound_is_the_users_choice(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_SIZE", text)
    assert cache_bound() == size


@pytest.mark.parametrize("text", ["much", "-1", "5X", "1e9", "G"])
def test_a_bound_that_is_no_size(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_SIZE", text)
    with pytest.raises(RequestError, match=rf"FUSEGEN_CACHE_SIZE={text} is no size\n  write bytes"):
        Store("kernels")


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "8388608T", "9" * 40])
def test_a_bound_that_no_disk_reaches(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_SIZE", text)
    with pytest.raises(RequestError, match=r"is more than any disk holds\n  write at most 4194304T"):
        cache_bound()


def test_least_recently_used_goes_first(small: Store) -> None:
    files = [kib(small, f"kernel_{number}") for number in range(9)]
    for age, file in enumerate(reversed(files)):
        used(file, 10 + age)
    assert small.load(replace(KEY, entry="kernel_0"), payload_of) is not None  # the oldest was just read
    kib(small, "one_more")
    left = {path.name.split("-")[0] for path in small.folder.glob("*.kernel")}
    assert {"kernel_0", "one_more"} < left
    assert left == {f"kernel_{number}" for number in (0, *range(3, 9))} | {"one_more"}
    assert survey(small.root)["kernels"].bytes <= 100 * 1024 * bounds.AFTER


def test_kinds_share_one_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_SIZE", "100K")
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path))
    old = kib(Store("emulator"), "library", 60)
    used(old, 5)
    kib(Store("kernels"), "kernel", 60)
    assert {kind for kind, usage in survey(tmp_path).items() if usage.entries} == {"kernels"}


def test_far_from_the_bound_nobody_lists_the_folder(small: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    kib(small, "first", 1)  # counts what there is
    passes = []
    evict = bounds.evict

    def counted(root: Path, bound: int) -> None:
        passes.append(1)
        evict(root, bound)

    monkeypatch.setattr(bounds, "evict", counted)
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("a store listed a folder"))
    for number in range(40):
        kib(small, f"kernel_{number}", 1)
    monkeypatch.undo()
    monkeypatch.setenv("FUSEGEN_CACHE_SIZE", "100K")
    monkeypatch.setattr(bounds, "evict", counted)
    for number in range(1000):  # ten times what fits: a pass makes room for many
        kib(small, f"more_{number}", 1)
    assert 10 < len(passes) < 150
    assert survey(small.root)["kernels"].bytes <= 100 * 1024


@pytest.mark.parametrize("tally", [b"", b"nonsense\n", b"12", b"99 99 99\n", b"0 0\n", b"\xff" * 99, None])
def test_a_tally_that_is_no_good_is_made_anew(small: Store, tally: bytes | None) -> None:
    """`0 0` is of 1970: too old to be believed. None: somebody removed it."""
    path = kib(small, "kernel", 4)
    for number in range(30):  # by no store of ours, so that nothing counts them
        copy = small.folder / path.name.replace("kernel", f"copied_{number}")
        shutil.copy(path, copy)
        used(copy, 100 - number)
    (small.root / bounds.TALLY).unlink()
    if tally is not None:
        (small.root / bounds.TALLY).write_bytes(tally)
    kib(small, "last", 1)
    left = survey(small.root)["kernels"].bytes
    assert left <= 100 * 1024
    total, when = map(int, (small.root / bounds.TALLY).read_bytes().split())
    assert total == left
    assert 0 <= time.time() - when < MINUTE


def test_what_does_not_fit_is_not_kept(small: Store, caplog: pytest.LogCaptureFixture) -> None:
    stays = kib(small, "small")
    with caplog.at_level(logging.DEBUG, "fusegen.cache"):
        assert not kib(small, "huge", 101).exists()
    assert "not stored: huge for sm_90a: 103" in caplog.text
    assert stays.exists()
    assert kib(small, "large", 99).exists(), "what was just stored is not what goes"
    assert not stays.exists()


def test_what_is_not_ours_stays(small: Store) -> None:
    """FUSEGEN_CACHE_DIR may name a folder that has other things in it."""
    names = (
        "thesis.tex",
        "libfoo.so",
        "a.kernel",
        f"{'0' * 64}.kernel",
        f"x-{'0' * 63}.kernel",
        ".abc.fusegen",
        "kernels",
    )
    for name in names:
        (small.root / name).write_bytes(bytes(50 * 1024))
    folder = small.root / f"x-{'0' * 64}.kernel"
    folder.mkdir()
    link = small.root / f"y-{'0' * 64}.kernel"
    link.symlink_to("thesis.tex")
    for number in range(30):
        kib(small, f"kernel_{number}")
    clear(small.root)
    assert all((small.root / name).exists() for name in names)
    assert folder.is_dir()
    assert link.is_symlink()


def test_what_a_dead_process_was_writing_goes(small: Store) -> None:
    left, young = (small.root / f".{digit * 32}.fusegen" for digit in "ab")
    for path in (left, young):
        path.write_bytes(b"half")
    used(left, 90)
    make_room(small.root, small.bound, 0)
    assert not left.exists()
    assert young.exists()
    used(young, 90)
    assert storage.clear(small.root).removed["kernels"].entries == 0
    assert not young.exists()


# ---------------------------------------------------------------- what may lie in an entry's place


def bit_flipped(path: Path, data: bytes) -> None:
    path.write_bytes(data[:-3] + bytes([data[-3] ^ 4]) + data[-2:])


def foreign(path: Path, data: bytes) -> None:
    """Whole, and another kernel's."""
    store = Store("kernels", path.parent)
    other = replace(KEY, text="1" * 64)
    store.store(other, {}, b"other")
    store.path(other).rename(path)


DAMAGE: Mapping[str, tuple[Callable[[Path, bytes], object], str]] = {
    "truncated": (lambda path, data: path.write_bytes(data[:-1]), "is damaged: its checksum differs"),
    "empty": (lambda path, data: path.write_bytes(b""), "is damaged: it is of another format"),
    "one bit": (bit_flipped, "is damaged: its checksum differs"),
    "wrong magic": (lambda path, data: path.write_bytes(b"\x7fELF" + data), "is damaged: it is of another format"),
    "foreign key": (foreign, "is damaged: it belongs to another key"),
    "a pipe": (lambda path, data: os.mkfifo(path), "is damaged: it is no file"),
    "a link to nowhere": (lambda path, data: path.symlink_to("nowhere"), "never made before"),
    "a link to itself": (lambda path, data: path.symlink_to(path.name), "can't be read: "),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_miss_that_says_so_and_is_replaced(
    small: Store, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    small.store(KEY, {"a": 1}, b"code")
    path = small.path(KEY)
    data = path.read_bytes()
    path.unlink()
    make, says = DAMAGE[damage]
    make(path, data)
    with caplog.at_level(logging.DEBUG, "fusegen.cache"):
        assert small.load(KEY, payload_of) is None
    assert says in caplog.text
    small.store(KEY, {"a": 1}, b"code")
    assert small.load(KEY, payload_of) == b"code"
    assert not path.is_symlink()


def test_a_folder_in_an_entrys_place(small: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Not ours to remove; the one warning names it."""
    path = small.path(KEY)
    path.mkdir()
    for _ in range(3):
        assert small.load(KEY, payload_of) is None
        small.store(KEY, {}, b"code")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"can't be written: Is a directory: {path}" in warning
    assert [path] == list(small.folder.iterdir())


# ---------------------------------------------------------------- disks that fail


def proof(root: Path, folder: Path) -> str:
    """A command that compiles two kernels and runs them in the emulator, with its cache in $HERE."""
    script = folder.parent / f"{folder.name}.py"
    script.write_text(
        "import logging, os, pathlib, fusegen\n"
        "from fusegen.emulator import toolchain\n"
        "from fusegen.language.spec import load_chains\n"
        "if 'SHOW_LOG' in os.environ:\n"
        "    logging.basicConfig(level=logging.DEBUG)\n"
        "check = toolchain.can_check()\n"  # the emulator's runtime takes seconds to build: as the user's cache has it
        "toolchain.build_runtime(toolchain.compiler_for(check=check), check=check, "
        f"cache=pathlib.Path({str(cache_root() / 'emulator')!r}))\n"
        "for length in (64, 96):\n"
        "    (chain,) = load_chains('specs/rmsnorm.py')\n"
        "    print(fusegen.compile(chain.at(N=length), 'hip:mi300x', on='emulator').report.ok)\n"
    )
    return f"(cd {root}; FUSEGEN_CACHE_DIR=$HERE PYTHONPATH={root} {sys.executable} {script})"


def in_a_namespace(script: str, here: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script that may mount file systems of its own; $HERE is `here`."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("`unshare --user --mount` is not allowed here, so no small or read-only disk can be made")
    done = subprocess.run([*unshare, "sh", "-ec", f"HERE={here}; {script}"], capture_output=True, text=True)
    if "mount:" in done.stderr:
        pytest.skip(f"no disk can be mounted here: {done.stderr.splitlines()[0]}")
    if "EmulatorUnavailable" in done.stderr:
        pytest.skip("the emulator needs a C++ compiler")
    return done


@pytest.mark.parametrize(
    ("disk", "reason"),
    [
        (
            "mount -t tmpfs -o mode=755,size=64k none $HERE; head -c 64k /dev/zero > $HERE/full",
            "No space left on device",
        ),
        ("mount -t tmpfs -o mode=755,ro none $HERE", "Read-only file system"),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_that_takes_nothing(root: Path, tmp_path: Path, disk: str, reason: str) -> None:
    """Kernels are compiled, and proven in the emulator, all the same; and one warning says that none is kept."""
    prove = proof(root, tmp_path)
    done = in_a_namespace(f"{disk}; {prove}; find $HERE -type f -size +0 ! -name full", tmp_path)
    assert done.stdout.split() == ["True", "True"], done.stderr  # and no file but the one that was there
    first, second = done.stderr.splitlines()
    assert first.startswith(f"the cache in {tmp_path} can't be written: {reason}")
    assert second.endswith("and are compiled anew each time; name another folder in FUSEGEN_CACHE_DIR")


def test_a_full_cache_that_is_read_only_serves(root: Path, tmp_path: Path) -> None:
    prove, lock = proof(root, tmp_path), "mount --bind $HERE $HERE; mount -o remount,bind,ro $HERE"
    done = in_a_namespace(f"{prove}; {lock}; export SHOW_LOG=1; {prove}", tmp_path)
    assert done.stdout.split() == ["True"] * 4, done.stderr
    assert "hit: " in done.stderr
    assert "miss: " not in done.stderr
    assert "can't be written" not in done.stderr


def test_a_write_that_breaks_off_leaves_nothing(
    small: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where no disk can be mounted: half of the bytes, then ENOSPC."""
    small.store(KEY, {}, b"old")
    opened = open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(bounds, "open", lambda *words, **more: Full(opened(*words, **more)), raising=False)
    for number in range(3):
        small.store(KEY, {}, b"new" * number)
    monkeypatch.undo()
    assert small.load(KEY, payload_of) == b"old"
    assert len(list(small.folder.glob("*"))) == len([small.path(KEY), bounds.TALLY, bounds.LOCK])
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


# ---------------------------------------------------------------- many processes

PROCESSES = 50


def hammer(folder: str, number: int) -> dict[str, int]:
    """Store, load, damage, evict and clear by turns, once all processes are there. Counts what came of it."""
    root = Path(folder)
    (root / f"ready-{number}").touch()
    while len(list(root.glob("ready-*"))) < PROCESSES:
        time.sleep(0.01)
    os.environ["FUSEGEN_CACHE_SIZE"] = "200K"
    chance = random.Random(number)
    counts = {"hits": 0, "misses": 0, "wrong": 0, "clears": 0}
    store = Store("kernels", root / "cache")
    for _ in range(80):
        key = replace(KEY, entry=f"kernel_{chance.randrange(30)}")
        found = store.load(key, payload_of)
        if found is None:
            counts["misses"] += 1
            store.store(key, {}, f"{key.entry}\n".encode() + bytes([number]) * chance.randrange(20_000))
        else:
            name, _, rest = found.partition(b"\n")
            counts["hits"] += 1
            counts["wrong"] += name != key.entry.encode() or rest != rest[:1] * len(rest)
        what = chance.random()
        if what < 0.05:  # somebody's broken tool, which does not write files whole
            with contextlib.suppress(FileNotFoundError):  # the folder is gone, which is no matter of ours
                store.path(key).write_bytes(entries.pack(key, {}, b"half")[: chance.randrange(150)])
        elif what < 0.08:
            clear(store.root)
            counts["clears"] += 1
        elif what < 0.09:
            shutil.rmtree(store.root, ignore_errors=True)
        elif what < 0.15:
            survey(store.root)
    return counts


def test_fifty_processes(tmp_path: Path) -> None:
    """No process fails, nobody reads half a file, and the cache ends within its bound."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once, and not by every process
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        counts = list(pool.map(hammer, [str(tmp_path)] * PROCESSES, range(PROCESSES)))
    total = {name: sum(each[name] for each in counts) for name in counts[0]}
    assert total["wrong"] == 0
    assert min(total["hits"], total["misses"], total["clears"]) > 50, total
    cache = tmp_path / "cache"
    (cache / bounds.TALLY).unlink(missing_ok=True)
    make_room(cache, 200 * 1024, 0)
    assert survey(cache)["kernels"].bytes <= 200 * 1024
    assert not [path for path in cache.glob(".*") if path.name not in (bounds.TALLY, bounds.LOCK)]


# ---------------------------------------------------------------- other users


WRITABLE = {"all may write": 0o777, "the group may write": 0o775}
PLACES: Mapping[str, Callable[[Store], Path]] = {
    "the root": lambda store: store.root,
    "the folder": lambda store: store.folder,
    "the entry": lambda store: store.path(KEY),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", WRITABLE)
def test_what_others_may_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, mode: str
) -> None:
    """Whoever may write an entry can make its checksum anew; what it holds would be run."""
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "cache"))
    store = Store("kernels")
    store.store(KEY, {}, b"code")
    assert store.load(KEY, payload_of) == b"code"
    where = PLACES[place](store)
    where.chmod(WRITABLE[mode])
    with caplog.at_level(logging.DEBUG, "fusegen.cache"):
        assert store.load(KEY, payload_of) is None
        store.store(KEY, {}, b"new")
    if place == "the entry":
        assert "is damaged: other users may write to it" in caplog.text
        assert store.load(KEY, payload_of) == b"new"  # replaced by one of our own
    else:
        (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert said.startswith(f"the cache in {where} is not used: other users may write to it, and what")
        assert f"compiled anew each time; chmod go-w {where}, or name another folder in FUSEGEN_CACHE_DIR" in said
        where.chmod(0o755)
        assert store.load(KEY, payload_of) == b"code"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("place", PLACES)
def test_what_belongs_to_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "cache"))
    store = Store("kernels")
    store.store(KEY, {}, b"code")
    os.chown(PLACES[place](store), 12345, -1)
    assert store.load(KEY, payload_of) is None


def test_folders_and_files_are_safe_under_any_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """002 is a usual one, and would let a group write."""
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        store = Store("kernels")
        store.store(KEY, {}, b"code")
    finally:
        os.umask(before)
    assert store.load(KEY, payload_of) == b"code"


# ---------------------------------------------------------------- many processes that want the same


def make_slowly(folder: str) -> bool:
    """Whether this process had to make the entry."""
    store = Store("kernels", Path(folder))
    with store.making(KEY) as waited:
        if waited and store.load(KEY, payload_of) == b"code":
            return False
        time.sleep(0.3)
        store.store(KEY, {}, b"code")
    return True


def test_one_makes_and_the_others_wait(tmp_path: Path) -> None:
    with ProcessPoolExecutor(6, mp_context=multiprocessing.get_context("spawn")) as pool:
        made = list(pool.map(make_slowly, [str(tmp_path)] * 6))
    assert 1 <= sum(made) <= 2  # one that starts when the first has ended finds no lock, as it would find the entry


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "PATIENCE_S", 0.1)
    store = Store("kernels", tmp_path)
    with store.making(KEY) as first, store.making(KEY) as second:
        assert not first
        assert second


@pytest.mark.parametrize("why", ["nothing is kept", "no folder can be made", "there are no locks"])
def test_nobody_waits_where_nothing_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    folder = tmp_path / "cache"
    if why == "nothing is kept":
        monkeypatch.setenv("FUSEGEN_CACHE_SIZE", "0")
    elif why == "no folder can be made":
        folder.write_text("in the way")
    else:
        monkeypatch.setattr("filelock.FileLock.acquire", raises(NotImplementedError("flock")))
    store = Store("kernels", folder)
    with store.making(KEY) as first, store.making(KEY) as second:
        assert not first
        assert not second
    assert why != "nothing is kept" or not folder.exists()


def raises(error: Exception) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call
