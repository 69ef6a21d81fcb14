"""Text to token ids and back, over the tokenizers library. Built from a Hugging Face directory or by tokenizer_gguf.

A Tokenizer never changes after it is built, so any number of threads may use one. decode() is the definition of a
request's text: detokenizer.py streams exactly what decode() of all output ids gives.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders

from ..errors import ModelError, RequestError
from .fields import Fields, read_json_fields

logger = logging.getLogger(__name__)
# The library's own threads would compete with the kernels' for the cores. It reads this whenever it encodes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SAMPLES = ("", " ", "Ein Satz, 12 \u00e9\u4e00\U0001f600\n\tand  spaces ")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """special_tokens maps names (bos_token, eos_token, unk_token, pad_token) to their text, where the model has them.

    prefix is put before every text that is not empty and does not begin with an added token.
    vocab_size counts ids up to the highest one; the embedding may have more rows (padding). max_token_chars is how many
    characters the longest token stands for: so many need at least one token.
    """

    def __init__(self, inner: tokenizers.Tokenizer, special_tokens: Mapping[str, str], prefix: str = "") -> None:
        inner.no_truncation()       # a tokenizer.json may carry the settings of its training run
        inner.no_padding()
        self.inner = inner
        self.special_tokens = dict(special_tokens)
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self._prefix = prefix
        self._known_bytes: dict[int, bytes] = {}    # at most the vocabulary; two threads at once write the same
        self._added_texts = tuple(self.added_ids)
        vocabulary = inner.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.max_token_chars = max(map(len, vocabulary), default=1)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        if text is None:
            return None
        token_id = self.inner.token_to_id(text)
        if token_id is None:
            raise ModelError(f"tokenizer: {name} {text!r} is not in the vocabulary")
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. add_special_tokens adds what the model wants around a text (a BOS); text that spells a special
        token becomes that token either way. RequestError for a lone surrogate, and for what the library cannot
        encode."""
        if self._prefix and text and not text.startswith(self._added_texts):
            text = self._prefix + text
        try:
            # The batch form lets go of the GIL, which the engine's thread and the event loop wait for; _fast leaves out
            # the offsets, which nobody reads.
            return self.inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            _refuse_surrogates(text)
            raise
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise RequestError(f"text: this model's tokenizer fails on it: {error}", param="prompt") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, ids the vocabulary lacks are left out. RequestError for
        an id that is no unsigned 32-bit number."""
        try:
            return self.inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"tokens: ids must be integers of 0 to {2**32 - 1}: {error}", param="tokens") from None
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise RequestError(f"tokens: this model's tokenizer fails on them: {error}", param="tokens") from error

    def token_text(self, token_id: int) -> str:
        """One token alone as text, special or not; a token that is part of a character gives U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special or not, inside a text: SentencePiece may leave out a first space."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._find_bytes(token_id)
            if 0 <= token_id < self.vocab_size:
                self._known_bytes[token_id] = known
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        text = self.inner.id_to_token(token_id)
        if text is None:
            return b""
        if not self.is_byte_level:
            if _BYTE_TOKEN.fullmatch(text):
                return bytes([int(text[3:5], 16)])
            is_piece = self._marks_spaces and text not in self.added_ids
            return (text.replace("▁", " ") if is_piece else self.token_text(token_id)).encode()
        try:
            return bytes(map(BYTE_OF_CHAR.__getitem__, text))
        except KeyError:        # an added token in plain text
            return text.encode()

    @cached_property
    def is_byte_level(self) -> bool:
        """Every token is a string of bytes, and decoding concatenates them."""
        return isinstance(self.inner.decoder, decoders.ByteLevel)

    @cached_property
    def _marks_spaces(self) -> bool:
        """Tokens spell a space as U+2581, as SentencePiece does."""
        decoder = self.inner.decoder    # its own state: the whole tokenizer's would list every id up to the highest
        return decoder is not None and "▁" in repr(json.loads(decoder.__getstate__()))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the other 68 bytes from U+0100 on, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()
CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"text: lone surrogate U+{ord(text[error.start]):04X} at character {error.start} "
                           "cannot be encoded", param="prompt") from None


# ---- what the library does not survive

