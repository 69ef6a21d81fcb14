"""Reads the package as text: which module imports what, where. Nothing is imported to find out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "paceline"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))
DECISION_CORE = [
    path for path in MODULES
    if path.relative_to(PACKAGE).parts[0] in ("kv", "sched")
    or path.relative_to(PACKAGE).as_posix() in ("request.py", "errors.py", "engine/core.py", "engine/events.py",
                                                "engine/messages.py")
]


def name_of(path: Path) -> str:
    """paceline/kv/manager.py -> paceline.kv.manager; a package's __init__ is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _is_type_checking(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING")


def walk_runtime(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`, which never run."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not _is_type_checking(child):
            yield from walk_runtime(child)


def _names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        package = name_of(path).split(".")
        package = package if path.name == "__init__.py" else package[:-1]
        base = ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))
    return [f"{base}.{alias.name}" for alias in node.names]


def imports(path: Path, *, with_types: bool = False, nodes: Iterator[ast.AST] | None = None) -> set[str]:
    """Dotted names a module imports, relative ones resolved; `from a import b` gives a.b."""
    if nodes is None:
        nodes = ast.walk(tree_of(path)) if with_types else walk_runtime(tree_of(path))
    return {name for node in nodes for name in _names(node, path)}


_BY_NAME = {name_of(path): path for path in MODULES}


def module_of(dotted: str) -> str | None:
    """The module of this package that a dotted import name means, if any."""
    while dotted and dotted not in _BY_NAME:
        dotted = dotted.rpartition(".")[0]
    return dotted or None


def internal_imports(path: Path) -> set[str]:
    return {module for name in imports(path) if (module := module_of(name)) is not None} - {name_of(path)}


def path_of(module: str) -> Path:
    return _BY_NAME[module]
