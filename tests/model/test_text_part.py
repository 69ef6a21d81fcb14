"""Checkpoints that also see are served as the language model they hold."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.model.loader import open_model
from tests.golden.family_cases import DIRECTORY


def whole_of(tmp_path: Path, golden: str, architecture: str, prefix: str, **text_changes: Any) -> Path:
    """A golden as the text part of a whole, under transformers' names of one time or another. None drops a field."""
    shutil.copytree(DIRECTORY / golden, tmp_path / "whole")
    path = tmp_path / "whole" / "config.json"
    text = {**json.loads(path.read_text()), **text_changes}
    text = {name: value for name, value in text.items() if value is not None and name != "architectures"}
    path.write_text(json.dumps({"architectures": [architecture], "text_config": text, "vision_config": {},
                                "tie_word_embeddings": text.pop("tie_word_embeddings")}))
    _rename_tensors(tmp_path / "whole" / "model.safetensors", prefix)
    return tmp_path / "whole"


def _rename_tensors(path: Path, prefix: str) -> None:
    """Tensors of the text part under its prefix, and one of the eyes."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entries, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    start = "model." if prefix.endswith("language_model.") and prefix.startswith("model.") else ""
    header = {prefix + name.removeprefix(start): entry for name, entry in entries.items() if name != "__metadata__"}
    header["vision_tower.norm.weight"] = {"dtype": "F32", "shape": [2], "data_offsets": [len(data), len(data) + 8]}
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data + bytes(8))


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model."])
@pytest.mark.parametrize(("golden", "architecture"), [("gemma3", "Gemma3ForConditionalGeneration"),
                                                      ("mistral-window", "Mistral3ForConditionalGeneration")])
def test_the_text_part_is_the_language_model(tmp_path: Path, golden: str, architecture: str, prefix: str) -> None:
    alone = open_model(str(DIRECTORY / golden))
    found = open_model(str(whole_of(tmp_path, golden, architecture, prefix)))
    assert found.spec == alone.spec and found.eos_token_ids == alone.eos_token_ids
    assert set(found.weights) == set(alone.weights)
    name = "layers.0.q"
    assert found.weights[name].raw.tobytes() == alone.weights[name].raw.tobytes()    # type: ignore[union-attr]


def test_a_sparse_text_config_means_what_transformers_means(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("rms_norm_eps", "hidden_activation", "query_pre_attn_scalar"))
    path = whole_of(tmp_path, "gemma3", "Gemma3ForConditionalGeneration", "language_model.", **left_out)
    spec = open_model(str(path)).spec
    assert (spec.norm_eps, spec.activation, spec.attention_scale) == (1e-6, "gelu_tanh", 1 / 16)


def test_a_whole_without_a_text_part_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DIRECTORY / "gemma3", tmp_path / "whole")
    (tmp_path / "whole" / "config.json").write_text('{"architectures": ["Gemma3ForConditionalGeneration"]}')
    with pytest.raises(ModelError, match="text_config is missing"):
        open_model(str(tmp_path / "whole"))
