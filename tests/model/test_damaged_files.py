"""Whatever is in a file, opening the model ends in a model or in our own error: nothing else escapes and nothing hangs.

Files are damaged where it hurts: JSON by its structure, binary headers by their counts, lengths, types and offsets.
"""

from __future__ import annotations

import contextlib
import copy
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from paceline.build import load_model
from paceline.config import ModelConfig
from paceline.errors import ConfigError, ModelError, RequestError
from paceline.model import safetensors
from paceline.model.chat_template import ChatTemplate
from paceline.model.decoder import record_decoder
from paceline.model.gguf import read_gguf
from paceline.model.loader import ModelFiles, open_model
from paceline.model.tokenizer import tokenizer_from_directory
from paceline.model.tokenizer_gguf import tokenizer_from_gguf
from paceline.ops.numpy_ops import NumpyBackend

from . import quantized, test_prequantized, tiny
from .test_tokenizer_gguf import metadata

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JUNK: list[Any] = [
    None, True, 0, -1, 1, 2, 300, 2**31, 2**32, 2**63, 2**70, 1.5, float("nan"), "", "a", "\u0120", "(", "[", "\\",
    "a b", "../x.safetensors", "x" * 300, [], {}, ["a"], {"a": 1}, [[]], [["a", "b"]], {"type": "BPE"},
    {"type": "Sequence"}]


@st.composite
def broken(draw: st.DrawFn, value: Any) -> Any:
    """The value with one to three of its parts, at any depth, deleted or something else."""
    root = {"": copy.deepcopy(value)}
    for _ in range(draw(st.integers(1, 3))):
        node: Any = root
        while True:
            key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
            if not isinstance(node[key], dict | list) or not node[key] or draw(st.integers(0, 4)) == 0:
                break
            node = node[key]
        if node is not root and draw(st.integers(0, 4)) == 0:
            del node[key]
        else:
            node[key] = copy.deepcopy(draw(st.sampled_from(JUNK)))
    return root[""]


def opened(path: Path) -> ModelFiles | None:
    try:
        return open_model(str(path))
    except ModelError as error:
        assert str(error) and "Traceback" not in str(error)
        return None


# ---- the JSON of a directory

