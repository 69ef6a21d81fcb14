"""`paceline reproduce` as its users meet it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.reproduce_command import ENTRIES
from paceline.cli import main

CLAIM = {"what", "kind", "published", "ours", "unit", "definition", "weakest"}


def run(*argv: str, capsys: Any) -> tuple[int, str, str]:
    try:
        status = main(["reproduce", *argv])
    except SystemExit as left:
        status = int(str(left.code))
    out, err = capsys.readouterr()
    return status, out, err


def test_without_a_name_the_names_are_listed(capsys: Any) -> None:
    status, out, _ = run(capsys=capsys)
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == list(ENTRIES)


def test_an_unknown_name_is_told_with_the_known_ones(capsys: Any) -> None:
    status, out, err = run("23x", capsys=capsys)
    assert (status, out) == (2, "") and all(name in err for name in ("'23x'", *ENTRIES))


@pytest.mark.parametrize("argv", [
    ("toy",),
    ("azure", "--trace", "azure-code-2023", "--slots", "4", "--requests", "8"),
    ("drain", "--slots", "4", "--requests", "8"),
    ("kv-waste", "--requests", "4", "--kv-tokens", "2048"),
    ("flat-decode", "--batches", "1,2", "--steps", "2"),
    ("tgi-vs-vllm", "--requests", "3", "--concurrency", "2", "--simulate"),
])
def test_every_name_gives_claims_as_json_and_as_a_table(argv: tuple[str, ...], capsys: Any) -> None:
    status, out, _ = run(*argv, "--json", capsys=capsys)
    facts = json.loads(out)
    assert status == 0 and set(facts) == {"name", "claims", "runs"} and facts["name"] == argv[0]
    assert facts["runs"] and all(set(claim) == CLAIM and claim["kind"] in "SHK" for claim in facts["claims"])


def test_the_table_names_definition_and_weakest_condition_of_every_line(capsys: Any) -> None:
    _, out, _ = run("toy", capsys=capsys)
    assert out.splitlines()[0].split() == ["kind", "published", "ours", "unit"]
    for part in ("A: static, idle", "42.8571", "\nDefinitions\n", "\nWeakest conditions\n"):
        assert part in out


def test_journals_and_pictures_lie_in_the_folder_and_replay(tmp_path: Path, capsys: Any) -> None:
    run("toy", "--output", str(tmp_path / "new" / "folder"), capsys=capsys)
    files = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert {"toy-A1-static.svg", "toy-A1-static.jsonl.gz"} <= files
    assert main(["replay", str(tmp_path / "new" / "folder" / "toy-A1-static.jsonl.gz")]) == 0
    assert capsys.readouterr().out.startswith("identical: 21 steps of 8 requests")


def test_cells_that_run_in_processes_of_their_own_write_their_journals_too(tmp_path: Path, capsys: Any) -> None:
    run("azure", "--trace", "azure-code-2023", "--slots", "4", "--requests", "8", "--output", str(tmp_path),
        capsys=capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "azure-code-2023-4-continuous.jsonl.gz", "azure-code-2023-4-static.jsonl.gz"]


@pytest.mark.parametrize("argv, said", [
    (("azure", "--requests", "10"), "requests=10 do not fill 32 slots"),
    (("drain", "--requests", "31"), "requests=31 do not fill 32 slots"),
    (("azure", "--slots", "4,zero"), "--slots"),
    (("azure", "--slots", "0"), "at least 1"),
    (("azure", "--trace", "azure-conv-2022"), "azure-conv-2023"),
    (("kv-waste", "--kv-tokens", "2047"), "kv_tokens=2047"),
    (("flat-decode", "--batches", "2"), "1 is needed"),
    (("tgi-vs-vllm", "--num-kv-blocks", "159"), "num_kv_blocks=159"),
    (("toy", "--slots", "4"), "--slots"),
    (("flat-decode", "--output", "results"), "--output"),
    (("toy", "--output", "/dev/null/folder"), "output /dev/null/folder"),
])
def test_a_mistake_is_told_in_one_line_with_exit_status_2(argv: tuple[str, ...], said: str, capsys: Any) -> None:
    status, out, err = run(*argv, capsys=capsys)
    assert (status, out) == (2, "") and said in err and err.count("\n") == 1
