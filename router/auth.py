"""API keys and the tenants they stand for. Only hashes of keys are known here; they are compared in
constant time.
"""

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flide_engine.errors import AuthenticationFailed, ConfigError, NotReady

log = logging.getLogger("ray.serve")

ENVIRONMENT = "env:"
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Tenant:
    """Whose a request is. name: what checkpoints, turns and quotas know it by. The quotas are the
    fleet's; None: none.
    """

    name: str = ""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


class _Entry(BaseModel):
    """A tenant in a file of keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # shorter than a hash, which is the name of tenants without one
    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,63}$")
    key_sha256: list[str] = Field(min_length=1)
    requests_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    tokens_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)

    @field_validator("key_sha256")
    @classmethod
    def _are_hashes(cls, hashes: list[str]) -> list[str]:
        for digest in hashes:
            if not is_hash(digest):
                # the value is left out: it may be a key
                raise ValueError("takes SHA-256 hashes of keys in lower-case hex, not keys")
        return hashes


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    # without any, no key would be needed
    tenants: list[_Entry] = Field(min_length=1)


class Keys:
    """Keys that are known, by hash; none: no key is needed."""

    def __init__(self, hashes: Iterable[str] = (), needed: bool = False) -> None:
        """hashes: of keys that stand for a tenant without a name or quotas each. needed: whether
        there are more to be read, without which nobody may be let in.
        """
        self._needed, self._read = needed, not needed
        self._plain = {digest: Tenant(digest) for digest in hashes}
        self._known = dict(self._plain)
        self._source = ""

    def __len__(self) -> int:
        return len(self._known)

    def load(self, source: str) -> None:
        """Reads tenants anew from a file, or from an environment variable (`env:NAME`); "": none.

        Raises ConfigError, with what was known before still in force; also if keys were known or
        are needed, and none would be.
        """
        if not isinstance(source, str):
            raise ConfigError(f"api_keys is a {type(source).__name__}, not a text")
        found = self._plain | (read_tenants(source) if source else {})
        if not found and (self._needed or self._known):
            raise ConfigError("api_keys is empty, which would let everybody in")
        self._known, self._source, self._read = found, source, True

    def reload(self, source: str | None = None) -> None:
        """Reads tenants anew, from another source if one is named.

        Raises ConfigError if none were known; else they stay in force, and the log says why.
        """
        try:
            self.load(self._source if source is None else source)
        except ConfigError as error:
            if not self._source:
                raise
            log.error("API keys stay as they were: %s", error)
        else:
            log.info("API keys: %d known", len(self))

    def check(self, authorization: bytes) -> Tenant:
        """The tenant of an `Authorization: Bearer <key>` header, as it came.

        Tenants share no checkpoint, so that how fast one is answered tells nothing of another.
        Raises AuthenticationFailed if the key's hash is not known, and NotReady before keys that
        are needed have been read: Serve may route to a process that has yet to read them.
        """
        if not self._read:
            raise NotReady("the API keys are not read yet")
        known = self._known
        if not known:
            return Tenant()
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise AuthenticationFailed("an API key is needed: Authorization: Bearer <key>")
        given = key_hash(key.strip())
        # every hash is compared, so that the time does not tell which one is near
        found = [tenant for digest, tenant in known.items() if hmac.compare_digest(given, digest)]
        if not found:
            raise AuthenticationFailed("the API key is not known")
        return found[0]


def key_hash(key: str | bytes) -> str:
    """SHA-256 of a key's bytes (of a text in UTF-8), in hex: what is configured in place of it."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()


def is_hash(text: str) -> bool:
    """Whether a text is a SHA-256 in lower-case hex."""
    return _HASH.fullmatch(text) is not None


def read_tenants(source: str) -> dict[str, Tenant]:
    """Tenants by hash of key, from a file or an environment variable (`env:NAME`).

    Raises ConfigError naming what is wrong, without the values.
    """
    if source.startswith(ENVIRONMENT):
        text = os.environ.get(source.removeprefix(ENVIRONMENT), "")
    else:
        try:
            text = Path(source).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys {source}: {type(error).__name__}") from None
    try:
        entries = _File.model_validate_json(text).tenants
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'content'}: {e['msg']}"
            for e in error.errors(include_input=False, include_url=False)
        )
        raise ConfigError(f"api_keys {source}: {told}") from None
    found: dict[str, Tenant] = {}
    for entry in entries:
        tenant = Tenant(entry.name, entry.requests_per_minute, entry.tokens_per_minute)
        for digest in entry.key_sha256:
            if found.setdefault(digest, tenant) is not tenant:
                raise ConfigError(f"api_keys {source}: {entry.name} has a key of another tenant")
    if len({entry.name for entry in entries}) < len(entries):
        raise ConfigError(f"api_keys {source}: two tenants have one name")
    return found