@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The text of every JSON file a directory may hold, by name; the directory is sharded."""
    directory = tiny.write_hf(tmp_path_factory.mktemp("sound"))
    files = {path.name: json.loads(path.read_text()) for path in directory.glob("*.json")}
    names = sorted(tiny.hf_arrays())
    return files | {
        "generation_config.json": {"eos_token_id": [1, 2], "temperature": 0.5}, "added_tokens.json": {"<tool>": 264},
        "special_tokens_map.json": {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"},
        "chat_template.json": {"chat_template": [{"name": "default", "template": "{{ messages }}"}]},
        safetensors.INDEX_NAME: {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}}


@FUZZ
@given(data=st.data())
def test_the_json_of_a_directory(tmp_path: Path, sound: dict[str, Any], data: st.DataObject) -> None:
    directory = tiny.write_hf(tmp_path / "damaged")
    name = data.draw(st.sampled_from(sorted(sound)))
    text = json.dumps(data.draw(broken(sound[name])))
    end = data.draw(st.none() | st.integers(0, len(text)))
    (directory / name).write_text(text[:end])
    files = opened(directory)
    if files is not None and files.chat_template is not None:
        with contextlib.suppress(RequestError):
            files.chat_template.render([{"role": "user", "content": "x"}], True)
    for path in directory.iterdir():
        path.unlink()


def rich_tokenizer() -> dict[str, Any]:
    """A tokenizer.json with as many kinds of parts as one can have."""
    inner = tiny.build_tokenizer()
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("_"), normalizers.Lowercase(),
                                             normalizers.Replace(Regex(" +"), "_"), normalizers.Strip()])
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{L}+|\s"), "isolated"),
                                                   pre_tokenizers.Metaspace(), pre_tokenizers.ByteLevel()])
    inner.post_processor = processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing(
        "<|im_start|> $A", "<|im_start|> $A $B", [("<|im_start|>", 1)])])
    inner.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    parsed: dict[str, Any] = json.loads(inner.to_str())
    return parsed


RICH, PLAIN = rich_tokenizer(), json.loads(tiny.build_tokenizer().to_str())


@settings(FUZZ, max_examples=600)
@given(tokenizer=broken(RICH) | broken(PLAIN), text=st.text(max_size=20))
def test_a_tokenizer_json(tmp_path: Path, tokenizer: Any, text: str) -> None:
    directory = tiny.write_hf(tmp_path / "damaged")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    try:
        found = tokenizer_from_directory(directory)
    except ModelError as error:
        assert str(directory) in str(error) or "tokenizer" in str(error)
        return
    with contextlib.suppress(RequestError):
        found.decode(found.encode(text))


def changed(tokenizer: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {**tokenizer, **parts}


@pytest.mark.parametrize("tokenizer", [
    changed(PLAIN, model={**PLAIN["model"], "continuing_subword_prefix": "x" * 1000}),
    changed(RICH, post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}],
                                  "pair": [], "special_tokens": {}}),
    changed(PLAIN, model={**PLAIN["model"], "merges": [["zz", "yy"]]}),
    changed(PLAIN, pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
])
def test_settings_the_library_panics_or_fails_on_are_a_bad_model(tmp_path: Path, tokenizer: Any) -> None:
    directory = tiny.write_hf(tmp_path / "panics")
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"tokenizer\.json: "):
        tokenizer_from_directory(directory)


def test_an_id_far_beyond_the_vocabulary_is_refused_at_once(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "far")
    far = copy.deepcopy(PLAIN)
    far["model"]["vocab"]["hello"] = 2**32 - 2
    (directory / "tokenizer.json").write_text(json.dumps(far))
    with pytest.raises(ModelError, match="4294967295 ids, but the embedding"):
        open_model(str(directory))


@pytest.mark.parametrize("num_positions", [2**40, 2**62])
def test_a_context_that_no_memory_holds_is_refused_before_its_tables(tmp_path: Path, num_positions: int) -> None:
    directory = tiny.write_hf(tmp_path / "long", tiny.hf_config(max_position_embeddings=num_positions))
    with pytest.raises(ConfigError, match=rf"rotary tables of {num_positions} positions .* lower max_model_len"):
        load_model(ModelConfig(model=str(directory)))
    assert load_model(ModelConfig(model=str(directory), max_model_len=64)).max_model_len == 64


@FUZZ
@given(text=st.binary(max_size=60) | st.text("{}%#-=|()[]'\"abc \n", max_size=40).map(str.encode))
def test_a_chat_template(tmp_path: Path, text: bytes) -> None:
    directory = tiny.write_hf(tmp_path / "damaged")
    (directory / "chat_template.jinja").write_bytes(text)
    files = opened(directory)
    if files is not None:
        assert isinstance(files.chat_template, ChatTemplate)
        with contextlib.suppress(RequestError):
            files.chat_template.render([{"role": "user", "content": "x"}], True)


# ---- GGUF

ARRAYS = [np.zeros(0, np.float32), np.arange(3, dtype=np.int32), np.full(1164, np.nan), np.full(1164, 7, np.uint64)]


@settings(FUZZ, max_examples=400)
@given(data=st.data())
def test_the_tokenizer_of_a_gguf_file(data: st.DataObject) -> None:
    """Values of every type that GGUF metadata can have."""
    values = dict(metadata(data.draw(st.sampled_from(["gpt2", "llama"]))).values)
    names = [*values, "tokenizer.ggml.merges", "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        kept = values.get(name)
        if isinstance(kept, list) and data.draw(st.booleans()):
            values[name] = data.draw(st.sampled_from(
                [kept[:-1], kept[::-1], [*kept, "a"], [*kept[:-1], ""], kept[:1] * 9]))
        elif kept is not None and hasattr(kept, "shape") and data.draw(st.booleans()):
            values[name] = data.draw(st.sampled_from(
                [kept[:-1], kept[::-1], kept * 0, kept - 1, kept.astype(np.float64)]))
        else:
            values[name] = data.draw(st.sampled_from([*JUNK[1:16], ["a"], ["a b", "c"], [], *ARRAYS]))
    try:
        found = tokenizer_from_gguf(type(metadata("gpt2"))(values, "damaged.gguf"))
    except ModelError as error:
        assert "damaged.gguf" in str(error) or "tokenizer" in str(error)
        return
    with contextlib.suppress(RequestError):
        found.decode(found.encode("<s>Hello w\u00f6rld 12"))


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def numbers_of_the_header(path: Path) -> list[tuple[int, int]]:
    """Place and size of every count, length, type id, extent and offset, as gguf's own reader finds them."""
    reader = gguf.GGUFReader(path)
    found = [(4, 4), (8, 8), (16, 8)]
    for field in [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]:
        at = field.offset
        for part in field.parts:
            if at and part.dtype in (np.uint32, np.uint64):
                found += [(at + index * part.itemsize, part.itemsize) for index in range(part.size)]
            at += part.nbytes
    return found


