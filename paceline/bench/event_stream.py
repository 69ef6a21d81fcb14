"""Server-sent events from raw bytes, as they come: pieces may be cut anywhere."""

from __future__ import annotations


class EventReader:
    """Gives the data of each event once its closing empty line is in."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
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
