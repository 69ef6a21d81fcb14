"""Server-sent events from raw bytes, as they come: pieces may be cut anywhere.

Both classes have a short way for what nearly every piece is: one event, like the one before it but for its text. Where
the client shares the server's machine, what a token costs here is taken from the server.
"""

from __future__ import annotations

import re

_STRING_REST = re.compile(rb'(?:[^"\\\x00-\x1f]|\\.)+')    # of a JSON string, up to its closing quote
_TEXT_KEY = re.compile(rb'"(?:text|content)": ?"')


class EventReader:
    """Gives the data of each event once its closing empty line is in."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        if not self._rest and not self._lines and _is_one_event(piece):
            return [piece[6:-2]]
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._lines.append(line[5:].removeprefix(b" "))
            elif not line and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines = []
        return events

    def finish(self) -> list[bytes]:
        """What the stream ended with, where its last empty line is missing."""
        return self.feed(b"\n\n")


def _is_one_event(piece: bytes) -> bool:
    return piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.count(b"\n") == 2 and b"\r" not in piece


class Shape:
    """An event of JSON, all but the text that it brings."""

    def __init__(self) -> None:
        self._head = self._tail = b""

    def learn(self, event: bytes) -> None:
        key = _TEXT_KEY.search(event)
        text = None if key is None else _STRING_REST.match(event, key.end())
        self._head, self._tail = (b"", b"") if text is None else (event[:text.start()], event[text.end():])

    def fits(self, event: bytes) -> bool:
        """Whether this is surely the learned event with some other text, not empty."""
        head, tail = self._head, self._tail
        return bool(head) and event.startswith(head) and event.endswith(tail) and event.isascii() and (
            _STRING_REST.fullmatch(event, len(head), len(event) - len(tail)) is not None)
