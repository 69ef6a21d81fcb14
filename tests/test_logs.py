"""Records as lines: for people, for machines, and for a reader that has stopped reading."""

from __future__ import annotations

import io
import json
import logging
import os

import pytest

from paceline import logs
from paceline.logs import JsonFormatter, PatientHandler, TextFormatter, configured


def record(text: str = "request", level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("paceline.access", level, __file__, 1, text, None, None)
    made.fields = fields
    return made


def test_a_json_line_is_one_object_with_the_fields_as_members() -> None:
    line = JsonFormatter().format(record(id="a\nb", status=200, queue_seconds=0.5, route="/x \" ü"))
    assert "\n" not in line
    parsed = json.loads(line)
    assert parsed["time"].endswith("Z") and parsed["logger"] == "paceline.access"
    assert {name: parsed[name] for name in ("level", "event", "id", "status", "queue_seconds", "route")} == {
        "level": "info", "event": "request", "id": "a\nb", "status": 200, "queue_seconds": 0.5, "route": '/x " ü'}


def test_a_text_line_quotes_what_is_no_single_word() -> None:
    line = TextFormatter().format(record(id="a-1", reason="two words", evil="x\nfake=1"))
    assert "\n" not in line and " info " in line
    assert line.endswith('request id=a-1 reason="two words" evil="x\\nfake=1"')


def test_a_traceback_stays_inside_the_json_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        failed = record("a request failed", logging.ERROR)
        failed.exc_info = (type(error), error, error.__traceback__)
    line = JsonFormatter().format(failed)
    assert "\n" not in line and "ValueError: broken" in json.loads(line)["traceback"]
    assert TextFormatter().format(failed).endswith("ValueError: broken")


def test_levels_hold_for_us_and_warnings_come_from_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger("paceline").handlers
    with configured("json", "info"):
        logging.getLogger("paceline.server").debug("too quiet")
        logging.getLogger("paceline.server").info("ready")
        logging.getLogger("somebody").info("not ours")
        logging.getLogger("somebody").warning("beware")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["ready", "beware"]
    assert logging.getLogger("paceline").handlers is before


def test_a_reader_that_stopped_reading_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_QUEUED_RECORDS", 10)
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.01)
    reader, writer = os.pipe()
    handler = PatientHandler(os.fdopen(writer, "w"))
    handler.setFormatter(TextFormatter())
    for _ in range(50):
        handler.emit(record("x" * 10_000))    # 500 kB into a pipe of 64 kB: would block for ever
        handler.flush()
    assert handler.num_dropped > 0
    with os.fdopen(reader) as lines:    # once there is room again, a record says how many are missing
        assert any("records were dropped" in line and "num_dropped=" in line for line in lines)


def test_a_closed_standard_error_is_no_end() -> None:
    closed = io.StringIO()
    closed.close()
    handler = PatientHandler(closed)
    for _ in range(1000):
        handler.emit(record())
        handler.flush()    # does not wait for a writer that has gone
