"""Recorded traffic is read to the last row, or refused with the line at fault."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from paceline.bench.traces import MOONCAKE_BLOCK_TOKENS, PACKAGED, TraceRow, read_trace
from paceline.errors import ConfigError

SHARED = Path(__file__).parents[3] / "shared" / "traces"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
MOONCAKE = '{"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [46, 47]}\n'


@pytest.mark.parametrize("name, num_rows, num_output_tokens", [
    ("azure-conv-2023", 19_366, 4_088_665), ("azure-code-2023", 8_819, 245_896)])
def test_a_packaged_trace_is_whole(name: str, num_rows: int, num_output_tokens: int) -> None:
    rows = read_trace(name)
    assert len(rows) == num_rows
    assert sum(row.num_output_tokens for row in rows) == num_output_tokens


def test_arrivals_count_from_the_first_request_to_the_last_digit() -> None:
    first, second = read_trace("azure-conv-2023")[:2]
    assert first == TraceRow(0.0, 374, 44)
    assert second == TraceRow(4.314579, 396, 109)


def test_the_notice_travels_with_the_data() -> None:
    notice = next(iter(PACKAGED.values())).with_name("NOTICE.txt").read_text()
    assert "CC BY 4.0" in notice and all(path.name in notice for path in PACKAGED.values())


def test_plain_and_gzipped_files_read_alike(tmp_path: Path) -> None:
    text = HEADER + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01+00:00,2399,6"
    (tmp_path / "plain.csv").write_text(text)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text.encode()))
    rows = read_trace(tmp_path / "plain.csv")
    assert rows == (TraceRow(0.0, 2162, 5), TraceRow(0.99007, 2399, 6)) == read_trace(tmp_path / "packed.gz")


def test_mooncake_rows_keep_their_block_numbers(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE + "\n" + MOONCAKE.replace("27", "1027"))
    assert read_trace(path) == (TraceRow(0.0, 600, 5, (46, 47)), TraceRow(1.0, 600, 5, (46, 47)))


@pytest.mark.parametrize("name, num_rows", [("conversation", 12_031), ("synthetic", 3_993)])
def test_a_trace_of_mooncake_has_a_number_for_each_block(name: str, num_rows: int) -> None:
    path = SHARED / f"mooncake_{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here; it is not part of the package")
    rows = read_trace(path)
    assert len(rows) == num_rows
    assert all(len(row.hash_ids) == -(-row.num_prompt_tokens // MOONCAKE_BLOCK_TOKENS) for row in rows)


@pytest.mark.parametrize("line, reason", [
    ("2023-11-16 18:15:50.9951690,396", "expected TIMESTAMP"),
    ("2023-11-16 18:15:50.9951690,396,many", "many"),
    ("yesterday,396,109", "yesterday"),
    ("2023-11-16 18:15:50.9951690,396,0", "at least one token"),
    ("2023-11-16 18:15:40.0000000,396,109", "before the request above"),
])
def test_a_damaged_row_is_named_with_file_and_line(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(HEADER + "2023-11-16 18:15:46.6805900,374,44\n" + line)
    with pytest.raises(ConfigError, match=rf"trace\.csv:3: .*{reason}"):
        read_trace(path)


@pytest.mark.parametrize("line, reason", [
    ("[1, 2]", "an object"), ("not json", "Expecting"), (MOONCAKE.replace("600", '"600"'), "input_length"),
    (MOONCAKE.replace("600", "true"), "input_length"), (MOONCAKE.replace("[46, 47]", "46"), "hash_ids"),
    (MOONCAKE.replace("47", "null"), "hash_ids"), (MOONCAKE.replace('"output_length": 5, ', ""), "output_length"),
])
def test_a_damaged_line_of_mooncake_is_named_too(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE + line)
    with pytest.raises(ConfigError, match=rf"trace\.jsonl:2: .*{reason}"):
        read_trace(path)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text(HEADER)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(HEADER.encode())[:-9])
    with pytest.raises(ConfigError, match="without requests"):
        read_trace(tmp_path / "empty.csv")
    for name in ("cut.gz", "azure-2022"):
        with pytest.raises(ConfigError, match=f"{name}.*azure-conv-2023"):
            read_trace(tmp_path / name)
