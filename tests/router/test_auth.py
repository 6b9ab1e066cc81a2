"""API keys: where they come from, what is refused, and what no message says."""

import hmac
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flide_engine.errors import AuthenticationFailed, ConfigError, NotReady
from router.auth import Keys, Tenant, key_hash, read_tenants
from router.ingress import Gateway
from router.options import HttpLimits

SECRET = "sk-very-secret"
ACME: dict[str, Any] = {
    "name": "acme",
    "key_sha256": [key_hash("old"), key_hash("new")],
    "requests_per_minute": 600,
    "tokens_per_minute": 1e6,
}
OTHER: dict[str, Any] = {"name": "other", "key_sha256": [key_hash(SECRET)]}


def written(folder: Path, *tenants: dict[str, Any]) -> str:
    """A file of these tenants."""
    path = folder / "keys.json"
    path.write_text(json.dumps({"tenants": tenants}))
    return str(path)


def bearer(key: str) -> bytes:
    """The header's value."""
    return f"Bearer {key}".encode()


def test_keys_of_a_file_stand_for_tenants_with_quotas(tmp_path: Path) -> None:
    """Several keys of one tenant are one tenant; keys without quotas go on beside them."""
    keys = Keys((key_hash("plain"),))
    keys.load(written(tmp_path, ACME, OTHER))
    acme = Tenant("acme", 600, 1e6)
    assert [keys.check(bearer(k)) for k in ("old", "new", SECRET)] == [acme, acme, Tenant("other")]
    assert keys.check(bearer("plain")) == Tenant(key_hash("plain"))
    assert len(keys) == 4
    for wrong in (b"", b"Bearer ", b"Basic old", bearer("olD"), bearer(key_hash("old"))):
        with pytest.raises(AuthenticationFailed):
            keys.check(wrong)


@pytest.mark.parametrize("key", ["schl\u00fcssel", "voil\u00e0", "\u9375"])
def test_a_key_is_its_bytes(key: str) -> None:
    """Whatever they are a text of; the last of them may be a blank in another encoding."""
    keys = Keys((key_hash(key), key_hash(b"\xff\xfe")))
    assert keys.check(bearer(key)) == Tenant(key_hash(key))
    assert keys.check(b"bearer  \xff\xfe ") == Tenant(key_hash(b"\xff\xfe"))
    with pytest.raises(AuthenticationFailed):
        keys.check(b"Bearer " + key.encode("utf-16"))


def test_an_environment_variable_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same text."""
    monkeypatch.setenv("OUR_KEYS", Path(written(tmp_path, ACME)).read_text())
    assert read_tenants("env:OUR_KEYS")[key_hash("new")].name == "acme"
    with pytest.raises(ConfigError, match="env:NONE"):
        read_tenants("env:NONE")


def test_without_keys_everyone_is_let_in() -> None:
    """As the tenant without a name."""
    assert Keys().check(b"") == Keys().check(bearer("x")) == Tenant()


def test_reading_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key that is gone is refused; a file that cannot be read changes nothing later."""
    keys = Keys()
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        keys.reload(str(tmp_path / "none"))
    source = written(tmp_path, ACME)
    keys.reload(source)
    written(tmp_path, {**ACME, "key_sha256": [key_hash("new")], "requests_per_minute": 1}, OTHER)
    keys.reload()
    assert keys.check(bearer("new")).requests_per_minute == 1
    with pytest.raises(AuthenticationFailed):
        keys.check(bearer("old"))
    Path(source).write_text("{")
    keys.reload()
    assert "API keys stay as they were" in caplog.text
    assert keys.check(bearer(SECRET)).name == "other"


