"""The decision core is `mypy --strict` clean."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .source import DECISION_CORE, ROOT, name_of


def test_the_decision_core_is_strictly_typed() -> None:
    pytest.importorskip("mypy")
    modules = [argument for path in DECISION_CORE for argument in ("-m", name_of(path))]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", *modules]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
