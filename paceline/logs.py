"""What a server writes about itself: one record a line on standard error, as text for people or as JSON for machines.

A record may carry `fields` (`extra={"fields": {...}}`), plain values that become `key=value` or JSON members. A thread
of its own writes, so that a full pipe never stops the event loop; what does not fit its queue is dropped and counted.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
MAX_QUEUED_RECORDS = 10_000
FLUSH_SECONDS = 1.0


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, event, the record's fields, and `traceback` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        members = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name,
                   "event": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            members["traceback"] = self.formatException(record.exc_info)
        return json.dumps(members, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, event, then fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_shown(value)}" for name, value in getattr(record, "fields", {}).items())
        line = f"{_time(record)} {record.levelname.lower():7} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: Any) -> str:
    """One word: what holds a blank, a quote or a control character is quoted."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


class PatientHandler(logging.Handler):
    """Writes in a thread of its own. Never blocks its caller, and gives up after FLUSH_SECONDS at the end."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.num_dropped = 0
        self._has_reader = True
        self._stream = stream
        self._queue: queue.Queue[logging.LogRecord | threading.Event] = queue.Queue(MAX_QUEUED_RECORDS)
        threading.Thread(target=self._write, name="paceline-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        is_written = threading.Event()
        try:
            self._queue.put_nowait(is_written)
        except queue.Full:
            return
        if self._has_reader:
            is_written.wait(FLUSH_SECONDS)

    def _write(self) -> None:
        while True:
            record = self._queue.get()
            if isinstance(record, threading.Event):
                record.set()
                continue
            try:
                dropped, self.num_dropped = self.num_dropped, 0
                if dropped:
                    self._put(logging.makeLogRecord({
                        "name": "paceline.log", "levelname": "WARNING",
                        "msg": "records were dropped: nobody takes them", "fields": {"num_dropped": dropped}}))
                self._put(record)
            except (OSError, ValueError):
                self._has_reader = False    # standard error is closed: whoever waits need not
                return

    def _put(self, record: logging.LogRecord) -> None:
        self._stream.write(self.format(record) + "\n")
        self._stream.flush()


@contextmanager
def configured(log_format: str, log_level: str) -> Iterator[None]:
    """The log as `configure` makes it, as long as the block runs."""
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in _loggers()]
    handler = configure(log_format, log_level)
    try:
        yield
    finally:
        handler.flush()
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def _loggers() -> tuple[logging.Logger, logging.Logger]:
    return logging.getLogger(), logging.getLogger("paceline")


def configure(log_format: str, log_level: str) -> PatientHandler:
    """Sends this package's records from log_level on, and everybody else's warnings, to standard error."""
    handler = PatientHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root, ours = _loggers()
    root.handlers, ours.handlers = [handler], [handler]
    root.setLevel(logging.WARNING)
    ours.setLevel(log_level.upper())
    ours.propagate = False
    return handler
