"""GGUF and safetensors: the same checkpoint in both gives the same model; damaged files say what is wrong."""

from __future__ import annotations

import contextlib
import json
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from paceline.errors import ModelError
from paceline.model import safetensors
from paceline.model.families import unpermuted_rows
from paceline.model.gguf import read_gguf
from paceline.model.loader import open_model
from paceline.ops.dequantize import BLOCKS, dequantize
from paceline.ops.interface import SourceTensor
from tests.golden.make_tokenizer_goldens import packaged_gguf

from . import blocks, tiny

FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_hf(tmp_path_factory.mktemp("hf") / "tiny")


def values(weight: object) -> np.ndarray:
    return dequantize(weight) if isinstance(weight, SourceTensor) else np.asarray(weight)


def test_gguf_and_directory_hold_the_same_model(gguf_path: Path, hf_path: Path) -> None:
    ours, theirs = open_model(str(gguf_path)), open_model(str(hf_path))
    assert ours.spec == theirs.spec
    assert set(ours.weights) == set(theirs.weights)
    for name in ours.weights:
        assert np.array_equal(values(ours.weights[name]), values(theirs.weights[name])), name
    assert ours.eos_token_ids == theirs.eos_token_ids == {2}
    assert ours.tokenizer.special_tokens == theirs.tokenizer.special_tokens
    text = "hello w\U0001f600 12 <|im_end|>"
    assert ours.tokenizer.encode(text) == theirs.tokenizer.encode(text)
    assert ours.chat_template is not None and theirs.chat_template is not None
    assert ours.chat_template.sources == theirs.chat_template.sources


def test_a_token_that_ends_a_turn_ends_the_text_though_the_file_names_another(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "base.gguf")
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.eos_token_id") + len(b"tokenizer.ggml.eos_token_id") + 4
    path.write_bytes(data[:at] + struct.pack("<I", 0) + data[at + 4:])
    assert open_model(str(path)).eos_token_ids == {0, 2}      # <|endoftext|> by its id, <|im_end|> by its text


def test_q_rows_come_back_in_the_checkpoints_order() -> None:
    rows = np.arange(2 * 8, dtype=np.float32)
    assert np.array_equal(tiny.permuted(rows, 2)[unpermuted_rows(2, 8)], rows)


@pytest.mark.parametrize("make", (blocks.weight_blocks, blocks.any_blocks))
@pytest.mark.parametrize("kind", BLOCKS)
def test_dequantisers_equal_ggufs_to_the_bit(kind: str, make: Callable[..., np.ndarray]) -> None:
    if kind not in blocks.HALVES:
        make = blocks.weight_blocks
    raw = make(kind, 8, 512, seed=7)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    ours = dequantize(SourceTensor("w", 8, 512, kind, raw))
    assert ours.dtype == np.float32 and ours.shape == (8, 512)
    assert np.array_equal(ours.view(np.uint32), np.ascontiguousarray(expected, np.float32).view(np.uint32))


def test_block_sizes_are_ggufs() -> None:
    assert {kind: tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]) for kind in BLOCKS} == BLOCKS


def test_bf16_of_safetensors_comes_out_as_bytes(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    raw = struct.pack("<4H", 0x3F80, 0xBF80, 0x4000, 0x7F80)
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw)
    tensors, _ = safetensors.read_file(path)
    matrix = tensors["w"].to_matrix()
    assert matrix.source_type == "BF16" and matrix.raw.tobytes() == raw
    assert dequantize(matrix).tolist() == [[1.0, -1.0], [2.0, float("inf")]]


def test_the_packaged_header_is_read_in_no_time() -> None:
    path = packaged_gguf()
    read_gguf(path)
    started = time.thread_time()
    file = read_gguf(path)
    assert time.thread_time() - started < 0.5      # 0.03 on a free core
    assert len(file.tensors) == 272


def test_every_tensor_is_where_ggufs_reader_finds_it(gguf_path: Path) -> None:
    file, reference = read_gguf(gguf_path), gguf.GGUFReader(gguf_path)
    assert {tensor.name for tensor in reference.tensors} == set(file.tensors)
    for tensor in reference.tensors:
        assert np.array_equal(file.tensors[tensor.name].raw, tensor.data.view(np.uint8).reshape(-1))
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "llama.block_count"):
        assert list(np.atleast_1d(file.metadata[name])) == list(np.atleast_1d(reference.fields[name].contents()))


# ---- split GGUF

@pytest.fixture
def split_path(tmp_path: Path) -> Path:
    tiny.write_gguf(tmp_path / "tiny.gguf", split_tensors=8)
    return tmp_path / "tiny-00001-of-00003.gguf"


