"""Streamed text is the decoded text, whatever the split; stop strings cut it at the same place everywhere."""

from __future__ import annotations

from functools import cache

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from paceline.engine.detokenizer import OutputText, StopFinder, make_find_stops
from paceline.model.loader import open_model
from paceline.model.tokenizer import Tokenizer
from paceline.request import SamplingParams, StopMatch
from paceline.sched.plan import RowResult, SamplingRef, ScheduledRequest, SchedulerOutput, StepResult

EXAMPLES = settings(max_examples=300, deadline=None)


@cache
def smollm2() -> Tokenizer:
    return open_model("smollm2").tokenizer


@cache
def sentencepiece_like() -> Tokenizer:
    """Llama 2's shape: a leading space stripped once, bytes as tokens where the vocabulary lacks a character."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "\u2581Khal",
              "eesi", "is", "\u2581\u2581", *"abcdefghijklmnopqrstuvwxyz!", "\u4f60", "\u597d", "\ufffd"]
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>",
                                            byte_fallback=True, fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    return Tokenizer(inner, {"bos_token": "<s>", "eos_token": "</s>"})


TOKENIZERS = {"byte-level": smollm2, "sentencepiece-like": sentencepiece_like}
ALPHABET = "ab \n\u00e9\u010f\u4f60\u597d\u0301\U0001f600\U0001f468\u200d<|im_end|>\ufffd1"


def pieces(text: OutputText, token_ids: list[int], sizes: list[int]) -> list[str]:
    """Pushes token_ids in groups of the given sizes (cycled)."""
    deltas, start = [], 0
    for index in range(len(token_ids)):
        size = sizes[index % len(sizes)]
        deltas.append(text.push(token_ids[start : start + size]))
        start += size
    return deltas


SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", TOKENIZERS)
@EXAMPLES
@given(data=st.data(), sizes=SIZES, skips=st.booleans())
def test_pieces_join_to_the_decoded_ids(kind: str, data: st.DataObject, sizes: list[int], skips: bool) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = data.draw(st.lists(st.integers(0, min(tokenizer.vocab_size + 3, 400)) | st.integers(0, tokenizer.vocab_size)))
    output = OutputText(tokenizer, skip_special_tokens=skips)
    text = "".join(pieces(output, ids, sizes)) + output.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=skips)


@pytest.mark.parametrize("kind", TOKENIZERS)
@EXAMPLES
@given(text=st.text(st.sampled_from(ALPHABET) | st.characters(codec="utf-8")), sizes=SIZES, cut=st.integers(0, 3))
def test_pieces_of_real_text_hold_no_broken_characters(kind: str, text: str, sizes: list[int], cut: int) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    ids = ids[: max(len(ids) - cut, 0)]
    output = OutputText(tokenizer)
    deltas = pieces(output, ids, sizes)
    if "\ufffd" not in text and kind == "byte-level" and tokenizer.decode(tokenizer.encode(text), False) == text:
        assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) + output.finish() == tokenizer.decode(ids)


def test_a_character_over_several_tokens_comes_whole() -> None:
    tokenizer = smollm2()
    for char in ("\U0001fae8", "\u010f", "\u1c4d"):
        ids = tokenizer.encode(char)
        assert len(ids) > 1
        output = OutputText(tokenizer)
        assert [output.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + [char]


def test_a_limit_inside_a_character_ends_in_one_replacement_character() -> None:
    tokenizer = smollm2()
    ids = tokenizer.encode("Hi\U0001fae8")[:-1]
    output = OutputText(tokenizer)
    assert output.push(ids) == "Hi" and output.finish() == "\ufffd"
    assert tokenizer.decode(ids) == "Hi\ufffd"


def test_pending_bytes_survive_a_space_that_breaks_them() -> None:
    tokenizer = smollm2()
    head, x = tokenizer.encode("\U0001fae8")[0], tokenizer.encode(" x")
    output = OutputText(tokenizer)
    assert [output.push([head]), output.push(x)] == ["", "\ufffd x"]


def test_only_the_first_space_of_the_output_is_stripped() -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.inner.encode("the Khal the").ids
    output = OutputText(tokenizer)
    assert "".join(output.push([token_id]) for token_id in ids) == "the Khal the"
    special = [tokenizer.bos_token_id or 0, *ids, tokenizer.bos_token_id or 0, *ids]
    output = OutputText(tokenizer)
    assert "".join(output.push([token_id]) for token_id in special) == "the Khal the the Khal the"


def test_work_is_constant_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokenizer, method in ((smollm2(), "token_bytes"), (sentencepiece_like(), "decode")):
        lengths: list[int] = []
        original = getattr(tokenizer, method)
        monkeypatch.setattr(tokenizer, method, lambda ids, *a, _f=original, _n=lengths, **k: (
            _n.append(len(ids) if isinstance(ids, list) else 1), _f(ids, *a, **k))[1])
        output = OutputText(tokenizer, stop=("zzzz",))
        for token_id in tokenizer.encode("a the" * 500):
            output.push([token_id])
        assert max(lengths) <= 3 and len(output._unsent) <= 4


# ---- stop strings

def stopped(text: str, *stop: str, sizes: tuple[int, ...] = (1,)) -> tuple[str, StopMatch | None]:
    """What a client is sent for this text, and the stop found."""
    tokenizer = smollm2()
    output = OutputText(tokenizer, stop)
    sent = "".join(pieces(output, tokenizer.encode(text), list(sizes)))
    match = output.find_stop()
    return sent + output.finish(match.num_text_chars if match else None), match


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (100,)])
@pytest.mark.parametrize(("text", "stop", "sent"), [
    ("I love Paris today", ("Pari",), "I love "),                   # ends inside a token
    ("Hello world!\nMore", ("ld!\n",), "Hello wor"),                # spans tokens
    ("abc", ("abcdef",), "abc"),                                    # held back, then flushed
    ("aabaabaaab", ("aabaaab",), "aab"),                            # needs the failure table
    ("one two three", ("three", "two"), "one "),                    # the first completed wins, not the first listed
    ("xxabyy", ("ab", "xxabyy"), "xx"),                             # independent of how tokens cut the text
    ("say END now", ("ND", "END"), "say "),                         # completed by the same character: the longest
    ("\u4f60\u597d\U0001f600!", ("\U0001f600",), "\u4f60\u597d"),
    ("nothing here", ("zzz",), "nothing here"),
    ("stop", ("stop",), ""),
    ("a\n\n\nb", ("\n\n",), "a"),
])
def test_text_is_cut_at_the_match(text: str, stop: tuple[str, ...], sent: str, sizes: tuple[int, ...]) -> None:
    result, match = stopped(text, *stop, sizes=sizes)
    assert result == sent
    assert (match is not None) == (sent != text)
    if match is not None:
        assert match.num_text_chars == len(sent) and match.text in stop


@EXAMPLES
@given(text=st.text("ab\u00e9\U0001f600", max_size=40),
       stop=st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=5), min_size=1, max_size=3), sizes=SIZES)
def test_the_stop_is_the_first_one_in_the_text(text: str, stop: list[str], sizes: list[int]) -> None:
    ends = [(text.find(one) + len(one), -len(one), one) for one in stop if one in text]
    expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
    result, match = stopped(text, *stop, sizes=tuple(sizes))
    assert result == expected
    assert (match.text if match else None) == (min(ends)[2] if ends else None)


def test_nothing_sent_is_ever_taken_back() -> None:
    tokenizer = smollm2()
    output = OutputText(tokenizer, ("worldwide",))
    sent = [output.push([token_id]) for token_id in tokenizer.encode("hello world wide")]
    assert sent[0] == "hello" and "".join(sent) + output.finish() == "hello world wide"


def test_tgi_keeps_the_stop_string() -> None:
    tokenizer = smollm2()
    output = OutputText(tokenizer, (" love",))
    assert output.push(tokenizer.encode("I love")) + output.finish() == "I love"


def test_a_stop_that_spells_a_special_token_matches_its_id_and_cuts_nothing() -> None:
    text, match = stopped("bye<|im_end|>more", "<|im_end|>")
    assert text == "bye" and match == StopMatch(text="<|im_end|>")
    shown = OutputText(smollm2(), ("<|im_end|>",), skip_special_tokens=False)
    assert shown.push(smollm2().encode("bye<|im_end|>")) == "bye"
    assert shown.find_stop() == StopMatch(text="<|im_end|>", num_text_chars=3)


def in_pieces(output: OutputText, token_ids: list[int]) -> tuple[str, StopMatch | None]:
    """What push() gives token by token, until a stop string is found."""
    text = ""
    for token_id in token_ids:
        text += output.push([token_id])
        if output.find_stop() is not None:
            break
    return text, output.find_stop()


def test_stop_strings_are_not_looked_at_until_min_tokens_are_out() -> None:
    tokenizer = smollm2()
    token_ids = tokenizer.encode("a b a b a b a b")
    assert len(token_ids) == 8
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "a b a"), (3, "a b a"), (4, "a b a b a")):
        assert in_pieces(OutputText(tokenizer, (" b",), min_tokens=min_tokens), token_ids)[0] == text
    found = in_pieces(OutputText(tokenizer, (" a b a",), min_tokens=6), token_ids)    # begins before, ends after
    assert found == ("a b a b", StopMatch(text=" a b a", num_text_chars=7))


@pytest.mark.parametrize(("keeps_stop", "text"), [(False, "I"), (True, "I lo")])
def test_the_text_may_keep_the_stop_string_and_nothing_past_it(keeps_stop: bool, text: str) -> None:
    tokenizer = smollm2()
    token_ids = tokenizer.encode("I love")
    output = OutputText(tokenizer, (" lo",), keeps_stop=keeps_stop)
    first = output.push(token_ids[:-1])
    probe = OutputText(tokenizer, (" lo",))
    probe.push(token_ids)
    assert first + output.end(token_ids[-1:], probe.find_stop()) == text


@pytest.mark.parametrize(("skips", "keeps_stop", "text"), [
    (True, False, "bye"), (True, True, "bye"), (False, False, "bye"), (False, True, "bye<|im_end|>")])
def test_the_token_that_stops_is_shown_only_when_it_is_to_be_kept(skips: bool, keeps_stop: bool, text: str) -> None:
    tokenizer = smollm2()
    token_ids = tokenizer.encode("bye<|im_end|>")
    output = OutputText(tokenizer, skip_special_tokens=skips, keeps_stop=keeps_stop)
    assert output.end(token_ids, StopMatch(token_id=token_ids[-1])) == text


# ---- StopFinder

def step(finder: StopFinder, token_ids: tuple[int, ...], *stop: str, request_id: str = "r",
         logprobs: tuple[float, ...] | None = None) -> RowResult:
    sampling = SamplingRef(SamplingParams(max_tokens=99, stop=stop), 0, 0)
    row = ScheduledRequest(request_id, 5, (7,), ((0,),), (0,), sampling)
    chunk = ScheduledRequest("prefill", 0, (1, 2), ((1,),), (), None)
    result = StepResult(1, (RowResult(request_id, token_ids, logprobs), RowResult("prefill")))
    found = finder(SchedulerOutput(1, (row, chunk)), result)
    assert found.rows[1] == RowResult("prefill")
    return found.rows[0]


def test_the_completing_token_is_kept_and_later_ones_are_cut() -> None:
    finder = make_find_stops(smollm2())
    ids = smollm2().encode("Hello world!\nMore text")
    first, rest = ids[:2], ids[2:]
    assert step(finder, tuple(first), "ld!\n") == RowResult("r", tuple(first))
    found = step(finder, tuple(rest), "ld!\n", logprobs=tuple(float(i) for i in range(len(rest))))
    assert found.stop == StopMatch(text="ld!\n", num_text_chars=len("Hello wor"))
    assert smollm2().decode([*first, *found.token_ids]) == "Hello world!\n"
    assert found.logprobs is not None and len(found.logprobs) == len(found.token_ids) < len(rest)


def test_rows_without_stop_strings_are_the_same_object() -> None:
    finder = StopFinder(smollm2())
    result = StepResult(1, (RowResult("r", (5,)),))
    row = ScheduledRequest("r", 5, (7,), ((0,),), (0,), SamplingRef(SamplingParams(max_tokens=9), 0, 0))
    assert finder(SchedulerOutput(1, (row,)), result) is result


def test_dropping_the_cache_changes_nothing() -> None:
    ids = smollm2().encode("I love Paris in spring")
    output: list[int] = []
    finder = make_find_stops(smollm2(), history=lambda request_id: output)
    for token_id in ids:
        found = step(finder, (token_id,), "s Paris", "e Paris i")
        if found.stop:
            break
        output.append(token_id)
        finder.forget(["r", "unknown"])
    assert found.stop == StopMatch(text="e Paris i", num_text_chars=len("I lov"))


def test_a_late_row_of_a_finished_request_leaves_no_trace() -> None:
    finder = make_find_stops(smollm2(), history=lambda request_id: None)
    assert step(finder, (5,), "x").stop is None
    assert not finder._texts
