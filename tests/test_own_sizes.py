"""What `python -m tests.own_sizes` says of a spec: right, refused, or what went wrong."""

from __future__ import annotations

from typing import Any

import pytest

from fusegen.errors import CompileError
from tests import own_sizes
from tests.specs import SHIPPED


def test_jobs_are_every_spec_at_its_own_sizes_and_at_others() -> None:
    found = list(own_sizes.jobs([], (1, 77), "cuda:h200", "none"))
    assert len(found) == 3 * len(SHIPPED)
    assert found[:2] == [(name, 0, "cuda:h200", "none") for name in list(SHIPPED)[:2]]
    assert list(own_sizes.jobs(["mlp"], (), "cuda:h200", "gpu")) == [("mlp", 0, "cuda:h200", "gpu")]


def test_a_spec_is_right_refused_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_sizes.outcome(("bias_relu", 33, "cuda:h200", "none"))[1:3] == ("right", "")
    assert own_sizes.outcome(("fp8_gemm", 0, "cuda:a100", "none"))[1] == "refused"

    def refuses(_: Any) -> Any:
        raise CompileError("no such kernel")

    monkeypatch.setattr(own_sizes, "build_candidates", refuses)
    assert own_sizes.outcome(("bias_relu", 0, "cuda:h200", "none"))[1:3] == ("wrong", "CompileError: no such kernel")
    monkeypatch.setattr(own_sizes, "units", lambda chain, target: 1 / 0)
    assert own_sizes.outcome(("bias_relu", 0, "cuda:h200", "none"))[1] == "crash"
