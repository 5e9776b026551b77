"""`new`, `diff` and `watch`: a spec to start from, how a kernel changed, and both at each save."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusegen.cli.app import app
from tests.tools import needs_compiler

RUN = CliRunner()
ROOT = Path(__file__).resolve().parents[2]
# A shell's background jobs, as tests may be one, ignore Ctrl-C, and hand that on to what they start.
STARTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from fusegen.cli.app import main
main()
"""


def said(*words: str, code: int = 0) -> str:
    result = RUN.invoke(app, list(words))
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    said("new", "my_norm", "--in", str(tmp_path))
    return tmp_path / "my_norm.py"


def test_a_new_spec_is_a_chain_that_plans(spec: Path) -> None:
    assert said("plan", str(spec)).startswith("my_norm  bf16[M, N], bf16[N] -> bf16[M, N]  at M=8192 N=4096")


def test_no_file_is_written_over_and_no_name_taken_twice(spec: Path) -> None:
    assert "is there already" in said("new", "my_norm", "--in", str(spec.parent), code=2)
    for name in "chain", "class", "my-norm", "x":
        assert "can't be a chain's name" in said("new", name, "--in", str(spec.parent), code=2)
    assert [path.name for path in spec.parent.iterdir()] == ["my_norm.py"]


def test_how_a_kernel_differs_between_targets(spec: Path) -> None:
    text = said("diff", str(spec), "--target", "cuda:h200", "--against", "hip:mi300x")
    assert "--- my_norm (cuda:h200)" in text
    assert "+// target   hip gfx942" in text
    assert "are the same" in said("diff", str(spec), "--target", "cuda:h200", "--against", "cuda:h200")
    for words in (), ("--against", "cuda:h200", "--from", "HEAD"):
        assert "compares with one thing" in said("diff", str(spec), *words, code=2)


def test_how_a_kernel_changed_since_a_revision(spec: Path) -> None:
    def git(*words: str) -> None:
        own = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *own, "-C", str(spec.parent), *words], check=True, capture_output=True)

    git("init")
    git("add", spec.name)
    git("commit", "-m", "first")
    spec.write_text(spec.read_text().replace("F.rmsnorm(x, gain)", "F.rmsnorm(x, gain) + x"))
    facts = json.loads(said("diff", str(spec), "--target", "cuda:h200", "--from", "HEAD", "--json"))
    assert (facts["from"], facts["to"]) == ("HEAD", "now")
    assert "+//         return F.rmsnorm(x, gain) + x" in facts["diff"]
    assert "git has no my_norm.py at nothing" in said("diff", str(spec), "--from", "nothing", code=2)


@needs_compiler
def test_each_save_is_validated_and_a_mistake_ends_nothing(spec: Path) -> None:
    text = spec.read_text()
    command = [sys.executable, "-c", STARTED, "watch", str(spec), "--target", "cuda:h200", "--on", "emulator"]
    with subprocess.Popen(
        [*command, "--set", "N=64"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as shell:
        try:
            assert b"us by the cost model" in until(shell, b"us by the cost model")
            spec.write_text(text.replace("rmsnorm(x, gain)", "nothing(x)"))
            assert b"my_norm.py:12" in until(shell, b"my_norm.py:12")
            spec.write_text(text.replace("F.rmsnorm(x, gain)", "F.rmsnorm(x, gain) + x"))
            shown = until(shell, b"us by the cost model")
            assert b"+//         return F.rmsnorm(x, gain) + x" in shown
            assert b"ok    my_norm" in shown
            shell.send_signal(signal.SIGINT)
            assert shell.wait(20) == 0
        finally:
            shell.kill()


def until(shell: subprocess.Popen[bytes], wanted: bytes, seconds: float = 120) -> bytes:
    """What a command has said up to `wanted`, or till the time is over."""
    assert shell.stdout is not None
    shown, end = b"", time.monotonic() + seconds
    while wanted not in shown and time.monotonic() < end and shell.poll() is None:
        if select.select([shell.stdout], [], [], 1)[0]:
            shown += os.read(shell.stdout.fileno(), 65536)
    return shown


def test_only_files_are_watched(tmp_path: Path) -> None:
    assert "is no file that can be watched" in said("watch", str(tmp_path / "none.py"), "--on", "emulator", code=2)
