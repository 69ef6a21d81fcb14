"""Places that docs/walk.md names as `path/file.py: function` or `path/file.py: Class.method` must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .source import PACKAGE, ROOT, tree_of

WALK = ROOT / "docs" / "walk.md"
PLACE = re.compile(r"`([\w/]+\.py): ([\w.]+)(?:\(\))?`")


def exists(path: Path, dotted: str) -> bool:
    body: list[ast.stmt] = tree_of(path).body
    for name in dotted.split("."):
        found = [node for node in body
                 if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name]
        if not found:
            return False
        body = found[0].body
    return True


def test_every_place_of_the_walk_exists() -> None:
    places = PLACE.findall(WALK.read_text(encoding="utf-8"))
    assert places, "docs/walk.md names no place as `path/file.py: function`"
    lost = []
    for file, dotted in places:
        path = PACKAGE / file.removeprefix("paceline/")
        if not path.is_file() or not exists(path, dotted):
            lost.append(f"{file}: {dotted}")
    assert not lost
