"""Tokenizers from GGUF metadata: the ids of transformers for each kind, and of SentencePiece's own rule."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.detokenizer import OutputText
from paceline.errors import ModelError
from paceline.model.fields import Fields
from paceline.model.tokenizer_gguf import PRE_TOKENIZERS, tokenizer_from_gguf
from tests.golden import nasty

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_tokenizers.json").read_text())
SPACES = st.text(st.characters(codec="utf-8") | st.sampled_from("   aeiou\n\u2581\u4e00\U0001f600"), max_size=40)


def metadata(model: str, **changes: Any) -> Fields:
    """The golden vocabulary as GGUF metadata. A change to None removes the key."""
    vocabulary = GOLDEN[model]
    values = {
        "tokenizer.ggml.model": model, "tokenizer.ggml.tokens": vocabulary["tokens"],
        "tokenizer.ggml.token_type": np.array(vocabulary["token_type"], np.int32),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0}
    if model == "gpt2":
        values |= {"tokenizer.ggml.merges": vocabulary["merges"], "tokenizer.ggml.pre": "gpt-2"}
    else:
        values |= {"tokenizer.ggml.scores": np.array(vocabulary["scores"], np.float32), "general.architecture": "llama"}
    values |= {(name if "." in name else f"tokenizer.ggml.{name}"): value for name, value in changes.items()}
    return Fields({name: value for name, value in values.items() if value is not None}, "small.gguf")


@pytest.mark.parametrize("pre", GOLDEN["gpt2"]["ids"])
def test_byte_level_ids_equal_transformers(pre: str) -> None:
    tokenizer = tokenizer_from_gguf(metadata("gpt2", pre=pre))
    for text, ids in zip(nasty.TEXTS, GOLDEN["gpt2"]["ids"][pre], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_the_kinds_differ_and_every_one_has_a_golden() -> None:
    kinds = GOLDEN["gpt2"]["ids"]
    assert len({json.dumps(ids) for ids in kinds.values()}) == len(kinds) - 1     # smaug-bpe is dbrx
    assert {id(pre.splitter) for pre in PRE_TOKENIZERS.values()} == {
        id(PRE_TOKENIZERS[kind].splitter) for kind in kinds}


@pytest.mark.parametrize("architecture", GOLDEN["llama"]["ids"])
def test_sentencepiece_ids_equal_transformers(architecture: str) -> None:
    changes = {"general.architecture": architecture}
    if architecture == "gemma2":
        changes["add_space_prefix"] = False
    tokenizer = tokenizer_from_gguf(metadata("llama", **changes))
    for text, ids in zip(nasty.TEXTS, GOLDEN["llama"]["ids"][architecture], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


@pytest.mark.parametrize("architecture", GOLDEN["llama"]["special_ids"])
def test_the_prefix_space_around_added_tokens_is_where_transformers_puts_it(architecture: str) -> None:
    """B008: before the text, never after a special token; Phi-3 wants it before each piece, Gemma nowhere."""
    tokenizer = tokenizer_from_gguf(metadata(
        "llama", **{"general.architecture": architecture, "add_space_prefix": architecture != "gemma2"}))
    for text, ids in zip(nasty.SPECIAL_TEXTS, GOLDEN["llama"]["special_ids"][architecture], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids], text
    bare, behind = tokenizer.encode("text", False), tokenizer.encode("<s>text", False)
    assert (behind == [1, *bare]) == (architecture != "llama")


def test_a_file_may_say_that_there_is_no_prefix_space() -> None:
    for architecture in ("llama", "phi3"):
        tokenizer = tokenizer_from_gguf(metadata(
            "llama", add_space_prefix=False, **{"general.architecture": architecture}))
        for text in ("text", " text", "<s>text", "<s> text", "a b"):
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert "".join(map(tokenizer.token_text, ids)) == text


LLAMA = tokenizer_from_gguf(metadata("llama"))
SCORES = dict(zip(GOLDEN["llama"]["tokens"], GOLDEN["llama"]["scores"], strict=True))
IDS = {text: token_id for token_id, text in enumerate(GOLDEN["llama"]["tokens"])}


def greedily_merged(text: str) -> list[int]:
    """SentencePiece's rule as its paper has it: of all neighbours that make a token, join those of the best score."""
    pieces = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        joined = [(-SCORES[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in IDS]
        if not joined:
            break
        at = min(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids: list[int] = []
    for piece in pieces:
        ids += [IDS[piece]] if piece in IDS else [IDS[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


@settings(max_examples=300, deadline=None)
@given(text=SPACES | st.sampled_from(nasty.TEXTS))
def test_ids_follow_sentencepieces_rule(text: str) -> None:
    if not any(special in text for special in ("<s>", "</s>", "<think>", "<unk>")):
        assert LLAMA.encode(text, add_special_tokens=False) == greedily_merged(text)


@settings(max_examples=300, deadline=None)
@given(text=SPACES | st.sampled_from(nasty.TEXTS), start=st.integers(0, 3))
def test_pieces_of_text_join_to_decode(text: str, start: int) -> None:
    ids = LLAMA.encode(text, add_special_tokens=False)
    if "\u2581" not in text:
        assert LLAMA.decode(ids) == text
    output = OutputText(LLAMA)
    streamed = [output.push([token_id]) for token_id in ids[start:]]
    assert "".join([*streamed, output.finish()]) == LLAMA.decode(ids[start:])
    if "<" not in text:
        joined = b"".join(map(LLAMA.token_bytes, ids)).decode()
        assert joined.replace("\u2581", " ") == (" " + text if text else "").replace("\u2581", " ")


def test_bos_is_added_unless_the_file_says_otherwise() -> None:
    for model, changes, is_added in [
            ("llama", {}, True), ("llama", {"add_bos_token": False}, False), ("gpt2", {}, False),
            ("gpt2", {"pre": "llama-bpe"}, True), ("gpt2", {"pre": "llama-bpe", "add_bos_token": False}, False),
            ("gpt2", {"pre": "qwen2", "add_bos_token": True}, True), ("llama", {"bos_token_id": None}, False)]:
        assert (tokenizer_from_gguf(metadata(model, **changes)).encode("a")[:1] == [1]) == is_added, (model, changes)
    assert tokenizer_from_gguf(metadata("llama", add_eos_token=True)).encode("a")[-1] == 2


def test_marked_tokens_stay_whole_and_listed_merges_come_first() -> None:
    think = IDS["<think>"]
    assert LLAMA.encode("a<think>b", add_special_tokens=False)[1] == think and LLAMA.decode([think]) == "<think>"
    assert LLAMA.special_ids == {0, 1, 2} and LLAMA.decode([1, think, 2]) == "<think>"
    text = "Hello, world!"
    plain = tokenizer_from_gguf(metadata("llama", merges=[]))
    assert len(plain.encode(text)) > len(LLAMA.encode(text)) and plain.decode(plain.encode(text)) == text


@pytest.mark.parametrize(("model", "field", "value", "message"), [
    ("llama", "scores", None, "scores.*one number for each"), ("llama", "scores", np.zeros(3), "one number for each"),
    ("llama", "add_space_prefix", 1, "true or false"), ("llama", "unknown_token_id", 10**6, "outside the vocabulary"),
    ("llama", "merges", ["a"], "is not a pair"), ("gpt2", "pre", "tekken", "unknown; supported: gpt-2, smollm"),
    ("gpt2", "add_space_prefix", True, "not supported for byte-level"),
    ("llama", "tokenizer.ggml.model", "t5", "supported: gpt2, llama"),
])
def test_metadata_we_cannot_follow_is_named(model: str, field: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(metadata(model, **{field: value}))