@pytest.mark.parametrize("number", (1, 3))
def test_any_part_of_a_split_file_opens_the_whole_model(split_path: Path, gguf_path: Path, number: int) -> None:
    whole, split = open_model(str(gguf_path)), open_model(str(split_path.with_name(f"tiny-0000{number}-of-00003.gguf")))
    assert split.spec == whole.spec and list(split.weights) == list(whole.weights)
    for name in whole.weights:
        assert np.array_equal(values(split.weights[name]), values(whole.weights[name])), name
    assert "2 more parts" in split.source and split.model_hash == open_model(str(split_path)).model_hash


def test_missing_renamed_and_mixed_up_parts_are_named(split_path: Path) -> None:
    first, second, third = (split_path.with_name(f"tiny-0000{number}-of-00003.gguf") for number in (1, 2, 3))
    second.rename(split_path.with_name("kept"))
    with pytest.raises(ModelError, match=r"part tiny-00002-of-00003\.gguf is missing"):
        open_model(str(first))
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"tiny-00002.*split\.no=2: the file must be part 1 of 3"):
        open_model(str(first))
    data = bytearray(split_path.with_name("kept").read_bytes())
    second.write_bytes(data[:-40])
    with pytest.raises(ModelError, match=r"tiny-00002.*past the end of the file"):
        open_model(str(first))
    split_path.with_name("kept").rename(second)
    lone = first.rename(first.with_name("lone.gguf"))
    with pytest.raises(ModelError, match=r"lone\.gguf: split\.count=3: a part must be named NAME-00001-of-00003"):
        open_model(str(lone))


def test_a_tensor_in_two_parts_is_named(split_path: Path) -> None:
    second = split_path.with_name("tiny-00002-of-00003.gguf")
    names = [re.findall(rb"blk\.\d\.\w+\.weight", part.read_bytes()) for part in (split_path, second)]
    ours, theirs = next((a, b) for a in names[0] for b in names[1] if len(a) == len(b))
    second.write_bytes(second.read_bytes().replace(theirs, ours))
    with pytest.raises(ModelError, match=r"tiny-00002.* appears in an earlier part"):
        open_model(str(split_path))


# ---- damaged GGUF

