"""Units compiled with wide instruction sets export nothing the linker could hand to another path."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

# The folder named, or what `make install` built inside this checkout.
BUILT = Path(__file__).parents[2] / "build"
BUILDS = [Path(named)] if (named := os.environ.get("PACELINE_KERNELS_PATH")) else sorted(BUILT.glob("cp*"))


@pytest.mark.parametrize("name", ("portable", "avx2", "avx512"))
def test_a_path_has_no_shared_symbols(name: str) -> None:
    objects = [path for build in BUILDS for path in sorted(build.glob(f"CMakeFiles/kernels_{name}.dir/csrc/*.o"))]
    nm = shutil.which("nm")
    if not objects or nm is None:
        pytest.skip("needs a build folder (make install, or PACELINE_KERNELS_PATH), and nm")
    listing = subprocess.run([nm, "-C", *map(str, objects)], capture_output=True, text=True, check=True).stdout
    rows = [line for line in listing.splitlines() if line[16:17] + line[18:19] == "  "]    # others name the objects
    symbols = [line[17:] for line in rows if line[17] in "TDRBWVuUw"]
    assert any(f"paceline::{name}::linear(" in symbol for symbol in symbols)
    weak = [symbol for symbol in symbols if symbol[0] in "WVuw"]
    foreign = [symbol for symbol in symbols if symbol[0] in "TDRB" and f"paceline::{name}::" not in symbol
               and symbol[2:] != f"paceline::kernels_{name}"]
    assert weak == [] and foreign == []