def test_every_number_of_a_gguf_header(gguf_path: Path, tmp_path: Path) -> None:
    """And none of them makes us take memory that the file does not back."""
    data, path = gguf_path.read_bytes(), tmp_path / "damaged.gguf"
    places = numbers_of_the_header(gguf_path)
    assert len(places) > 300
    tracemalloc.start()
    for at, size in places[:60] + places[60:-120:7] + places[-120:]:
        sound_value = int.from_bytes(data[at : at + size], "little")
        for value in {0, 1, sound_value + 1, sound_value ^ 0x80, (1 << (8 * size - 1)), (1 << (8 * size)) - 1}:
            path.write_bytes(data[:at] + value.to_bytes(size, "little") + data[at + size :])
            opened(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64 << 20


def test_a_file_of_the_other_byte_order(gguf_path: Path, tmp_path: Path) -> None:
    data = gguf_path.read_bytes()
    path = tmp_path / "big.gguf"
    path.write_bytes(data[:4] + struct.pack(">IQQ", 3, *struct.unpack("<QQ", data[8:24])) + data[24:])
    with pytest.raises(ModelError, match="big-endian"):
        read_gguf(path)


def test_missing_surplus_and_misshapen_tensors_of_a_gguf_file_are_named(tmp_path: Path) -> None:
    arrays = tiny.hf_arrays()
    down = "model.layers.1.mlp.down_proj.weight"
    path = tiny.write_gguf(tmp_path / "shape.gguf", {**arrays, down: np.ascontiguousarray(arrays[down].T)})
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_down\.weight: shape \[96, 64\], the config says \[64, 96\]"):
        open_model(str(path))
    renamed = {("extra.weight" if name == down else name): array for name, array in arrays.items()}
    with pytest.raises(ModelError, match=r"missing: blk\.1\.ffn_down\.weight; not used by this family: extra\.weight"):
        open_model(str(tiny.write_gguf(tmp_path / "missing.gguf", renamed)))
    del renamed["extra.weight"]
    with pytest.raises(ModelError, match=r"missing: blk\.1\.ffn_down\.weight; not used by this family: none"):
        open_model(str(tiny.write_gguf(tmp_path / "less.gguf", renamed)))


# ---- safetensors

@FUZZ
@given(data=st.data())
def test_the_header_of_a_safetensors_file(tmp_path: Path, data: st.DataObject) -> None:
    directory = tiny.write_hf(tmp_path / "damaged")
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.dumps(data.draw(broken(json.loads(raw[8 : 8 + length])))).encode()
    told = data.draw(st.sampled_from([len(header), len(header), len(header) - 1, len(header) + 9, 0, 2**63, 2**64 - 1]))
    path.write_bytes(struct.pack("<Q", told) + header + raw[8 + length :])
    opened(directory)


# ---- checkpoints that come quantised

FP8_SETTINGS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def fp8_checkpoint() -> tuple[dict[str, Any], quantized.Arrays]:
    arrays: quantized.Arrays = {}
    for name, array in tiny.hf_arrays().items():
        if name.endswith("_proj.weight"):
            parts = test_prequantized.fp8_arrays(*array.shape, (1, 1), "weight_scale_inv")
            arrays |= {name: parts["a.weight"], name + "_scale_inv": parts["a.weight_scale_inv"]}
        else:
            arrays[name] = array
    return tiny.hf_config(quantization_config=FP8_SETTINGS), arrays


CHECKPOINTS = {"awq": quantized.four_bit_checkpoint("awq")[:2], "gptq": quantized.four_bit_checkpoint("gptq")[:2],
               "fp8": fp8_checkpoint()}


@FUZZ
@given(data=st.data())
def test_a_quantised_checkpoint(tmp_path: Path, data: st.DataObject) -> None:
    """Its settings, and tensors that are missing or of another shape or type: an error, or weights that pack."""
    config, arrays = CHECKPOINTS[data.draw(st.sampled_from(sorted(CHECKPOINTS)))]
    config, arrays = copy.deepcopy(config), dict(arrays)
    if data.draw(st.booleans()):
        config["quantization_config"] = data.draw(broken(config["quantization_config"]))
    for name in data.draw(st.lists(st.sampled_from(sorted(arrays)), max_size=2, unique=True)):
        array = arrays.pop(name)
        how = data.draw(st.sampled_from(["gone", "short", "turned", "flat", "float32", "int32", "uint8"]))
        if how != "gone":
            arrays[name] = (array[:-1] if how == "short" and array.ndim else array.T if how == "turned" else
                            array.reshape(-1) if how == "flat" else array.astype(how if how.endswith(tuple("28")) else
                                                                                 array.dtype))
    directory = tiny.write_hf(tmp_path / "damaged", config)
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    tiny.write_safetensors(directory / "model.safetensors", test_prequantized.stored(contiguous))
    files = opened(directory)
    if files is not None:
        with contextlib.suppress(ModelError):
            record_decoder(files.spec, files.weights, NumpyBackend(), "auto", 64)
