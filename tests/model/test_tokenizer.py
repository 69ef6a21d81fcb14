"""The tokenizer: equal to transformers' on nasty texts (goldens), strict about what its files say."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from paceline.errors import ModelError, RequestError
from paceline.model.fields import Fields
from paceline.model.loader import open_model
from paceline.model.tokenizer import Tokenizer, tokenizer_from_directory
from paceline.model.tokenizer_gguf import tokenizer_from_gguf

from . import tiny

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_tokenizer.json").read_text())


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return open_model("smollm2").tokenizer


def metadata(**changes: Any) -> Fields:
    values = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tiny.TOKENS,
        "tokenizer.ggml.merges": tiny.MERGES, "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * 261, np.int32),
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }
    return Fields(values | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}, "tiny.gguf")


@pytest.mark.parametrize("golden", GOLDEN["texts"], ids=lambda golden: ascii(golden["text"][:20]))
def test_ids_and_texts_equal_transformers(smollm2: Tokenizer, golden: dict[str, Any]) -> None:
    assert smollm2.encode(golden["text"]) == golden["ids"]
    assert smollm2.decode(golden["ids"], skip_special_tokens=False) == golden["decoded"]
    assert smollm2.decode(golden["ids"]) == golden["decoded_without_special"]


def test_the_packaged_tokenizers_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
                                      "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>"}
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_bytes(smollm2.encode("\u00e9")[0]) == "\u00e9".encode()


def test_bytes_of_tokens_join_to_the_decoded_text(smollm2: Tokenizer) -> None:
    for token_id in range(0, smollm2.vocab_size, 7):
        assert smollm2.token_bytes(token_id).decode("utf-8", "replace") == smollm2.token_text(token_id)
    assert smollm2.token_bytes(60000) == b"" and smollm2.decode([60000]) == ""


def test_a_lone_surrogate_is_named(smollm2: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D83D at character 2") as caught:
        smollm2.encode("ab\ud83d")
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 1 << 32, "1", None, 1.5])
def test_ids_that_are_none_are_a_bad_request(smollm2: Tokenizer, token_id: Any) -> None:
    with pytest.raises(RequestError, match="ids must be integers"):
        smollm2.decode([token_id])


def test_many_threads_get_the_same_ids(smollm2: Tokenizer) -> None:
    texts = [golden["text"] for golden in GOLDEN["texts"]] * 8
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(smollm2.encode, texts)) == [smollm2.encode(text) for text in texts]


@pytest.mark.parametrize(("field", "value", "message"), [
    ("pre", "llama-bpe-9", "tokenizer.ggml.pre='llama-bpe-9': unknown; supported: gpt-2, smollm"),
    ("pre", None, "tokenizer.ggml.pre is missing"), ("model", "t5", "supported: gpt2, llama"),
    ("tokens", [*tiny.TOKENS[:-1], "he"], "1 duplicates"), ("tokens", 5, "array of strings"),
    ("merges", ["he llo"], "merges: "), ("merges", ["hello"], r"merges\[0\] 'hello' is not a pair"),
    ("merges", ["a b c"], "is not a pair"), ("token_type", None, "token_type"),
    ("token_type", np.array([1], np.int32), "one number for each of 264 tokens"),
    ("eos_token_id", 264, "outside the vocabulary of 264"), ("bos_token_id", -1, "outside the vocabulary"),
    ("add_bos_token", 1, "true or false"),
])
def test_gguf_metadata_we_cannot_follow_is_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(metadata(**{field: value}))


def test_control_and_user_defined_tokens_stay_whole() -> None:
    types = np.array([3] * 3 + [1] * 260 + [4], np.int32)       # the last token, "Gw", is user-defined
    tokenizer = tokenizer_from_gguf(metadata(tokens=[*tiny.TOKENS[:-1], "<think>"], merges=[], token_type=types))
    assert tokenizer.encode("h<think><|im_end|>") == [tiny.TOKENS.index("h"), 263, 2]
    assert tokenizer.decode([263, 2]) == "<think>"
    assert tokenizer.special_ids == {0, 1, 2} and tokenizer.added_ids["<think>"] == 263


def test_add_bos_token_of_gguf_is_honoured() -> None:
    plain = tokenizer_from_gguf(metadata()).encode("hello")
    for is_added in (True, False):
        tokenizer = tokenizer_from_gguf(metadata(add_bos_token=is_added))
        assert tokenizer.encode("hello") == [1] * is_added + plain
        assert tokenizer.encode("hello", add_special_tokens=False) == plain
        assert tokenizer.encode("") == [1] * is_added
    assert tokenizer_from_gguf(metadata(add_eos_token=True)).encode("hello") == [*plain, 2]


def test_the_post_processor_of_a_directory_decides_over_bos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tiny.write_hf(tmp_path / "bos")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    for has_bos in (True, False):
        inner = tiny.build_tokenizer()
        if has_bos:
            inner.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
        inner.save(str(directory / "tokenizer.json"))
        for flag in (True, False):
            caplog.clear()
            (directory / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": flag}))
            assert (tokenizer_from_directory(directory).encode("hello")[0] == 1) == has_bos
            assert ("add_bos_token is overruled" in caplog.text) == (flag != has_bos)


def test_so_it_does_over_eos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tiny.write_hf(tmp_path / "eos")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "add_eos_token": True}))
    assert tokenizer_from_directory(directory).encode("hello")[-1] != 2
    assert "add_eos_token is overruled by tokenizer.json, which does not add it" in caplog.text
    inner = tiny.build_tokenizer()
    inner.post_processor = processors.TemplateProcessing("$A <|im_end|>", None, [("<|im_end|>", 2)])
    inner.save(str(directory / "tokenizer.json"))
    caplog.clear()
    assert tokenizer_from_directory(directory).encode("hello")[-1] == 2 and not caplog.text


def test_side_files_add_tokens_and_specials(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "added")
    (directory / "added_tokens.json").write_text(json.dumps({"<tool>": 264}))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "eos_token": "<|im_end|>", "added_tokens_decoder": {"265": {"content": "<eot>", "special": True}}}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|im_start|>"}}))
    tokenizer = tokenizer_from_directory(directory)
    assert tokenizer.encode("<tool><eot>") == [264, 265] and tokenizer.vocab_size == 266
    assert tokenizer.decode([264, 265]) == "<tool>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    (directory / "added_tokens.json").write_text(json.dumps({"<tool>": 266}))
    with pytest.raises(ModelError, match=r"'<eot>' should have id 265, tokenizer\.json gives it 264"):
        tokenizer_from_directory(directory)


def test_truncation_of_a_tokenizer_json_is_switched_off(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "cut")
    inner = tiny.build_tokenizer()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.save(str(directory / "tokenizer.json"))
    assert len(tokenizer_from_directory(directory).encode("abcde")) == 5


@pytest.mark.parametrize("text", ["{", "{}", "[]", "version https://git-lfs.github.com/spec/v1\n"])
def test_a_broken_tokenizer_json_is_named(tmp_path: Path, text: str) -> None:
    directory = tiny.write_hf(tmp_path / "broken")
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        tokenizer_from_directory(directory)


def test_a_long_text_does_not_stop_the_other_threads(smollm2: Tokenizer) -> None:
    """B197: the event loop and the engine's thread go on while a worker tokenises. What the other does here takes
    several turns at the interpreter's lock, so it cannot be done unless the lock was let go meanwhile."""
    begun, worked = threading.Event(), threading.Event()

    def work() -> None:
        begun.wait()
        for _ in range(1_000_000):
            pass
        worked.set()

    other = threading.Thread(target=work)
    other.start()
    begun.set()
    smollm2.encode("é😀 " * 200_000, add_special_tokens=False)
    has_worked = worked.is_set()
    other.join()
    assert has_worked
