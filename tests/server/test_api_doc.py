"""docs/api.md says what paceline/server/fields.py does."""

from __future__ import annotations

from paceline.server import fields

from . import make_api_doc


def test_the_committed_tables_are_those_of_the_code() -> None:
    text = make_api_doc.DOC_PATH.read_text(encoding="utf-8")
    for start, made in make_api_doc.TABLES.items():
        assert text.partition(start)[2].partition(make_api_doc.END)[0] == made()


def test_every_served_field_says_what_it_is() -> None:
    assert [name for name, field in (fields.COMPLETION | fields.CHAT).items() if not field.note] == []
