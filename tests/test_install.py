"""What `make` installs: the compiled kernels where there is a compiler, and nothing heavy by default."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "transformers", "tensorflow", "onnxruntime", "scipy", "pandas"}


def project() -> dict[str, object]:
    found: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def names_of(requirements: object) -> set[str]:
    assert isinstance(requirements, list)
    return {re.split(r"[^A-Za-z0-9_-]", text)[0].lower() for text in requirements}


def test_the_kernels_are_compiled_where_they_can_be() -> None:
    has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    has_headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    if not (has_compiler and has_headers):
        pytest.skip("no C++ compiler or no headers of Python here: the numpy path is tested instead")
    assert importlib.util.find_spec("paceline._kernels") is not None, "the kernels were not built; see `make install`"


def test_the_default_install_is_light() -> None:
    assert not names_of(project()["dependencies"]) & HEAVY


def test_every_named_requirement_is_pinned() -> None:
    pins = {line.split("==")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    named = names_of(project()["dependencies"]).union(*(names_of(extra) for extra in extras.values()))
    assert named <= pins


def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    """Not only modules: `paceline info --quality` reads a text."""
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed here")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path,
                    f"--config-settings=build-dir={tmp_path}/build", ROOT],
                   env={**os.environ, "PACELINE_NO_KERNELS": "1"}, check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "paceline").rglob("*")
             if path.is_file() and path.suffix in (".py", ".txt", ".css", ".gz")}
    assert {"paceline/runner/quality.txt", "paceline/bench/data/report.css"} <= files
    assert files <= set(zipfile.ZipFile(wheel).namelist())
