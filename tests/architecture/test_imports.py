"""Who may import whom. Imports point down; the decision core sees the standard library, no clock, dice or threads.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from .source import DECISION_CORE, MODULES, PACKAGE, imports, internal_imports, name_of, path_of, tree_of

BANNED = {"torch", "numpy", "time", "random", "secrets", "logging", "asyncio", "threading", "multiprocessing",
          "transformers"}

# A part of the package -> the parts it may import, beside itself. Files on top are parts of their own.
BASE = {"errors", "request", "clock", "config"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "request": {"errors"},
    "clock": {"errors"},
    "logs": set(),
    "config": {"errors"},
    "presets": {"errors", "config"},
    "policy_book": {"errors", "config", "presets", "sched", "engine"},
    "kv": BASE,
    "sched": BASE | {"kv"},
    "ops": BASE,
    "model": BASE | {"ops"},
    "runner": BASE | {"kv", "sched", "ops", "model"},
    "engine": BASE | {"kv", "sched", "model"},
    "sim": BASE | {"presets", "kv", "sched", "engine"},
    "server": BASE | {"logs", "kv", "sched", "model", "engine"},
    "bench": BASE | {"presets", "kv", "sched", "ops", "model", "engine", "sim"},
}
COMPOSITION = {"build", "info", "journals", "cli", "commands", "__init__", "__main__"}    # may import anything


def part_of(path: Path) -> str:
    """A module NAME_command.py is the command line's, wherever it lies: it brings its part and build.py together."""
    return "commands" if path.stem.endswith("_command") else path.relative_to(PACKAGE).with_suffix("").parts[0]


def ids(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", DECISION_CORE, ids=ids)
def test_the_decision_core_is_pure(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & BANNED
    assert roots <= set(sys.stdlib_module_names) | {"paceline"}


def test_nothing_the_decision_core_loads_is_impure() -> None:
    seen: set[str] = set()
    todo = [name_of(path) for path in DECISION_CORE]
    while todo:
        module = todo.pop()
        if module in seen or path_of(module) == PACKAGE / "__init__.py":
            continue
        seen.add(module)
        assert not {name.split(".")[0] for name in imports(path_of(module))} & BANNED, module
        todo += internal_imports(path_of(module))


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    if part in COMPOSITION:
        return
    assert part in ALLOWED, f"say in ALLOWED what {part} may import"
    above = {part_of(path_of(module)) for module in internal_imports(path)} - {part} - ALLOWED[part]
    assert not above


@pytest.mark.parametrize("path", MODULES, ids=ids)
def test_internal_imports_are_lazy_only_in_the_composition_root(path: Path) -> None:
    if part_of(path) in COMPOSITION:
        return
    lazy = {
        name
        for function in ast.walk(tree_of(path)) if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in imports(path, nodes=ast.walk(function)) if name.split(".")[0] == "paceline"
    }
    assert not lazy


def test_no_import_cycles() -> None:
    graph = {name_of(path): internal_imports(path) for path in MODULES if path != PACKAGE / "__init__.py"}
    finished: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module):], module))
        if module not in finished:
            for imported in sorted(graph.get(module, ())):
                visit(imported, (*trail, module))
            finished.add(module)

    for module in graph:
        visit(module, ())
