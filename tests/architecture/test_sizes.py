"""A function is one paragraph, a file one idea."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .source import MODULES, PACKAGE, tree_of

MAX_FUNCTION_LINES = 40
MAX_PARAMETERS = 6
MAX_FILE_LINES = 400


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_functions_and_files_stay_small(path: Path) -> None:
    long = [f.name for f in functions(path) if (f.end_lineno or f.lineno) - f.lineno + 1 > MAX_FUNCTION_LINES]
    wide = [f.name for f in functions(path) if num_parameters(f) > MAX_PARAMETERS]
    assert (long, wide) == ([], [])
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
