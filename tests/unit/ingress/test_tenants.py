from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from isthmus_ingress.openai.errors import Unauthorized
from isthmus_ingress.tenants import ANYONE, CLIENTS, Keyring, Quota, Tenant, parse_tenants, read_tenants
from isthmus_shared.errors import ConfigInvalid

KEY, OTHER = "sk-0123456789abcdef", "sk-fedcba9876543210"


def test_a_line_names_a_tenant_its_keys_its_quota_and_its_class() -> None:
    hashed = hashlib.sha256(OTHER.encode()).hexdigest()
    text = "\n".join(
        [
            "# whom we serve",
            json.dumps({"name": "acme", "key": KEY, "requests_per_min": 60, "slo_class": "interactive"}),
            "",
            json.dumps({"name": "batch", "sha256": [hashed.upper()], "max_concurrent": 2, "cache_salt": "x"}),
        ]
    )
    ring = Keyring(entries=parse_tenants(text, "keys"))
    acme, batch = ring.tenant_of(f"Bearer {KEY}"), ring.tenant_of(f"bearer  {OTHER} ")
    assert acme == Tenant("acme", "interactive", "acme")
    assert batch == Tenant("batch", "", "x")
    assert ring.quotas == {acme: Quota(requests_per_min=60), batch: Quota(max_concurrent=2)}


@pytest.mark.parametrize("authorization", [None, "", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ", f"Bearer{KEY}"])
def test_whoever_brings_no_key_of_ours_is_refused(authorization: str | None) -> None:
    ring = Keyring(api_keys=[OTHER], entries=parse_tenants(json.dumps({"name": "acme", "key": KEY}), "keys"))
    with pytest.raises(Unauthorized) as refused:
        ring.tenant_of(authorization)
    assert KEY not in refused.value.text
    assert ring.tenant_of(f"Bearer {OTHER}") is CLIENTS


def test_without_any_key_everybody_is_anyone() -> None:
    assert Keyring().tenant_of(None) is ANYONE
    assert Keyring().tenant_of("Bearer whatever") is ANYONE


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "JSON object"),
        ('{"name": "acme"}', "neither key nor sha256"),
        ('{"name": "a b", "key": "KEY"}', "name"),
        ('{"name": "anyone", "key": "KEY"}', "taken by Isthmus"),
        ('{"name": "acme", "key": "short-secret"}', "key"),
        ('{"name": "acme", "key": "with a blank secret"}', "key"),
        ('{"name": "acme", "sha256": "gggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggg"}', "sha256"),
        ('{"name": "acme", "key": "KEY", "requests_per_min": 0}', "requests_per_min"),
        ('{"name": "acme", "key": "KEY", "tokens_per_min": "9"}', "tokens_per_min"),
        ('{"name": "acme", "key": "KEY", "quota": 1}', "quota"),
        ('{"name": "acme", "key": ["KEY", "KEY"]}', "given before"),
        ('{"name": "acme", "key": "KEY"}\n{"name": "acme", "key": "OTHER"}', "named twice"),
        ('{"name": "acme", "key": "KEY"}\n{"name": "b", "key": "KEY"}', "given before"),
    ],
)
def test_what_is_wrong_with_a_line_is_told_without_its_secret(line: str, why: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        parse_tenants(line.replace("KEY", KEY).replace("OTHER", OTHER), "keys")
    text = refused.value.text
    assert why in text
    assert f"keys:{line.count(chr(10)) + 1}" in text
    assert not any(secret in text for secret in (KEY, OTHER, "secret"))
    assert refused.value.__cause__ is None


def test_a_file_that_cannot_serve_anybody_ends_the_start(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("# nobody\n")
    binary.write_bytes(b"\xff\xfe" + KEY.encode())
    for path, why in ((empty, "nobody is in it"), (binary, "UTF-8"), (tmp_path, "directory"), (tmp_path / "no", "No")):
        with pytest.raises(ConfigInvalid, match=why):
            read_tenants(path)


def test_a_salt_that_a_request_asks_for_parts_it_further_and_gives_it_no_other_tenants() -> None:
    one, other, nobody = Tenant("one", cache_salt="one"), Tenant("other", cache_salt="other"), ANYONE
    salts = [tenant.salt_with(asked) for tenant in (one, other, nobody) for asked in (None, "one", "other", "x")]
    assert len(set(salts)) == len(salts)
    assert one.salt_with("x") == Tenant("again", cache_salt="one").salt_with("x")
    assert nobody.salt_with(None) == ""