def damaged(path: Path, tmp_path: Path, offset: int, new: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[offset : offset + len(new)] = new
    copy = tmp_path / "damaged.gguf"
    copy.write_bytes(bytes(data))
    return copy


@pytest.mark.parametrize(("offset", "new", "message"), [
    (0, b"GGML", "magic"),
    (4, struct.pack(">I", 3), "big-endian"),
    (4, struct.pack("<I", 1), "version 1"),
    (8, struct.pack("<Q", 1 << 60), "tensor_count 1152921504606846976"),
    (16, struct.pack("<Q", 1 << 60), "metadata_kv_count"),
    (24, struct.pack("<Q", 1 << 63), "key of metadata pair 0: needs 9223372036854775808 bytes"),
    (32, b"\xff\xfe", "UTF-8"),
])
def test_a_damaged_header_is_named(gguf_path: Path, tmp_path: Path, offset: int, new: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        read_gguf(damaged(gguf_path, tmp_path, offset, new))
    assert "damaged.gguf" in str(caught.value)


def test_a_duplicate_key_and_a_duplicate_tensor_are_named(gguf_path: Path, tmp_path: Path) -> None:
    data = gguf_path.read_bytes()
    for old, new in ((b"llama.block_count", b"llama.block_pount"), (b"blk.0.attn_q.weight", b"blk.1.attn_q.weight")):
        assert len(old) == len(new) and data.count(old) == 1
    tensor = damaged(gguf_path, tmp_path, data.index(b"blk.0.attn_q.weight"), b"blk.1.attn_q.weight")
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q\.weight' appears twice"):
        read_gguf(tensor)
    key = damaged(gguf_path, tmp_path, data.index(b"tokenizer.ggml.bos_token_id"), b"tokenizer.ggml.eos_token_id")
    with pytest.raises(ModelError, match=r"eos_token_id' appears twice"):
        read_gguf(key)


def test_an_offset_past_the_end_and_an_unknown_type_are_named(gguf_path: Path, tmp_path: Path) -> None:
    data = gguf_path.read_bytes()
    entry = data.index(b"output_norm.weight") + len("output_norm.weight")     # dimension count, extent, type, offset
    with pytest.raises(ModelError, match=r"output_norm\.weight: offset 1152921504606846976"):
        read_gguf(damaged(gguf_path, tmp_path, entry + 16, struct.pack("<Q", 1 << 60)))
    for type_id, name in ((23, "IQ4_XS"), (4, "number 4"), (999, "number 999")):
        with pytest.raises(ModelError, match=f"{name}.* is not supported; supported: F32"):
            read_gguf(damaged(gguf_path, tmp_path, entry + 12, struct.pack("<I", type_id)))


def test_a_cut_file_never_escapes_as_another_error(gguf_path: Path, tmp_path: Path) -> None:
    data = gguf_path.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 200), *range(200, len(data) - 1, 997), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            open_model(str(path))


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 9000), st.binary(min_size=1, max_size=8)), min_size=1, max_size=3))
def test_flipped_bytes_end_in_a_model_or_a_model_error(gguf_path: Path, tmp_path: Path,
                                                       edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(gguf_path.read_bytes())
    for offset, new in edits:
        data[offset : offset + len(new)] = new
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(bytes(data))
    with contextlib.suppress(ModelError):
        open_model(str(path))


# ---- damaged directories

def shard(directory: Path) -> dict[str, str]:
    """Splits the tiny checkpoint into two shards with an index; returns the weight_map."""
    arrays = tiny.hf_arrays()
    names = sorted(arrays)
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        shard_name = f"model-0000{number}-of-00002.safetensors"
        save_file({name: arrays[name] for name in part}, directory / shard_name)
        weight_map |= dict.fromkeys(part, shard_name)
    (directory / safetensors.INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_follow_the_weight_map_and_strays_are_ignored(tmp_path: Path, hf_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "sharded")
    shard(directory)
    (directory / "consolidated.safetensors").write_bytes(b"not a model")
    save_file({"model.norm.weight": np.zeros(3, np.float32)}, directory / "model-00003-of-00002.safetensors")
    sharded, single = open_model(str(directory)), open_model(str(hf_path))
    for name in single.weights:
        assert np.array_equal(values(sharded.weights[name]), values(single.weights[name])), name


def test_a_bad_index_is_named(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "sharded")
    weight_map = shard(directory)
    index = directory / safetensors.INDEX_NAME
    text = index.read_text()
    for bad, message in [
        (text[:-40], "not valid JSON"), ("[]", "must hold a JSON object"), ("{}", "weight_map is missing"),
        (json.dumps({"weight_map": {**weight_map, "model.norm.weight": "../x.safetensors"}}), "same directory"),
        (json.dumps({"weight_map": {**weight_map, "model.norm.weight": "x.safetensors"}}), "names x.safetensors"),
        (json.dumps({"weight_map": {**weight_map, "extra": next(iter(weight_map.values()))}}), "does not hold it"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ]:
        index.write_text(bad)
        with pytest.raises(ModelError, match=message):
            open_model(str(directory))


def test_weights_that_are_a_pointer_cut_or_misshapen_are_named(tmp_path: Path) -> None:
    directory = tiny.write_hf(tmp_path / "broken")
    weights = directory / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        open_model(str(directory))
    weights.write_bytes(data[:-1])
    with pytest.raises(ModelError, match="data_offsets"):
        open_model(str(directory))
    arrays = tiny.hf_arrays()
    down = "model.layers.1.mlp.down_proj.weight"
    save_file({**arrays, down: np.ascontiguousarray(arrays[down].T)}, weights)
    with pytest.raises(ModelError, match=rf"{down}: shape \[96, 64\], the config says \[64, 96\]"):
        open_model(str(directory))
    save_file({("renamed" if name == down else name): array for name, array in arrays.items()}, weights)
    with pytest.raises(ModelError, match=rf"missing: {down}; not used by this family: renamed"):
        open_model(str(directory))
    save_file({**arrays, "model.norm.weight": np.zeros(64, np.int64)}, weights)
    with pytest.raises(ModelError, match="dtype 'I64' is not supported"):
        open_model(str(directory))
    weights.unlink()
    with pytest.raises(ModelError, match="holds neither"):
        open_model(str(directory))


@FUZZ
@given(edits=st.lists(st.tuples(st.integers(0, 2500), st.binary(min_size=1, max_size=8)), max_size=3),
       cut=st.integers(0, 60000) | st.none())
def test_fuzzed_safetensors_end_in_a_model_or_a_model_error(hf_path: Path, tmp_path: Path,
                                                            edits: list[tuple[int, bytes]], cut: int | None) -> None:
    data = bytearray((hf_path / "model.safetensors").read_bytes())
    for offset, new in edits:
        data[offset : offset + len(new)] = new
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(bytes(data[:cut]))
    try:
        safetensors.read_file(path)
    except ModelError as error:
        assert "fuzz.safetensors" in str(error)


@pytest.mark.parametrize("header", [
    b"", b"[]", b"{", b'{"a":1}', b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{}}', b"[" * 5000,
    b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
    b'{"a":{"dtype":"F32","shape":[1e3],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}}',
])
def test_malformed_safetensors_headers_are_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelError, match=r"bad\.safetensors"):
        safetensors.read_file(path)
