"""Lines reach the disk without the engine waiting for it, and what fails is told once."""

from __future__ import annotations

import gzip
import os
import threading
import zlib
from pathlib import Path

import pytest

from paceline.engine import journal_file
from paceline.engine.journal_file import JournalDropped, JournalError, LineFile, read_journal
from paceline.errors import ConfigError


def test_every_line_is_written_in_order(tmp_path: Path) -> None:
    file = LineFile(str(tmp_path / "lines"))
    lines = [b"line %d\n" % number for number in range(5000)]
    for line in lines:
        file.put(line)
    assert file.close() is None
    assert (tmp_path / "lines").read_bytes() == b"".join(lines)


def test_a_full_disk_is_told_to_whoever_writes_next_and_not_again_at_the_end() -> None:
    file = LineFile("/dev/full")
    file.put(b"line\n")
    file._thread.join()
    with pytest.raises(JournalDropped, match="No space left"):
        file.put(b"line\n")
    assert file.close() is None


def test_a_failure_that_nobody_was_told_of_is_told_at_the_end() -> None:
    file = LineFile("/dev/full")
    file.put(b"line\n")
    assert "No space left" in (file.close() or "")


def test_a_disk_that_hangs_does_not_stop_the_engine(tmp_path: Path, monkeypatch) -> None:
    """A pipe that nobody reads blocks its writer as a dead disk would."""
    monkeypatch.setattr(journal_file, "MAX_PENDING_LINES", 100)
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    file = LineFile(path)
    with pytest.raises(JournalDropped, match="100 lines behind"):
        while True:
            file.put(b"x" * 65536 + b"\n")
    threading.Thread(target=os.close, args=(reader,)).start()    # the writer thread leaves with a broken pipe
    assert file.close() is None


def test_a_path_that_cannot_be_written_is_a_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        LineFile(str(tmp_path))


HEADER = b'{"event":"header","version":1}\n'


def test_a_gzipped_journal_reads_like_a_plain_one(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(HEADER + b'{"event":"abort"}\n')
    (tmp_path / "packed").write_bytes(gzip.compress(HEADER + b'{"event":"abort"}\n'))
    assert list(read_journal(tmp_path / "plain")) == list(read_journal(tmp_path / "packed"))


def test_a_gzipped_journal_that_was_cut_ends_before_the_cut(tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    content = packer.compress(HEADER) + packer.flush(zlib.Z_SYNC_FLUSH)
    (tmp_path / "cut").write_bytes(content)
    assert [number for number, _ in read_journal(tmp_path / "cut")] == [1]


def test_a_damaged_gzipped_journal_is_told(tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=31)
    content = packer.compress(HEADER) + packer.flush(zlib.Z_SYNC_FLUSH)
    (tmp_path / "damaged").write_bytes(content + b"\xff" * 40)
    with pytest.raises(JournalError, match=r"damaged: .*decompressing"):
        list(read_journal(tmp_path / "damaged"))
