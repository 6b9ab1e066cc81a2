"""API keys: only their hashes are known here, and they are compared in constant time."""

import hashlib
import hmac

from flide_engine.errors import AuthenticationFailed


def key_hash(key: str) -> str:
    """SHA-256 of a key, in hex: what is configured in place of the key."""
    return hashlib.sha256(key.encode()).hexdigest()


def check_key(authorization: str, hashes: tuple[str, ...]) -> str:
    """The tenant of an `Authorization: Bearer <key>` header: its key's hash; "" if no key is set.

    Tenants share no checkpoint, so that how fast one is answered tells nothing of another. Raises
    AuthenticationFailed if the key's hash is not among `hashes`.
    """
    if not hashes:
        return ""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationFailed("an API key is needed: Authorization: Bearer <key>")
    given = key_hash(key.strip())
    # every hash is compared, so that the time does not tell which one is near
    found = [hmac.compare_digest(given, known) for known in hashes]
    if not any(found):
        raise AuthenticationFailed("the API key is not known")
    return given