def test_no_change_of_a_source_lets_everybody_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty one, or one of another type; a Gateway that starts with one does not start."""
    keys = Keys()
    keys.reload(written(tmp_path, ACME))
    sources: list[Any] = ["", 0, ["x"], False]
    for source in sources:
        caplog.clear()
        keys.reload(source)
        assert "API keys stay as they were" in caplog.text
        with pytest.raises(AuthenticationFailed):
            keys.check(b"")
        keys.reload()
        assert keys.check(bearer("old")).name == "acme"
        with pytest.raises(ConfigError, match="api_keys"):
            Keys(needed=True).reload(source)
    plain = Keys((key_hash("plain"),), needed=True)
    plain.reload("")
    with pytest.raises(AuthenticationFailed):
        plain.check(b"")


@pytest.mark.parametrize("hashes", [(), (key_hash("plain"),)])
def test_nobody_is_let_in_before_the_keys_are_read(tmp_path: Path, hashes: tuple[str, ...]) -> None:
    """Nor after they could not be; whoever has a key may come again."""
    keys = Keys(hashes, needed=True)
    for attempt in range(2):
        for given in (b"", bearer("old"), bearer("plain")):
            with pytest.raises(NotReady, match="not read yet"):
                keys.check(given)
        if not attempt:
            with pytest.raises(ConfigError):
                keys.reload(str(tmp_path / "none"))
    keys.reload(written(tmp_path, ACME))
    assert keys.check(bearer("old")).name == "acme"
    with pytest.raises(AuthenticationFailed):
        keys.check(b"")


def test_a_gateway_of_an_app_with_keys_needs_some() -> None:
    """Whatever its `user_config` has become since."""
    names = {"app_name": "app", "deployment_name": "Engine"}
    handle = SimpleNamespace(options=lambda **_: None, **names)
    made: Any = Gateway.__mro__[1]  # as Serve's wrapper is a server, too
    for has_ledger in (False, True):
        gateway = made(handle, HttpLimits(1, 1, 1.0), has_ledger=has_ledger)
        if has_ledger:
            with pytest.raises(ConfigError, match="let everybody in"):
                gateway.reconfigure({"api_keys": ""})
        else:
            gateway.reconfigure({"api_keys": ""})


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ([], "tenants: "),  # an open server is never what a file of keys is for
        ([{**ACME, "key_sha256": []}], "key_sha256"),
        ([{**ACME, "key_sha256": [SECRET]}], "takes SHA-256 hashes"),
        ([{**ACME, "key_sha256": [key_hash("x").upper()]}], "takes SHA-256 hashes"),
        ([{**ACME, "name": key_hash("x")}], "name"),
        ([{**ACME, "name": "a b"}], "name"),
        ([{**ACME, "requests_per_minute": 0}], "requests_per_minute"),
        ([{**ACME, "tokens_per_minute": -1}], "tokens_per_minute"),
        ([{**ACME, "requests_per_day": 5}], "requests_per_day"),
        ([ACME, {**OTHER, "key_sha256": [key_hash("new")]}], "a key of another tenant"),
        ([ACME, {**OTHER, "name": "acme"}], "two tenants have one name"),
    ],
)
def test_files_that_cannot_be_meant(
    tmp_path: Path, tenants: list[dict[str, Any]], message: str
) -> None:
    """Are refused by what is wrong, and never by saying what may be a key."""
    with pytest.raises(ConfigError, match=message) as raised:
        read_tenants(written(tmp_path, *tenants))
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_no_file() -> None:
    """Is named."""
    with pytest.raises(ConfigError, match="/nowhere/keys: FileNotFoundError"):
        read_tenants("/nowhere/keys")


def test_every_hash_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the right one is, and if there is none: the time says nothing."""
    compared: list[str] = []

    def counted(a: str, b: str) -> bool:
        compared.append(b)
        return a == b

    hashes = tuple(map(key_hash, "abcdef"))
    monkeypatch.setattr(hmac, "compare_digest", counted)
    keys = Keys(hashes)
    for key in "af":
        assert keys.check(bearer(key)).name == key_hash(key)
        assert tuple(compared) == hashes
        compared.clear()
    with pytest.raises(AuthenticationFailed):
        keys.check(bearer("none"))
    assert tuple(compared) == hashes
