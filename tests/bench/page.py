"""A report as a reader's program sees it."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input"}
OUTSIDE = ("src", "href", "xlink:href", "data", "action", "poster", "srcset")


class Page(HTMLParser):
    """sections: text by id, in order. outside: whatever would be fetched. AssertionError where tags do not close."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.sections: dict[str, str] = {}
        self.figures: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.drawings: list[tuple[str | None, str]] = []    # role, title
        self._open: list[str] = []
        self._inside: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.outside += [f"{tag} {name}={given[name]}" for name in OUTSIDE if name in given]
        if tag not in VOID:
            self._open.append(tag)
        if tag == "section":
            self._inside.append(given.get("id") or "?")
            self.sections[self._inside[-1]] = ""
        if tag == "svg":
            self.drawings.append((given.get("role"), ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()
        if tag == "section":
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        for name in self._inside:
            self.sections[name] += data
        if self._open[-2:] == ["svg", "title"]:
            self.drawings[-1] = (self.drawings[-1][0], self.drawings[-1][1] + data)
