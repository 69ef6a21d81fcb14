"""Journals on disk: a thread that writes lines, so that steps do not wait for it, and the reader."""

from __future__ import annotations

import gzip
import os
import queue
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import orjson

from ..errors import ConfigError, EngineError, InvariantError
from .journal_lines import Line

MAX_PENDING_LINES = 20_000      # some 60 MB at 32 rows a step: a disk that is so far behind will not catch up
GATHER_SECONDS = 0.1            # lines that come within it are written together
CLOSE_SECONDS = 10.0            # for the last lines
GZIP_MAGIC = b"\x1f\x8b"
EVENTS = {"header", "add", "refuse", "fork", "abort", "expire", "switch", "step", "lost"}


class JournalDropped(EngineError):
    """The journal ends here; the engine goes on."""


class JournalError(EngineError):
    """A file that is no journal, or a damaged one."""


def check_writable(path: str) -> None:
    """Raises ConfigError where a journal could not be made. Makes nothing yet."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path):
        raise ConfigError(f"journal {path}: cannot be written: it is a directory")
    if not os.path.isdir(folder):
        raise ConfigError(f"journal {path}: cannot be written: there is no directory {folder}")
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(f"journal {path}: cannot be written: permission denied")


class LineFile:
    """Appends lines to a file from a thread of its own. An older file of that name is kept as FILE.1."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError where the file cannot be made."""
        self._path = path
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._failure: str | None = None
        self._is_told = False    # somebody knows of the failure
        self._is_closing = threading.Event()
        try:
            if os.path.isfile(path) and os.path.getsize(path):
                os.replace(path, f"{path}.1")
            self._file: BinaryIO = open(path, "wb", buffering=0)    # noqa: SIM115 the thread closes it
        except OSError as error:
            raise ConfigError(f"journal {path}: cannot be written: {error.strerror or error}") from error
        self._thread = threading.Thread(target=self._write_all, name="paceline-journal", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        if self._failure is None and self._lines.qsize() >= MAX_PENDING_LINES:
            self._failure = f"the disk is {MAX_PENDING_LINES} lines behind"
        if self._failure is not None:
            self._is_told = True
            raise JournalDropped(f"{self._path}: {self._failure}; the journal ends, the engine goes on")
        self._lines.put(line)

    def close(self) -> str | None:
        self._lines.put(None)
        self._is_closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._failure = f"the last lines were not written within {CLOSE_SECONDS:g} seconds"
        return None if self._failure is None or self._is_told else f"{self._path}: {self._failure}"

    def _write_all(self) -> None:
        with self._file:
            while self._failure is None:
                lines = self._gathered()
                try:
                    self._write(b"".join(line for line in lines if line is not None))
                except OSError as error:
                    self._failure = error.strerror or str(error)
                if lines[-1] is None:
                    return

    def _gathered(self) -> list[bytes | None]:
        """Waits for a line, and a moment for more."""
        lines = [self._lines.get()]
        self._is_closing.wait(GATHER_SECONDS)
        while lines[-1] is not None and not self._lines.empty():
            lines.append(self._lines.get())
        return lines

    def _write(self, content: bytes) -> None:
        while content:
            content = content[self._file.write(content) :]


def read_journal(path: str | Path) -> Iterator[tuple[int, Line]]:
    """(line number from 1, line) of a journal, gzipped or not, the header first.

    A last line without its newline is where the engine died or the disk was full: the journal ends before it. Anything
    else that cannot be read raises JournalError with the line's number; a file that cannot be opened, ConfigError.
    """
    try:
        number, content = 0, b""
        with opened(path) as file, suppress(EOFError):    # a gzipped one that ends early ends like a plain one
            for number, content in enumerate(file, start=1):
                if not content.endswith(b"\n"):
                    break
                yield number, _parsed(path, number, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except zlib.error as error:
        raise JournalError(f"{path}: {error}") from error
    if number <= 1 and not content.endswith(b"\n"):
        raise JournalError(f"{path}: holds no whole line, no journal")


def opened(path: str | Path) -> BinaryIO:
    """A journal as it was before it was compressed, if it was."""
    with open(path, "rb") as file:
        is_gzipped = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path)) if is_gzipped else open(path, "rb")


@contextmanager
def at_line(path: str | Path, number: int) -> Iterator[None]:
    """What cannot be made sense of inside is told with the line it stands in."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise JournalError(f"{path}, line {number}: not a line of this version: "
                           f"{type(error).__name__}: {error}") from error
    except InvariantError as error:    # a damaged line, or a bug of ours: whoever sees it wants to know where
        error.add_note(f"while replaying {path}, line {number}")
        raise


def _parsed(path: str | Path, number: int, content: bytes) -> Line:
    try:
        line = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise JournalError(f"{path}, line {number}: not a line of a journal: {error}") from error
    event = line.get("event") if isinstance(line, dict) else None
    if event not in EVENTS or (event == "header") != (number == 1):
        raise JournalError(f"{path}, line {number}: not a line of a journal: event {event!r}")
    return line