def _is_panic(error: BaseException) -> bool:
    """A bug or a broken file made the library's Rust code panic: no Exception, and a class without an address."""
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def panics_are_model_errors(where: str) -> Iterator[None]:
    """Around everything that builds a tokenizer of untrusted settings."""
    try:
        yield
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise ModelError(f"{where}: not a tokenizer: {error}") from error


def tried_out(tokenizer: Tokenizer, where: str) -> Tokenizer:
    """The tokenizer, after sample texts have gone through it: settings can be read and yet not be run."""
    try:
        for text in _SAMPLES:
            for has_special in (True, False):
                token_ids = tokenizer.encode(text, has_special)
                for some in (token_ids, token_ids[:1], token_ids[-1:]):
                    tokenizer.decode(some, not has_special)
    except Exception as error:
        raise ModelError(f"{where}: the tokenizer fails on a sample text: {error}") from error
    return tokenizer


# ---- from a Hugging Face directory

def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """From tokenizer.json, with the tokens that tokenizer_config.json, special_tokens_map.json and added_tokens.json
    add to it. Whether a text gets a BOS and an EOS is what tokenizer.json's post-processor says, as in transformers 5;
    a flag add_bos_token or add_eos_token that says otherwise is logged."""
    with panics_are_model_errors(str(directory / "tokenizer.json")):
        return _from_directory(directory)


def _from_directory(directory: Path) -> Tokenizer:
    inner = _load_tokenizer_json(directory / "tokenizer.json")
    config = _optional_fields(directory / "tokenizer_config.json")
    special_map = _optional_fields(directory / "special_tokens_map.json")
    _add_listed_tokens(inner, config, _optional_fields(directory / "added_tokens.json"))
    special_tokens = {}
    for name in SPECIAL_NAMES:
        text = _token_content(config, name) or _token_content(special_map, name)
        if text is not None:
            special_tokens[name] = text
    _mark_special(inner, special_tokens.values())
    tokenizer = tried_out(Tokenizer(inner, special_tokens), str(directory / "tokenizer.json"))
    around = tokenizer.encode("")
    for flag, adds in (("add_bos_token", around[:1] == [tokenizer.bos_token_id]),
                       ("add_eos_token", around[-1:] == [tokenizer.eos_token_id])):
        if config.flag(flag, adds) != adds:
            logger.warning("%s: %s is overruled by tokenizer.json, which %s it", config.where, flag,
                           "adds" if adds else "does not add")
    return tokenizer


def _load_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    read_json_fields(path)      # for its messages: missing, cut, LFS pointer
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:      # the library raises plain Exception
        raise ModelError(f"{path}: not a tokenizer: {error}") from error


def _optional_fields(path: Path) -> Fields:
    return read_json_fields(path) if path.exists() else Fields({}, str(path))


def _token_content(fields: Fields, name: str) -> str | None:
    value = fields.values.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise fields.refuse(name, "must be a string or an object with a content")
    return value


def _add_listed_tokens(inner: tokenizers.Tokenizer, config: Fields, added_tokens: Fields) -> None:
    """Tokens that only the side files know, in id order. ModelError when the library gives one another id."""
    listed: dict[int, AddedToken] = {}
    for text in added_tokens.values:
        listed[added_tokens.integer(text)] = AddedToken(text, special=False)
    decoder = config.mapping("added_tokens_decoder")
    for key in decoder.values:
        entry = decoder.mapping(key)
        if not key.isdecimal():
            raise decoder.refuse(key, "the key must be a token id")
        flags = {flag: entry.flag(flag, False) for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        listed[int(key)] = AddedToken(entry.text("content"), **flags)
    known = inner.get_added_tokens_decoder()
    for token_id, token in sorted(listed.items()):
        if token_id not in known:
            inner.add_tokens([token])
        if inner.token_to_id(token.content) != token_id:
            raise ModelError(f"{config.where}: added token {token.content!r} should have id {token_id}, tokenizer.json "
                             f"gives it {inner.token_to_id(token.content)}")


def _mark_special(inner: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    known = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    for text in dict.fromkeys(texts):
        if text not in known and inner.token_to_id(text) is not None:
            inner.add_special_tokens([AddedToken(text, special=True, normalized=False)])
