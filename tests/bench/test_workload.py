"""Loads are what their names say, the same for each target, and new words in every cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.bench.arrivals import Arrivals, parse_ramp, parse_steps
from paceline.bench.drafts import Part, TokenWriter, WordWriter
from paceline.bench.records import Asked
from paceline.bench.request_file import read_requests, salted, write_requests
from paceline.bench.workload import WORKLOADS, WorkloadSpec, draft, requests_of
from paceline.errors import ConfigError

MOONCAKE_ROWS = (
    {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 10]},
    {"timestamp": 900, "input_length": 600, "output_length": 7, "hash_ids": [11, 12]},
)
RANGES = {"uniform": ((50, 2000), (10, 500)), "decode-heavy": ((8, 32), (150, 250)), "mixed": ((176, 264), (32, 160)),
          "prefill-heavy": ((900, 1100), (8, 16)), "fixed": ((512, 512), (128, 128))}


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    path = tmp_path / "mooncake.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, MOONCAKE_ROWS)))
    return str(path)


def spec(name: str, tmp: str | None = None, **fields: Any) -> WorkloadSpec:
    return WorkloadSpec(name=name, **({"num_requests": 40, "trace": tmp if name == "mooncake" else None} | fields))


def ids(asked: Asked) -> tuple[int, ...]:
    assert asked.prompt_token_ids is not None
    return asked.prompt_token_ids


def shared(one: Asked, other: Asked) -> int:
    """Tokens that two prompts begin with alike."""
    pairs = zip(ids(one), ids(other), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(ids(one)), len(ids(other))))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_load_is_the_same_again_and_another_salt_changes_its_words_only(name: str, mooncake: str) -> None:
    one, again, other = (requests_of(spec(name, mooncake), salt) for salt in ("a", "a", "b"))
    assert one == again and len(one) == (3 if name == "mooncake" else 40)
    for mine, theirs in zip(one, other, strict=True):
        assert len(ids(mine)) == len(ids(theirs)) == mine.num_prompt_tokens and shared(mine, theirs) < 3
        assert (mine.num_output_tokens, mine.after, mine.think_seconds, mine.arrival_seconds) == (
            theirs.num_output_tokens, theirs.after, theirs.think_seconds, theirs.arrival_seconds)
    assert all(1_000 <= token < 20_000 for asked in one for token in ids(asked))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
@pytest.mark.parametrize("form", ["text", "messages"])
def test_every_load_can_be_said_in_words(name: str, form: str, mooncake: str) -> None:
    for asked in requests_of(spec(name, mooncake, prompts=form, num_requests=6), "a"):
        texts = [asked.prompt] if asked.messages is None else [message["content"] for message in asked.messages]
        assert sum(len(text.split()) for text in texts if text) == asked.num_prompt_tokens


@pytest.mark.parametrize("name", sorted(RANGES))
def test_lengths_fill_the_range_of_their_name(name: str) -> None:
    drafts = draft(spec(name, num_requests=3000))
    for found, (least, most) in zip(
            zip(*((one.num_prompt_tokens, one.num_output_tokens) for one in drafts), strict=True), RANGES[name],
            strict=True):
        assert least <= min(found) <= least + (most - least) / 50 and most - (most - least) / 50 <= max(found) <= most


@pytest.mark.parametrize(("name", "spread"), [("exponential", 1.0), ("geometric", 1.0)])
def test_exponential_and_geometric_lengths_have_their_mean_and_its_spread(name: str, spread: float) -> None:
    found = [one.num_output_tokens for one in draft(spec(name, num_requests=4000))]
    assert np.mean(found) == pytest.approx(128, rel=0.08) and np.std(found) == pytest.approx(128 * spread, rel=0.1)
    assert min(found) >= 1 and max(found) <= 8 * 128


def test_requests_of_one_fan_share_their_prefix_and_no_more() -> None:
    requests = requests_of(spec("shared-prefix", prefix_tokens=64, fan_out=4, prompt_tokens="10..20"), "a")
    assert {shared(requests[0], one) for one in requests[1:4]} == {64}
    assert shared(requests[0], requests[4]) < 3


@pytest.mark.parametrize("name", ["chat", "long-document", "agentic"])
def test_each_turn_waits_for_the_one_before_and_begins_with_all_that_was_said(name: str) -> None:
    requests = requests_of(spec(name), "a")
    by_id = {asked.request_id: asked for asked in requests}
    turns = [asked for asked in requests if asked.after]
    assert turns and all(asked.think_seconds > 0 for asked in turns)
    for asked in turns:
        before = by_id[asked.after[0]]
        assert shared(before, asked) == len(ids(before))
        assert len(ids(asked)) > len(ids(before)) + before.num_output_tokens    # the scripted answer and a question


def test_agents_and_documents_can_have_limits_of_their_own() -> None:
    assert {asked.slo for asked in requests_of(spec("agentic"), "a")} == {"agent", "document"}


def test_equal_prefix_ids_become_equal_blocks_of_512(mooncake: str) -> None:
    first, second, third = requests_of(spec("mooncake", mooncake), "a")
    assert shared(first, second) == 1024 and shared(first, third) < 3
    assert [len(ids(asked)) for asked in (first, second, third)] == [1200, 1100, 600]
    assert [asked.arrival_seconds for asked in (first, second, third)] == [0.0, 0.5, 0.9]


def test_recorded_lengths_can_be_scaled_and_shared_blocks_shrink_with_them(mooncake: str) -> None:
    first, second, _ = requests_of(spec("mooncake", mooncake, length_scale=0.25), "a")
    assert (len(ids(first)), shared(first, second)) == (300, 256)


def test_a_context_limit_cuts_the_end_of_the_prompt_before_the_answer(mooncake: str) -> None:
    whole = requests_of(spec("mooncake", mooncake), "a")
    cut = requests_of(spec("mooncake", mooncake, max_context=1030), "a")
    assert [len(ids(asked)) for asked in cut] == [1025, 1024, 600]
    assert all(ids(one) == ids(other)[: len(ids(one))] for one, other in zip(cut, whole, strict=True))
    tiny = draft(spec("fixed", max_context=100))[0]
    assert (tiny.num_prompt_tokens, tiny.num_output_tokens) == (1, 99)


@given(st.text(max_size=5), st.integers(1, 400), st.integers(0, 400))
@settings(max_examples=40)
def test_a_longer_part_begins_like_a_shorter_one(salt: str, short: int, more: int) -> None:
    for writer, name in ((TokenWriter(salt, 5, 50_000), "prompt_token_ids"), (WordWriter(salt), "prompt")):
        few, many = (writer.fields([Part(("x", 1), count)])[name] for count in (short, short + more))
        assert many[: len(few)] == few


@pytest.mark.parametrize(("fields", "message"), [
    ({"name": "storm"}, "storm.*choose from.*uniform"), ({"num_requests": 0}, "num_requests must be at least 1, got 0"),
    ({"name": "mooncake"}, "needs trace"), ({"trace": "x"}, "trace has no effect on workload 'uniform'"),
    ({"turns": "3"}, "turns has no effect"), ({"prompt_tokens": "9..3"}, "prompt_tokens.*empty"),
    ({"prompt_tokens": "many"}, "prompt_tokens='many'"), ({"name": "geometric", "output_tokens": "3..4"}, "mean"),
    ({"prompts": "sound"}, "prompts='sound'"), ({"length_scale": 0.0}, "length_scale"),
    ({"name": "mooncake", "trace": "/nowhere.jsonl"}, "/nowhere.jsonl")])
def test_a_load_that_means_nothing_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draft(WorkloadSpec(**fields))


# ---- request files


@pytest.mark.parametrize("form", ["ids", "text", "messages"])
def test_a_request_file_gives_back_what_was_written(form: str, tmp_path: Path) -> None:
    requests = requests_of(spec("agentic", prompts=form), "a")
    write_requests(tmp_path / "r.jsonl", requests)
    assert read_requests(tmp_path / "r.jsonl") == requests


def test_by_hand_a_prompt_and_a_length_are_enough(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"prompt": "hi", "num_output_tokens": 4}\n\n'
                                      '{"prompt_token_ids": [1, 2], "num_output_tokens": 1, "after": ["line-1"]}\n')
    one, two = read_requests(tmp_path / "r.jsonl")
    assert (one.request_id, one.num_prompt_tokens, two.num_prompt_tokens, two.after) == ("line-1", None, 2, ("line-1",))


@pytest.mark.parametrize(("line", "message"), [
    ("{", "unexpected|expected"), ("[]", "expected an object"), ('{"prompt": "a"}', "num_output_tokens: missing"),
    ('{"num_output_tokens": 1}', "exactly one of"),
    ('{"prompt": "a", "messages": [], "num_output_tokens": 1}', "one of"),
    ('{"prompt": "a", "num_output_tokens": 0}', "num_output_tokens: expected a whole number of at least 1, got 0"),
    ('{"prompt": "a", "num_output_tokens": 1, "colour": 1}', "colour: no such field"),
    ('{"prompt_token_ids": [-1], "num_output_tokens": 1}', "prompt_token_ids"),
    ('{"prompt": "a", "num_output_tokens": 1, "after": ["b"]}', "no line above has the request_id 'b'"),
    ('{"prompt": "a", "num_output_tokens": 1, "think_seconds": -1}', "think_seconds"),
    ('{"prompt": "b", "num_output_tokens": 1, "request_id": "line-1"}', "line-1.*line above")])
def test_a_wrong_line_is_told_by_file_and_number(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text('{"prompt": "a", "num_output_tokens": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=rf"r\.jsonl:2: .*({message})"):
        read_requests(path)


def test_an_empty_file_is_no_load(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="without requests"):
        read_requests(tmp_path / "r.jsonl")


@pytest.mark.parametrize("form", ["ids", "text", "messages"])
def test_a_salt_in_front_keeps_what_prompts_share_among_themselves(form: str) -> None:
    requests = requests_of(spec("shared-prefix", prompts=form, num_requests=2), "a")
    one, other = salted(requests, "s", 1_000, 20_000), salted(requests, "t", 1_000, 20_000)
    assert one != other and one[0].num_prompt_tokens == 1108
    if form == "ids":
        assert shared(one[0], one[1]) == 1008 and shared(one[0], other[0]) < 3


# ---- arrivals


def times(count: int = 20_000, seed: int = 1, **fields: Any) -> np.ndarray:
    return np.array(Arrivals(**fields).times([None] * count, seed))


@pytest.mark.parametrize(("fields", "variation"), [
    ({"kind": "poisson"}, 1.0), ({"kind": "gamma", "burstiness": 0.25}, 2.0),
    ({"kind": "gamma", "burstiness": 4.0}, 0.5),
    ({"kind": "constant"}, 0.0)])
def test_gaps_have_the_mean_and_the_variation_asked_for(fields: dict[str, Any], variation: float) -> None:
    gaps = np.diff(times(rate=8.0, **fields))
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.04, abs=1e-9)


def test_steps_and_ramps_have_the_rate_of_their_moment() -> None:
    stepped = times(kind="steps", steps=parse_steps("10:100,40:100"))
    assert np.sum(stepped < 100) == pytest.approx(1000, rel=0.1)
    assert np.sum((stepped >= 150) & (stepped < 250)) == pytest.approx(4000, rel=0.1)
    ramped = times(kind="ramp", ramp=parse_ramp("1:39:200"))
    assert np.sum(ramped < 100) == pytest.approx(1050, rel=0.12)    # rates from 1 to 20
    assert np.sum((ramped >= 200) & (ramped < 300)) == pytest.approx(3900, rel=0.1)
    assert np.all(np.diff(ramped) >= 0)


def test_recorded_times_are_kept_to_scale() -> None:
    assert Arrivals(kind="trace", time_scale=0.5).times([0.0, 3.0], 0) == [0.0, 1.5]
    with pytest.raises(ConfigError, match="recorded times"):
        Arrivals(kind="trace").times([0.0, None], 0)


def test_arrivals_are_the_same_again_and_others_with_another_seed() -> None:
    poisson = {"kind": "poisson", "rate": 1.0}
    assert np.array_equal(times(9, 1, **poisson), times(9, 1, **poisson))
    assert not np.array_equal(times(9, 1, **poisson), times(9, 2, **poisson))


@pytest.mark.parametrize("fields", [
    {"kind": "rain"}, {"kind": "poisson"}, {"kind": "poisson", "rate": 0.0}, {"kind": "closed", "rate": 1.0},
    {"kind": "steps"}, {"kind": "ramp"}, {"kind": "burst", "burstiness": 2.0}, {"kind": "burst", "time_scale": 2.0},
    {"kind": "gamma", "rate": 1.0, "burstiness": 0.0}, {"kind": "trace", "time_scale": 0.0}])
def test_arrivals_that_mean_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Arrivals(**fields)


@pytest.mark.parametrize("text", ["", "1", "1:2,3", "0:1", "a:b"])
def test_steps_and_ramps_that_cannot_be_read_are_refused(text: str) -> None:
    for parse in (parse_steps, parse_ramp):
        with pytest.raises(ConfigError, match="expected"):
            parse(text)
