"""Writes gguf_tokenizers.json: what transformers makes of nasty.py for each kind of GGUF tokenizer.

    /path/to/oracle-venv/bin/python -m tests.golden.make_gguf_tokenizer_goldens

The vocabularies are small ones, trained here on the same texts without any splitting, so that merges cross every border
a pre-tokenizer may draw and a wrong border changes the ids. The reference is transformers' own conversion of GGUF
metadata (transformers.integrations.gguf), with three things set as the published tokenizer.json files have them, which
that conversion leaves out: ignore_merges of Llama 3, Unicode normalisation (NFC) of Qwen2, and for "llama" files the
prefix space before a text that begins with a space already, by a normalizer, as in Llama 2 and Mistral ("phi3" there).
For texts with added tokens inside ("special_ids") that conversion is the reference as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from . import nasty

GOLDEN_PATH = Path(__file__).with_name("gguf_tokenizers.json")
BYTE_LEVEL = ("gpt-2", "smollm", "llama-bpe", "smaug-bpe", "dbrx", "gpt-4o", "qwen2")
SENTENCEPIECE = ("llama", "gemma2")     # general.architecture
SPECIAL_KINDS = (*SENTENCEPIECE, "phi3")
WHOLE = "supercalifragilisticexpialidocious"
SPECIALS = ["<unk>", "<s>", "</s>"]


def byte_level_vocabulary() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([text for text in nasty.TEXTS if WHOLE not in text], trainers.BpeTrainer(
        vocab_size=1500, initial_alphabet=alphabet, special_tokens=[*SPECIALS, "<|endoftext|>"], show_progress=False))
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    # A token no merge leads to: taken whole only where merges are ignored.
    return {"tokens": [*tokens, WHOLE],
            "merges": [" ".join(merge) for merge in model["merges"]],
            "token_type": [3] * 4 + [1] * (len(tokens) - 4 + 1)}


def sentencepiece_vocabulary() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.train_from_iterator(nasty.TEXTS[:-20], trainers.BpeTrainer(vocab_size=900, show_progress=False))
    vocabulary = tokenizer.get_vocab()
    pieces = sorted(vocabulary, key=lambda text: (len(text) == 1, vocabulary[text]))
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "<think>", *pieces]
    num_special = len(tokens) - len(pieces)
    return {"tokens": tokens, "scores": [0.0] * num_special + [-float(i) for i in range(len(pieces))],
            "token_type": [2, 3, 3] + [6] * 256 + [4] + [1] * len(pieces)}


def reference_ids(model: str, kind: str, vocabulary: dict[str, Any]) -> list[list[int]]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    metadata = {"tokenizer_type": model, **vocabulary}
    if model == "gpt2":
        metadata["pre_tokenizer_type"] = kind
    inner, _ = convert_gguf_tokenizer({"llama": "phi3"}.get(kind, kind), metadata)
    if kind == "smollm":
        inner.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if kind == "llama-bpe":
        inner.model.ignore_merges = True
    if kind == "qwen2":
        inner.normalizer = normalizers.NFC()
    return [inner.encode(text, add_special_tokens=False).ids for text in nasty.TEXTS]


def special_ids(kind: str, vocabulary: dict[str, Any]) -> list[list[int]]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    inner, _ = convert_gguf_tokenizer(kind, {"tokenizer_type": "llama", **vocabulary})
    return [inner.encode(text, add_special_tokens=False).ids for text in nasty.SPECIAL_TEXTS]


def made() -> dict[str, Any]:
    byte_level, sentencepiece = byte_level_vocabulary(), sentencepiece_vocabulary()
    return {
        "gpt2": {**byte_level, "ids": {kind: reference_ids("gpt2", kind, byte_level) for kind in BYTE_LEVEL}},
        "llama": {**sentencepiece, "ids": {kind: reference_ids("llama", kind, sentencepiece)
                                           for kind in SENTENCEPIECE},
                  "special_ids": {kind: special_ids(kind, sentencepiece) for kind in SPECIAL_KINDS}}}


def main() -> None:
    import transformers

    golden = {"made_by": f"transformers {transformers.__version__}", **made()}
    GOLDEN_PATH.write_text(json.dumps(golden, ensure_ascii=True, separators=(",", ":")) + "\n")
    print(GOLDEN_PATH, GOLDEN_PATH.stat().st_size)


if __name__ == "__main__":
    main()
