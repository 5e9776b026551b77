"""The account of what tests cost: every test counts once, with the processes that it waits for."""

from __future__ import annotations

import subprocess
import sys

from tests.costs import DEAREST, cpu_seconds, table


def test_folders_and_files_are_added_up_dearest_first() -> None:
    seconds = {f"tests/cheap/test_{number}.py": [0.5, 0.25] for number in range(DEAREST)}
    lines = [line.split() for line in table({**seconds, "tests/test_dear.py": [9.0]})]
    assert lines[0] == ["16.5", "21", "in", "all"]
    assert lines[1:3] == [["9.0", "1", "tests/test_dear.py"], ["7.5", "20", "tests/cheap"]]
    assert len(lines) == 4 + DEAREST
    assert lines[4] == lines[1]


def test_a_process_that_was_waited_for_counts() -> None:
    before = cpu_seconds()
    subprocess.run([sys.executable, "-S", "-c", "while __import__('time').process_time() < 0.2: pass"], check=True)
    assert cpu_seconds() - before > 0.15
