"""Writes chat_templates/expected.json: what transformers' apply_chat_template makes of chat_cases.py.

    /path/to/oracle-venv/bin/python -m tests.golden.make_chat_goldens

The templates are our own; together they use what published ones do. A prompt of null: transformers refused. Where a
template fails only because a message has no content, the reference is the same conversation with an empty one
("filled"): a null content is what clients send back beside tool calls.
"""

from __future__ import annotations

import copy
import json
from typing import Any
from unittest.mock import patch

from .chat_cases import CASES, GOLDEN_PATH, NOW, SPECIALS, TEMPLATES, rows


class FrozenDatetime:
    @staticmethod
    def now() -> Any:
        return NOW


def reference() -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "</s>": 1}, []))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **SPECIALS)


def rendered(tokenizer: Any, row: dict[str, Any], messages: list[Any]) -> dict[str, Any]:
    case = CASES[row["case"]]
    try:
        return {"prompt": tokenizer.apply_chat_template(
            copy.deepcopy(messages), tools=case.get("tools"), chat_template=TEMPLATES[row["template"]],
            tokenize=False, add_generation_prompt=row["mode"] == "open",
            continue_final_message=row["mode"] == "continued", **case.get("variables", {}))}
    except Exception as error:
        return {"prompt": None, "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


def made() -> list[dict[str, Any]]:
    tokenizer, results = reference(), []
    with patch("transformers.utils.chat_template_utils.datetime", FrozenDatetime):
        for row in rows():
            messages = CASES[row["case"]]["messages"]
            filled = [{**message, "content": message["content"] or ""} for message in messages]
            result = rendered(tokenizer, row, messages)
            if result.get("why", "").startswith("UndefinedError") and filled != messages:
                result = {**rendered(tokenizer, row, filled), "filled": True}
            results.append({**row, **result})
    return results


def main() -> None:
    import transformers

    results = made()
    golden = {"made_by": f"transformers {transformers.__version__}", "rows": results}
    GOLDEN_PATH.write_text(json.dumps(golden, ensure_ascii=True, indent=0) + "\n")
    refused = [row for row in results if row["prompt"] is None]
    print(f"{len(results)} prompts ({len(refused)} refused) -> {GOLDEN_PATH}, {GOLDEN_PATH.stat().st_size} bytes")
    for row in refused:
        print(f"  {row['template']}, {row['case']}, {row['mode']}: {row['why']}")


if __name__ == "__main__":
    main()
