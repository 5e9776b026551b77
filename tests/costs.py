"""What tests cost: seconds of CPU by folder and of the dearest files, at the end of a run of many.

Seconds on the clock depend on what else the machine does. Those of the processor count what a test takes, with the
processes that it started and waited for: compilers, commands, workers of the fuzz.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import pytest

from tests import turns

MANY = 300  # tests: of fewer there is nothing to say
DEAREST = 10  # files
KEY = "cpu_s"


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Costs:
    """The plugin: each worker measures its tests, and the process that started them adds up."""

    def __init__(self, update: bool = False) -> None:
        """With `update`, the ledger of dear tests is written at the end."""
        self.update = update
        self.started = 0.0
        self.seconds: dict[str, float] = {}  # of each case

    def pytest_runtest_logstart(self) -> None:
        self.started = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append((KEY, cpu_seconds() - self.started))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            seconds: Any = dict(report.user_properties).get(KEY, 0.0)
            self.seconds[report.nodeid] = seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.seconds) >= MANY:
            terminalreporter.section("seconds of CPU", "-")
            files: dict[str, list[float]] = defaultdict(list)
            for case, seconds in self.seconds.items():
                files[case.partition("::")[0]].append(seconds)
            for line in table(files):
                terminalreporter.write_line(line)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.update and not hasattr(session.config, "workerinput"):
            turns.write(self.seconds.items())


def table(seconds: Mapping[str, list[float]]) -> Iterator[str]:
    """Seconds and number of tests, dearest first."""
    folders: dict[str, list[float]] = defaultdict(list)
    for file, each in seconds.items():
        folders["/".join(file.split("/")[:2])] += each

    def lines(groups: Mapping[str, list[float]], most: int) -> Iterator[str]:
        for name, each in sorted(groups.items(), key=lambda group: -sum(group[1]))[:most]:
            yield f"{sum(each):8.1f} {len(each):6} {name}"

    yield from lines({"in all": [one for each in seconds.values() for one in each]}, 1)
    yield from lines(folders, len(folders))
    yield "the dearest files:"
    yield from lines(seconds, DEAREST)
