"""A Tokenizer from GGUF metadata (tokenizer.ggml.*): byte-level BPE ("gpt2") or SentencePiece BPE ("llama").

The aim is the ids that transformers gives for the same model, so each kind is put together as that model's published
tokenizer.json has it. A pre-tokenizer that is not in the table is refused: a wrong one gives other ids without a word.
Where a SentencePiece model puts its prefix space, no file says; docs/formats.md tells the rule and who differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelError
from .fields import Fields
from .tokenizer import SPECIAL_NAMES, Tokenizer, panics_are_model_errors, tried_out

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4      # tokenizer.ggml.token_type
SPACE = "▁"                                             # how SentencePiece spells one


# Whether a BOS is added unless the file says otherwise, and what is put before a text.
Built = tuple[tokenizers.Tokenizer, bool, str]


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is split before merging. ignores_merges: a piece that is a token is taken whole. adds_bos: unless the
    file says otherwise."""

    splitter: Any
    normalizer: Any = None
    ignores_merges: bool = False
    adds_bos: bool = False


def _by_pattern(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_SINGLE_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = _by_pattern(_WORDS + r"|\p{N}{1,3}" + _REST)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = _by_pattern(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

_LLAMA3 = PreTokenizer(_THREE_DIGITS, ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer(_by_pattern(_WORDS + r"|\p{N}" + _REST), normalizers.NFC())
PRE_TOKENIZERS = {      # tokenizer.ggml.pre; behind it, who uses it
    "gpt-2": PreTokenizer(_GPT2),
    "smollm": PreTokenizer(_SINGLE_DIGITS),
    "starcoder": PreTokenizer(_SINGLE_DIGITS),
    "refact": PreTokenizer(_SINGLE_DIGITS),         # Granite 3
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": PreTokenizer(_THREE_DIGITS),
    "dbrx": PreTokenizer(_THREE_DIGITS),            # Phi-4
    "gpt-4o": PreTokenizer(_O200K),                 # Phi-4-mini
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_from_gguf(metadata: Fields) -> Tokenizer:
    """ModelError for other tokenizer models, unknown pre-tokenizers and metadata that contradict themselves."""
    with panics_are_model_errors(metadata.where):
        return tried_out(_from_gguf(metadata), metadata.where)


def _from_gguf(metadata: Fields) -> Tokenizer:
    model = metadata.text("tokenizer.ggml.model")
    if model not in TOKENIZER_MODELS:
        raise metadata.refuse("tokenizer.ggml.model", f"unknown; supported: {', '.join(TOKENIZER_MODELS)}")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    types = _token_types(metadata, len(tokens))
    special_tokens = {}
    for name, field in zip(SPECIAL_NAMES, ("bos", "eos", "unknown", "padding"), strict=True):
        field = f"tokenizer.ggml.{field}_token_id"
        if metadata.has(field):
            special_tokens[name] = tokens[_checked_id(metadata, field, len(tokens))]
    inner, adds_bos, prefix = TOKENIZER_MODELS[model](metadata, tokens, special_tokens.get("unk_token"))
    _add_marked_tokens(inner, tokens, types)
    bos = special_tokens.get("bos_token") if metadata.flag("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = special_tokens.get("eos_token") if metadata.flag("tokenizer.ggml.add_eos_token", False) else None
    if bos or eos:
        _wrap_texts(inner, bos, eos)
    return Tokenizer(inner, special_tokens, prefix)


def _byte_level_bpe(metadata: Fields, tokens: list[str], unknown: str | None) -> Built:
    if metadata.text("tokenizer.ggml.pre") not in PRE_TOKENIZERS:
        raise metadata.refuse("tokenizer.ggml.pre", f"unknown; supported: {', '.join(PRE_TOKENIZERS)}")
    if metadata.flag("tokenizer.ggml.add_space_prefix", False):
        raise metadata.refuse("tokenizer.ggml.add_space_prefix", "is not supported for byte-level BPE")
    pre = PRE_TOKENIZERS[metadata.text("tokenizer.ggml.pre")]
    inner = _bpe(metadata, tokens, _listed_merges(metadata), ignore_merges=pre.ignores_merges)
    inner.pre_tokenizer, inner.decoder = pre.splitter, decoders.ByteLevel()
    if pre.normalizer is not None:
        inner.normalizer = pre.normalizer
    return inner, pre.adds_bos, ""


def _sentencepiece_bpe(metadata: Fields, tokens: list[str], unknown: str | None) -> Built:
    """A space is spelled U+2581; characters without a token become byte tokens. With a prefix space, one is put before
    the text; Phi-3 puts one before each piece of text between added tokens."""
    architecture = metadata.text("general.architecture", "")
    is_gemma = architecture.startswith("gemma")
    if is_gemma:    # its files spell runs of spaces as such
        tokens = [SPACE * len(text) if text and not text.strip(" ") else text for text in tokens]
    if metadata.has("tokenizer.ggml.merges"):
        merges = _listed_merges(metadata)
    else:           # Gemma's tokens are in the order of its merges, its scores are not
        merges = _implied_merges(tokens, [-float(i) for i in range(len(tokens))] if is_gemma else
                                 _numbers(metadata, "tokenizer.ggml.scores", len(tokens)))
    inner = _bpe(metadata, tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    is_before_each = has_prefix and architecture == "phi3"
    spell = normalizers.Replace(" ", SPACE)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if is_before_each else spell
    text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if has_prefix else text)
    return inner, True, SPACE if has_prefix and not is_before_each else ""


Build = Callable[[Fields, list[str], str | None], Built]
TOKENIZER_MODELS: dict[str, Build] = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}


def _bpe(metadata: Fields, tokens: list[str], merges: list[tuple[str, str]], **settings: Any) -> tokenizers.Tokenizer:
    vocabulary = {text: token_id for token_id, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError(f"{metadata.where}: tokenizer.ggml.tokens holds {len(tokens) - len(vocabulary)} duplicates")
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **settings))
    except Exception as error:      # the library raises plain Exception, e.g. for a merge of unknown tokens
        raise ModelError(f"{metadata.where}: tokenizer.ggml.merges: {error}") from error


def _listed_merges(metadata: Fields) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if not space or " " in right:
            raise ModelError(f"{metadata.where}: tokenizer.ggml.merges[{index}] {merge!r:.80} is not a pair")
        merges.append((left, right))
    return merges


def _implied_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two, best score first: what SentencePiece merges at each step."""
    known = {text: token_id for token_id, text in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for text, score in zip(tokens, scores, strict=True):
        pairs = [(text[:cut], text[cut:]) for cut in range(1, len(text)) if text[:cut] in known and text[cut:] in known]
        pairs.sort(key=lambda pair: (known[pair[0]], known[pair[1]]))
        found += [(-score, -len(left), -len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in found]


def _add_marked_tokens(inner: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    marked = [(text, kind) for text, kind in zip(tokens, types, strict=True) if inner.token_to_id(text) is not None]
    _add(inner, (text for text, kind in marked if kind in (_UNKNOWN, _CONTROL)), is_special=True)
    _add(inner, (text for text, kind in marked if kind == _USER_DEFINED), is_special=False)


def _add(inner: tokenizers.Tokenizer, texts: Iterable[str], is_special: bool) -> None:
    added = [AddedToken(text, special=is_special, normalized=False) for text in texts]
    (inner.add_special_tokens if is_special else inner.add_tokens)(added)


def _wrap_texts(inner: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """encode(add_special_tokens=True) puts bos before and eos after a text, and nothing else."""
    single = " ".join([*([bos + ":0"] if bos else []), "$A:0", *([eos + ":0"] if eos else [])])
    pair = f"{single} $B:1"
    pieces = [(text, inner.token_to_id(text)) for text in dict.fromkeys((bos, eos)) if text]
    inner.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=pieces)


# ---- typed reading

def _token_types(metadata: Fields, num_tokens: int) -> list[int]:
    return [int(kind) for kind in _numbers(metadata, "tokenizer.ggml.token_type", num_tokens)]


def _numbers(metadata: Fields, name: str, num_tokens: int) -> list[float]:
    values = metadata.values.get(name)
    if values is None or not hasattr(values, "tolist") or len(values) != num_tokens:
        raise metadata.refuse(name, f"must hold one number for each of {num_tokens} tokens")
    numbers: list[float] = values.tolist()
    return numbers


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
