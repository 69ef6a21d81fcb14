"""Hub ids against a hub of our own on a socket: what is fetched, kept and resumed, and one line for each failure."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ModelError
from paceline.model import hub as hub_module
from paceline.model.hub import is_hub_id
from paceline.model.loader import open_model

from . import tiny
from .fake_hub import FakeHub, Repository
from .test_files import shard

READ = {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("checkpoints")
    single, sharded = tiny.write_hf(root / "single"), tiny.write_hf(root / "sharded")
    shard(sharded)
    (root / "gguf").mkdir()
    tiny.write_gguf(root / "gguf" / "tiny-Q8.gguf", quantization="Q8_0")
    tiny.write_gguf(root / "gguf" / "tiny.gguf", split_tensors=8)
    for directory in (single, sharded):
        (directory / "README.md").write_text("not read")
        (directory / "consolidated.safetensors").write_bytes(bytes(1000))
    return {directory.name: {path.name: path.read_bytes() for path in directory.iterdir()}
            for directory in (single, sharded, root / "gguf")}


@pytest.fixture
def hub(checkpoints: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    repositories = {f"org/{name}": Repository(dict(files)) for name, files in checkpoints.items()}
    repositories["org/private"] = Repository(dict(checkpoints["single"]), private_to="hf_secret")
    repositories["org/gated"] = Repository({}, private_to="hf_secret", is_gated=True)
    repositories["org/bin"] = Repository({"config.json": b"{}", "pytorch_model.bin": b"x"})
    served = FakeHub(repositories)
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    yield served
    served.close()


def fetched(hub: FakeHub) -> list[str]:
    return [name for name, _ in hub.downloads]


def test_only_the_files_that_are_read_are_fetched_and_only_once(hub: FakeHub) -> None:
    files = open_model("org/single")
    assert files.spec.num_layers == tiny.LAYERS
    assert sorted(fetched(hub)) == sorted(READ)
    hub.downloads.clear()
    assert open_model("org/single").model_hash == files.model_hash and not hub.downloads


def test_shards_are_those_of_the_index(hub: FakeHub) -> None:
    open_model("org/sharded")
    assert set(fetched(hub)) == READ - {"model.safetensors"} | {
        "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}


def test_one_gguf_file_is_named_after_a_colon(hub: FakeHub) -> None:
    assert "Q8_0" in open_model("org/gguf:tiny-Q8.gguf").source
    assert fetched(hub) == ["tiny-Q8.gguf"]
    assert "2 more parts" in open_model("org/gguf:tiny-00002-of-00003.gguf").source
    assert len(hub.downloads) == 4
    with pytest.raises(ModelError, match=r"holds no file Q4\.gguf; name one of its GGUF files.*tiny-Q8\.gguf"):
        open_model("org/gguf:Q4.gguf")
    with pytest.raises(ModelError, match=r"no safetensors weights; name one of its GGUF files.*: tiny-00001"):
        open_model("org/gguf")
    with pytest.raises(ModelError, match=r"no safetensors weights; and no \.gguf files"):
        open_model("org/bin")


def test_a_broken_connection_is_resumed_at_its_last_chunk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)      # 10 MB
    repository = hub.repositories["org/single"]
    repository.breaks["model.safetensors"] = 2
    open_model("org/single")
    size = len(repository.files["model.safetensors"])
    starts = [start for name, start in hub.downloads if name == "model.safetensors"]
    assert len(starts) == 3 and starts[0] == 0
    assert all(sent - 4096 < start <= sent for start, sent in zip(starts[1:], (size // 2, size * 3 // 4), strict=True))


def test_what_is_complete_is_kept_when_a_download_fails(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("huggingface_hub.file_download._chmod_and_move", full)
        with pytest.raises(ModelError, match=r"'org/single': no space left on the disk.*HF_HOME"):
            open_model("org/single")
    with monkeypatch.context() as broken:
        broken.setitem(hub.repositories["org/single"].files, "model.safetensors", b"")
        with pytest.raises(ModelError):
            open_model("org/single")
    hub.downloads.clear()
    open_model("org/single")
    assert fetched(hub) == ["model.safetensors"]


def test_too_little_space_is_told_before_anything_is_fetched(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10, used=7, free=3))
    with pytest.raises(ModelError, match=r"'org/single': needs .* GB more on disk, .*cache has 3e-09 GB left"):
        open_model("org/single")
    assert not hub.downloads


def test_a_private_model_needs_the_token_of_the_environment(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="'org/private': no such file or directory, and the hub has no such model, or"):
        open_model("org/private")
    with pytest.raises(ModelError, match="'org/gated': the hub gives it only to accounts that accepted its terms"):
        open_model("org/gated")
    with pytest.raises(ModelError, match="'org/unknown': no such file or directory, and the hub has no such model"):
        open_model("org/unknown")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert open_model("org/private").spec.num_layers == tiny.LAYERS


def test_a_revision_is_honoured_or_named(hub: FakeHub) -> None:
    assert open_model("org/single", revision="v1").spec.num_layers == tiny.LAYERS
    assert open_model("org/single", hub.repositories["org/single"].commit).spec.num_layers == tiny.LAYERS
    with pytest.raises(ModelError, match="revision 'v2' is not on the hub"):
        open_model("org/single", revision="v2")
    with pytest.raises(ModelError, match="revision='v1': model 'smollm2' is not a hub id"):
        open_model("smollm2", revision="v1")


def test_without_the_hub_the_cache_serves(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = open_model("org/single")
    open_model("org/gguf:tiny-Q8.gguf")
    commit = hub.repositories["org/single"].commit
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert open_model("org/single").model_hash == online.model_hash
    assert open_model("org/single", revision=commit).model_hash == online.model_hash
    assert "Q8_0" in open_model("org/gguf:tiny-Q8.gguf").source
    with pytest.raises(ModelError, match=r"the hub cannot be reached, and the cache holds no other\.gguf"):
        open_model("org/gguf:other.gguf")
    with pytest.raises(ModelError, match="'org/sharded': the hub cannot be reached, or the connection broke"):
        open_model("org/sharded")


def test_every_failure_is_one_line(hub: FakeHub) -> None:
    for name in ("org/unknown", "org/gated", "org/bin", "org/-.-"):
        with pytest.raises(ModelError) as caught:
            open_model(name)
        assert "\n" not in str(caught.value) and name in str(caught.value)


@pytest.mark.parametrize(("name", "is_one"), [
    ("org/name", True), ("org/name:a/B-Q4.gguf", True), ("org/file.gguf", False), ("name", False), ("a/b/c", False),
    ("./org/name", False), ("/org/name", False), ("org/name:x.bin", False), ("../name", False), ("o/n:a:b.gguf", False),
])
def test_what_looks_like_a_hub_id(name: str, is_one: bool) -> None:
    assert is_hub_id(name) == is_one


def test_a_local_directory_comes_first(hub: FakeHub, tmp_path: Path) -> None:
    tiny.write_hf(tmp_path / "org" / "single")
    assert "org/single" in open_model("org/single").source and not hub.downloads


def test_nothing_of_the_hub_is_loaded_without_need() -> None:
    assert not hasattr(hub_module, "huggingface_hub")
