"""Loads the compiled kernels: paceline._kernels as installed, or the file PACELINE_KERNELS_PATH names.

PACELINE_KERNELS_PATH may be the .so itself or the build folder that holds it. Without kernels these tests are skipped.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load_from(path: Path) -> ModuleType:
    if path.is_dir():
        path = next(path.glob("_kernels*.so"))
    spec = importlib.util.spec_from_file_location("paceline._kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paceline._kernels"] = module
    spec.loader.exec_module(module)
    return module


def load_kernels() -> ModuleType | None:
    chosen = os.environ.get("PACELINE_KERNELS_PATH")
    if "paceline._kernels" in sys.modules:
        return sys.modules["paceline._kernels"]
    if chosen:
        return _load_from(Path(chosen))
    try:
        return importlib.import_module("paceline._kernels")
    except ModuleNotFoundError:
        return None


KERNELS = load_kernels()
PATHS: list[str] = KERNELS.paths() if KERNELS is not None else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if KERNELS is None:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="paceline._kernels is not built"))


@pytest.fixture(scope="session")
def kernels() -> ModuleType:
    if KERNELS is None:
        pytest.skip("paceline._kernels is not built")
    return KERNELS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `path` runs once on every path this machine has."""
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", PATHS or ["none"])
