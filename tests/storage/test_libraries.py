"""Libraries that a process of its own compiles: kept whole, whoever waits or does not, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusegen.errors import CompileError, MissingError
from fusegen.runtime import background
from fusegen.storage import Store, libraries
from fusegen.storage.libraries import LibraryKey, kept

ROOT = Path(__file__).resolve().parents[2]
BOOKS = ("cache/.tally", "cache/.lock")
KEY = LibraryKey("thing", "any", "0" * 64, "compile")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The cache and what is temporary are in here, and no process is left when a test is over."""
    for name, variable in (("cache", "FUSEGEN_CACHE_DIR"), ("temporary", "TMPDIR")):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield tmp_path
    until(lambda: not working(tmp_path))


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never comes"
        time.sleep(0.02)


def working(place: Path) -> list[int]:
    """The processes that name this folder: those of its compilers."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                words = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if bytes(place) in words:
                found.append(int(process.name))
    return found


def left(place: Path) -> list[str]:
    """What there is beside whole entries, and the cache's own books."""
    files = [path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()]
    books = (*BOOKS, "cache/.making-", "cache/extensions/thing-any-")
    return [name for name in files if not name.startswith(books)]


def compiler(place: Path, text: str) -> list[str]:
    """A command that runs `text`, which finds where to write in `to`, and names the folder of the test."""
    script = place.parent / f"{place.name}-compiler.py"
    script.write_text(f"import os, sys, time, subprocess\nto = sys.argv[-1]\n{textwrap.dedent(text)}")
    return [sys.executable, str(script), str(place)]


def made(command: list[str], **options: Any) -> bytes:
    return kept(KEY, lambda: command, ".so", Path.read_bytes, **options)


def stored() -> bytes | None:
    return Store("extensions").load(KEY, lambda facts, data: data)


def test_it_is_made_once(place: Path) -> None:
    command = compiler(place, "open(to, 'w').write('one')")
    assert made(command) == b"one"
    assert made(["no compiler"]) == b"one"
    assert left(place) == []


def test_a_large_library_goes_through(place: Path) -> None:
    assert len(made(compiler(place, "open(to, 'wb').write(bytes(5_000_000))"))) == 5_000_000


def test_the_cache_can_not_be_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "file").touch()
    monkeypatch.setenv("FUSEGEN_CACHE_DIR", str(place / "file" / "below"))
    assert made(compiler(place, "open(to, 'w').write('one')")) == b"one"


REFUSALS = {
    "it says why": ("print('line 3 is wrong'); sys.exit(1)", "refuses it\nline 3 is wrong"),
    "it says nothing": ("sys.exit(7)", "refuses it"),
    "it writes nothing": ("", "No such file"),
    "it is no program": (None, "No such file"),
}


@pytest.mark.parametrize("how", REFUSALS)
def test_a_compiler_that_refuses(place: Path, how: str) -> None:
    text, words = REFUSALS[how]
    with pytest.raises(CompileError, match=words):
        made(["no-such-program", str(place)] if text is None else compiler(place, text))
    assert stored() is None
    assert left(place) == []


def test_a_compiler_that_hangs_is_ended_with_all_it_started(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it started holds the pipe open that the compiler's words come by."""
    text = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', to]); time.sleep(600)"
    monkeypatch.setattr(libraries, "LIMIT_S", 1)
    begun = time.monotonic()
    with pytest.raises(CompileError, match="more than 1 s"):
        libraries.run([*compiler(place, text), "-o", str(place)])
    assert time.monotonic() - begun < 30
    until(lambda: not working(place))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGALRM])
def test_the_process_is_ended(place: Path, how: int) -> None:
    """As when a machine goes down, or when it waits for a disk for ever: nothing stays."""
    text = "open(to, 'w').write('half'); open(to + 's', 'w').write('more'); time.sleep(600)"

    def wait(child: libraries.Child) -> tuple[bytes, bytes]:
        until(lambda: any((place / "temporary").rglob("*.sos")))
        os.kill(child.pid, how)
        return child.communicate()

    with pytest.raises(CompileError, match="compiling was ended"):
        made(compiler(place, text), wait=wait)
    assert stored() is None
    assert left(place) == []


def test_nobody_is_left_to_wait(place: Path) -> None:
    """The one who asked ends at once; the library is made and kept all the same, and others find it."""
    command = compiler(place, "time.sleep(1); open(to, 'w').write('late')")
    code = f"""
        import sys
        from functools import partial
        from fusegen.runtime import background
        from fusegen.storage import libraries
        from tests.storage.test_libraries import made
        background.begun(partial(made, {command!r}, wait=background.wait), "asking")
        import time
        time.sleep(0.2)
    """
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert stored() is None, f"it ended after {time.monotonic() - begun:.1f} s"
    until(lambda: stored() == b"late")
    until(lambda: not working(place))
    assert left(place) == []


def test_it_is_compiled_in_a_session_of_its_own(place: Path) -> None:
    """What interrupts a terminal's programs does not reach it."""
    found = made(compiler(place, "open(to, 'w').write(f'{os.getsid(0)} {os.getpgid(0)}')")).split()
    assert int(found[0]) != os.getsid(0)
    assert found[0] != found[1]


def test_this_python_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another program that has Python in it is not."""
    assert libraries.python() == sys.executable
    version = "python{}.{}".format(*sys.version_info)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / version).touch()
    (tmp_path / "server").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "server"))
    monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    assert libraries.python() == str(tmp_path / "bin" / version)
    (tmp_path / "bin" / version).unlink()
    with pytest.raises(MissingError, match=f"no {version} here to compile with: this process is .*server"):
        libraries.python()
    monkeypatch.setattr(sys, "executable", None)
    with pytest.raises(MissingError, match="nameless"):
        libraries.python()


# ---------------------------------------------------------------- in the background


def run(code: str) -> subprocess.CompletedProcess[str]:
    head = "import os, sys, threading, time\nfrom fusegen.runtime import background\n"
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", head + textwrap.dedent(code)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_what_work_returns_and_raises() -> None:
    assert background.begun(lambda: 3, "three").result(60) == 3
    with pytest.raises(ZeroDivisionError):
        background.begun(lambda: 1 // 0, "none").result(60)


def test_the_end_waits_for_work_and_none_begins_after_it() -> None:
    done = run("""
        def work():
            begun.set()
            time.sleep(0.5)
            print("done")
        begun = threading.Event()
        background.begun(work, "one")
        begun.wait()
        background.end()
        late = background.begun(lambda: print("too late"), "other")
        time.sleep(0.2)
        print(late.done())
    """)
    assert (done.stdout, done.stderr) == ("done\nFalse\n", "")


def test_a_forked_process_ends_while_its_parent_works() -> None:
    done = run("""
        import warnings
        def work():
            begun.set()
            go.wait()
        begun, go = threading.Event(), threading.Event()
        background.begun(work, "one")
        begun.wait()
        warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
        child = os.fork()
        if not child:
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        go.set()
    """)
    assert done.stdout == "3\n", done.stderr
