"""Models of the Hugging Face hub by their id: `owner/name`, or `owner/name:FILE.gguf` for one GGUF file.

Only the files that are read are fetched, into the cache that all Hugging Face tools share (HF_HOME), each under the
commit that the revision named when it was listed. Within a run a broken connection is resumed at its last chunk; when
the run ends early, files that are complete are kept and the others begin anew (huggingface_hub keeps no parts). The
address and the token come from HF_ENDPOINT and HF_TOKEN, or the token that `hf auth login` stored. Where the hub cannot
be reached, what the cache holds is used.

Every failure is a ModelError of one line. huggingface_hub is imported here only, and only for a hub id.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .fields import read_json_fields
from .safetensors import INDEX_NAME, SINGLE_NAME

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[^:]+\.gguf)?")
_SMALL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                "special_tokens_map.json", "added_tokens.json", "chat_template.json", "chat_template.jinja", INDEX_NAME)
_PART = re.compile(r"-\d{5}(-of-\d{5}\.gguf)")
_TIMEOUT_SECONDS = 20.0


def is_hub_id(name: str) -> bool:
    """Whether a name that is no local path may be a hub id."""
    return _HUB_ID.fullmatch(name) is not None and (":" in name or not name.endswith(".gguf"))


def fetch(name: str, revision: str | None) -> Path:
    """The directory, or the GGUF file, that holds the model; downloads what the cache lacks."""
    repo_id, _, gguf_name = name.partition(":")
    with _one_line(name, revision):
        hub = _Hub(repo_id, revision or "main")
        listing = hub.listing()
        if listing is None:
            return hub.cached(gguf_name or "config.json", is_directory=not gguf_name)
        return _fetch_gguf(hub, listing, gguf_name) if gguf_name else _fetch_directory(hub, listing)


@dataclass(frozen=True, slots=True)
class _Listing:
    commit: str
    num_bytes: Mapping[str, int]    # by file name


def _fetch_gguf(hub: _Hub, listing: _Listing, gguf_name: str) -> Path:
    pattern = _PART.sub(r"-*\1", gguf_name)
    parts = [name for name in listing.num_bytes if name == gguf_name or _PART.sub(r"-*\1", name) == pattern]
    if gguf_name not in parts:
        raise ModelError(f"model {hub.repo_id!r}: holds no file {gguf_name}; {_gguf_names(listing)}")
    paths = hub.download(listing, sorted(parts))
    return paths[gguf_name]


def _fetch_directory(hub: _Hub, listing: _Listing) -> Path:
    if INDEX_NAME not in listing.num_bytes and SINGLE_NAME not in listing.num_bytes:
        raise ModelError(f"model {hub.repo_id!r}: holds no safetensors weights; {_gguf_names(listing)}")
    if "config.json" not in listing.num_bytes:
        raise ModelError(f"model {hub.repo_id!r}: holds no config.json")
    paths = hub.download(listing, [name for name in _SMALL_FILES if name in listing.num_bytes])
    weights = {SINGLE_NAME}
    if INDEX_NAME in paths:
        weights = {str(shard) for shard in read_json_fields(paths[INDEX_NAME]).mapping("weight_map").values.values()}
    missing = sorted(weights - set(listing.num_bytes))
    if missing:
        raise ModelError(f"model {hub.repo_id!r}: {INDEX_NAME} names {missing[0]}, which the hub does not hold")
    hub.download(listing, sorted(weights))
    return paths["config.json"].parent


def _gguf_names(listing: _Listing) -> str:
    names = sorted(name for name in listing.num_bytes if name.endswith(".gguf"))
    if not names:
        return "and no .gguf files"
    return f"name one of its GGUF files after a colon: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


class _Hub:
    """One revision of one repository."""

    def __init__(self, repo_id: str, revision: str) -> None:
        from huggingface_hub import HfApi, constants

        self.repo_id, self.revision = repo_id, revision
        self._api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        self._cache = Path(os.environ.get("HF_HUB_CACHE") or constants.HF_HUB_CACHE)

    def listing(self) -> _Listing | None:
        """None where the hub cannot be reached and the cache holds this revision."""
        from huggingface_hub import errors

        try:
            found = self._api.model_info(self.repo_id, revision=self.revision, files_metadata=True,
                                         timeout=_TIMEOUT_SECONDS)
        except (errors.HTTPError, OSError) as error:
            if getattr(error, "response", None) is not None or not self._is_cached():
                raise
            logger.warning("%s: the hub cannot be reached; using the cached files", self.repo_id)
            return None
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in found.siblings or ()}
        return _Listing(found.sha or self.revision, sizes)

    def download(self, listing: _Listing, names: list[str]) -> dict[str, Path]:
        self._refuse_full_disk(listing, names)
        paths = {}
        for name in names:
            path = Path(self._api.hf_hub_download(self.repo_id, name, revision=listing.commit, cache_dir=self._cache))
            paths[name] = path
        self._remember(listing.commit)
        return paths

    def cached(self, name: str, is_directory: bool) -> Path:
        path = self._cached_path(name, self.revision)
        if path is None:
            raise ModelError(f"model {self.repo_id!r}: the hub cannot be reached, and the cache holds no {name}")
        return path.parent if is_directory else path

    def _refuse_full_disk(self, listing: _Listing, names: list[str]) -> None:
        needed = sum(listing.num_bytes[name] for name in names if self._cached_path(name, listing.commit) is None)
        self._cache.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._cache).free
        if needed > free:
            raise ModelError(f"model {self.repo_id!r}: needs {needed / 1e9:.3g} GB more on disk, {self._cache} has "
                             f"{free / 1e9:.3g} GB left; make room, or set HF_HOME to another disk")

    def _cached_path(self, name: str, revision: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repo_id, name, cache_dir=self._cache, revision=revision)
        return Path(found) if isinstance(found, str) else None

    @property
    def _reference(self) -> Path:
        return self._cache / f"models--{self.repo_id.replace('/', '--')}" / "refs" / self.revision

    def _is_cached(self) -> bool:
        return self._reference.exists() or (self._reference.parents[1] / "snapshots" / self.revision).exists()

    def _remember(self, commit: str) -> None:
        """As hf_hub_download does for a revision that is no commit: what it named, for times offline."""
        if commit != self.revision:
            self._reference.parent.mkdir(parents=True, exist_ok=True)
            self._reference.write_text(commit)


@contextmanager
def _one_line(name: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise ModelError(f"model {name!r}: not a hub id: {_first_line(error)}") from error
    except errors.GatedRepoError as error:
        raise ModelError(f"model {name!r}: the hub gives it only to accounts that accepted its terms; accept them on "
                         "its page and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(f"model {name!r}: no such file or directory, and the hub has no such model, or a private one; "
                         "for a private one set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"model {name!r}: revision {revision!r} is not on the hub") from error
    except errors.HfHubHTTPError as error:
        raise ModelError(f"model {name!r}: the hub answered {_status(error)}: {_first_line(error)}") from error
    except errors.HTTPError as error:
        raise ModelError(f"model {name!r}: the hub cannot be reached, or the connection broke: {_first_line(error)}; "
                         "files that are complete are kept") from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(f"model {name!r}: no space left on the disk of the Hugging Face cache; make room, or set "
                             "HF_HOME to another disk") from error
        raise ModelError(f"model {name!r}: cannot be downloaded: {_first_line(error)}") from error


def _status(error: Any) -> str:
    return str(getattr(getattr(error, "response", None), "status_code", "with an error"))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
