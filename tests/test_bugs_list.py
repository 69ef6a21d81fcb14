"""docs/bugs.md names tests and places as `path/file.py: name`: all must exist, and no bug may be listed twice."""

from __future__ import annotations

import re
from collections import Counter

from .architecture.source import ROOT
from .architecture.test_walk import exists

ROWS = [line.split("|") for line in (ROOT / "docs" / "bugs.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| B\d+ ", line)]
MENTION = re.compile(r"`((?:tests|paceline)/[^`]*)`")
PLACE = re.compile(r"([\w/]+\.py): ([\w.]+)")
NUMBERS = [row[1].strip() for row in ROWS]


def test_every_test_and_place_named_exists() -> None:
    lost, num_tests = [], 0
    for _, number, _, cell, _ in ROWS:
        for mention in MENTION.findall(cell):
            found = PLACE.fullmatch(mention)
            if found is None or not (ROOT / found[1]).is_file() or not exists(ROOT / found[1], found[2]):
                lost.append(f"{number.strip()} {mention}")
            num_tests += mention.startswith("tests/")
    assert not lost
    assert num_tests, "docs/bugs.md names no test"


def test_no_bug_is_listed_twice() -> None:
    assert NUMBERS
    assert [number for number, count in Counter(NUMBERS).items() if count > 1] == []


def test_every_bug_has_a_test_a_place_or_is_open() -> None:
    bare = [row[1].strip() for row in ROWS if "open: " not in row[3] and not MENTION.search(row[3])]
    assert not bare
