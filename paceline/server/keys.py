"""API keys and the admin key: where they come from, and a comparison that takes as long for a wrong key as for a right.

Keys of all sources count together: --api-key, --api-key-file and the variable PACELINE_API_KEY; the admin key comes
from --admin-key or PACELINE_ADMIN_KEY. A file has one key a line, optionally followed by the name of its tenant; lines
that begin with # are comments. Only digests are kept.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ..config import ServerConfig
from ..errors import ConfigError

API_KEY_VARIABLE, ADMIN_KEY_VARIABLE = "PACELINE_API_KEY", "PACELINE_ADMIN_KEY"


@dataclass(frozen=True, slots=True)
class Key:
    """One key that opens the server. `tenant`: on whose account its requests go; None: the request's `user` says."""

    digest: bytes
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class KeyRing:
    """With no keys everything is open but /admin, which is closed without an admin key."""

    keys: tuple[Key, ...] = ()
    admin: Key | None = None

    def find(self, secrets: Iterable[bytes]) -> Key | None:
        """The key among these that opens the server. The admin key opens everything."""
        return _match((*self.keys, *([] if self.admin is None else [self.admin])), secrets)

    def is_admin(self, secrets: Iterable[bytes]) -> bool:
        return self.admin is not None and _match((self.admin,), secrets) is not None


def _match(keys: tuple[Key, ...], secrets: Iterable[bytes]) -> Key | None:
    """Every secret is compared with every key, whichever matches; digests, so that lengths do not tell either."""
    digests = [sha256(secret).digest() for secret in secrets]
    found = None
    for key in keys:
        for digest in digests:
            found = key if hmac.compare_digest(key.digest, digest) else found
    return found


def read_keys(config: ServerConfig, environment: Mapping[str, str]) -> KeyRing:
    """Raises ConfigError for an empty or repeated key and for a file that cannot be read. Names no key."""
    keys = []
    for source, text in (("api_key", config.api_key), (API_KEY_VARIABLE, environment.get(API_KEY_VARIABLE))):
        if text is not None:
            keys.append(_key(source, text))
    if config.api_key_file is not None:
        keys += _keys_of_file(config.api_key_file)
    admin = None
    for source, text in (("admin_key", config.admin_key), (ADMIN_KEY_VARIABLE, environment.get(ADMIN_KEY_VARIABLE))):
        if text is not None and admin is None:
            admin = _key(source, text)
    digests = [key.digest for key in keys] + ([] if admin is None else [admin.digest])
    if len(set(digests)) < len(digests):
        raise ConfigError("the same key is given twice: each must be another, and the admin key too")
    return KeyRing(tuple(keys), admin)


def _key(source: str, text: str, tenant: str | None = None) -> Key:
    if not text.strip():
        raise ConfigError(f"{source} must not be empty: an empty key would let everybody in")
    return Key(sha256(text.strip().encode()).digest(), tenant)


def _keys_of_file(name: str) -> list[Key]:
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"api_key_file={name!r} cannot be read: {reason}") from error
    keys = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ConfigError(f"api_key_file={name!r}, line {number}: expected a key, or a key and a tenant's name")
        keys.append(_key("api_key_file", words[0], words[1] if len(words) > 1 else None))
    if not keys:
        raise ConfigError(f"api_key_file={name!r} holds no key")
    return keys
