"""Text to token ids and back, over the tokenizers library. Built from a Hugging Face directory or GGUF metadata.

A Tokenizer never changes after it is built, so any number of threads may use one. decode() is the definition of a
request's text: detokenizer.py streams exactly what decode() of all output ids gives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from ..errors import ModelError, RequestError
from .fields import Fields, read_json_fields

logger = logging.getLogger(__name__)
# The library's own threads would compete with the kernels' for the cores. It reads this whenever it encodes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """special_tokens maps names (bos_token, eos_token, unk_token, pad_token) to their text, where the model has them.

    vocab_size counts ids up to the highest one; the embedding may have more rows (padding).
    """

    def __init__(self, inner: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        inner.no_truncation()       # a tokenizer.json may carry the settings of its training run
        inner.no_padding()
        self.inner = inner
        self.special_tokens = dict(special_tokens)
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_ids = {token.content: token_id for token_id, token in added.items()}
        self.vocab_size = max([inner.get_vocab_size(), *(token_id + 1 for token_id in added)])
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
        token becomes that token either way. RequestError when the text holds a lone surrogate."""
        try:
            # The batch form lets go of the GIL, which the engine's thread and the event loop wait for; _fast leaves out
            # the offsets, which nobody reads.
            return self.inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            _refuse_surrogates(text)
            raise

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, ids the vocabulary lacks are left out. RequestError for
        an id that is no unsigned 32-bit number."""
        try:
            return self.inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"tokens: ids must be integers of 0 to {2**32 - 1}: {error}", param="tokens") from None

    def token_text(self, token_id: int) -> str:
        """One token alone as text, special or not; a token that is part of a character gives U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    @cached_property
    def max_token_chars(self) -> int:
        """Characters the longest token stands for: so many characters need at least one token."""
        return max(map(len, self.inner.get_vocab()), default=1)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special or not. Where the vocabulary is not byte-level: of its text alone."""
        if not self.is_byte_level:
            return self.token_text(token_id).encode()
        text = self.inner.id_to_token(token_id)
        if text is None:
            return b""
        try:
            return bytes(map(BYTE_OF_CHAR.__getitem__, text))
        except KeyError:        # an added token in plain text
            return text.encode()

    @cached_property
    def is_byte_level(self) -> bool:
        """Every token is a string of bytes, and decoding concatenates them."""
        return isinstance(self.inner.decoder, decoders.ByteLevel)


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


# ---- from a Hugging Face directory

def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """From tokenizer.json, with the tokens that tokenizer_config.json, special_tokens_map.json and added_tokens.json
    add to it. Whether a text gets a BOS is what tokenizer.json's post-processor says, as in transformers 5; a flag
    add_bos_token that says otherwise is logged."""
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
    tokenizer = Tokenizer(inner, special_tokens)
    adds_bos = tokenizer.encode("")[:1] == [tokenizer.bos_token_id]
    if config.flag("add_bos_token", adds_bos) != adds_bos:
        logger.warning("%s: add_bos_token is overruled by tokenizer.json, which %s a BOS", config.where,
                       "adds" if adds_bos else "does not add")
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


def _wrap_texts(inner: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """encode(add_special_tokens=True) puts bos before and eos after a text, and nothing else."""
    single = " ".join([*([bos + ":0"] if bos else []), "$A:0", *([eos + ":0"] if eos else [])])
    pair = f"{single} $B:1"
    pieces = [(text, inner.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text]
    inner.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=pieces)


# ---- from GGUF metadata

_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PRE_TOKENIZERS = {      # tokenizer.ggml.pre -> how text is split before merging
    "gpt-2": _GPT2,
    "smollm": pre_tokenizers.Sequence([_DIGITS, _GPT2]),
    "starcoder": pre_tokenizers.Sequence([_DIGITS, _GPT2]),
    "refact": pre_tokenizers.Sequence([_DIGITS, _GPT2]),
}
_CONTROL, _USER_DEFINED = 3, 4      # tokenizer.ggml.token_type


def tokenizer_from_gguf(metadata: Fields) -> Tokenizer:
    """A byte-level BPE tokenizer from tokenizer.ggml.*. ModelError for other models and unknown pre-tokenizers."""
    if metadata.text("tokenizer.ggml.model") != "gpt2":
        raise metadata.refuse("tokenizer.ggml.model", "only 'gpt2' (byte-level BPE) is supported")
    if metadata.text("tokenizer.ggml.pre") not in PRE_TOKENIZERS:
        raise metadata.refuse("tokenizer.ggml.pre", f"unknown; supported: {', '.join(PRE_TOKENIZERS)}")
    if metadata.flag("tokenizer.ggml.add_space_prefix", False):
        raise metadata.refuse("tokenizer.ggml.add_space_prefix", "is not supported for byte-level BPE")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    inner = _byte_level_bpe(metadata, tokens)
    inner.pre_tokenizer = PRE_TOKENIZERS[metadata.text("tokenizer.ggml.pre")]
    _add_marked_tokens(inner, metadata, tokens)
    special_tokens = {}
    for name, field in zip(SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
        field = f"tokenizer.ggml.{field}_token_id"
        if metadata.has(field):
            special_tokens[name] = tokens[_checked_id(metadata, field, len(tokens))]
    bos = special_tokens.get("bos_token") if metadata.flag("tokenizer.ggml.add_bos_token", False) else None
    eos = special_tokens.get("eos_token") if metadata.flag("tokenizer.ggml.add_eos_token", False) else None
    if bos or eos:
        _wrap_texts(inner, bos, eos)
    return Tokenizer(inner, special_tokens)


def _byte_level_bpe(metadata: Fields, tokens: list[str]) -> tokenizers.Tokenizer:
    vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{metadata.where}: tokenizer.ggml.tokens holds {len(tokens) - len(vocabulary)} duplicates")
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise ModelError(f"{metadata.where}: tokenizer.ggml.merges[{index}] {merge!r:.80} is not a pair")
        merges.append((left, right))
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    except Exception as error:      # the library raises plain Exception, e.g. for a merge of unknown tokens
        raise ModelError(f"{metadata.where}: tokenizer.ggml.merges: {error}") from error
    inner.decoder = decoders.ByteLevel()
    return inner


def _add_marked_tokens(inner: tokenizers.Tokenizer, metadata: Fields, tokens: list[str]) -> None:
    types = metadata.values.get("tokenizer.ggml.token_type")
    if types is None or not hasattr(types, "tolist") or len(types) != len(tokens):
        raise metadata.refuse("tokenizer.ggml.token_type", f"must hold one number for each of {len(tokens)} tokens")
    marked = [(text, kind) for text, kind in zip(tokens, types.tolist(), strict=True)
              if kind in (_CONTROL, _USER_DEFINED)]
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False)
                              for text, kind in marked if kind == _CONTROL])
    inner.add_tokens([AddedToken(text, special=False, normalized=False)
                      for text, kind in marked if kind == _USER_DEFINED])


def _checked_id(metadata: Fields, field: str, num_tokens: int) -> int:
    token_id = metadata.integer(field)
    if not 0 <= token_id < num_tokens:
        raise metadata.refuse(field, f"outside the vocabulary of {num_tokens} tokens")
    return token_id


def _strings(metadata: Fields, name: str) -> list[str]:
    value = metadata.values.get(name)
    if not isinstance(value, list):
        raise metadata.refuse(name, "must be an array of strings")
    return value
