"""A webhook leads to a public address, and to the one that was looked at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.webhook_address import BadAddress, pinned


@pytest.mark.parametrize(
    "target",
    [
        "http://example.org/", "https://user:pass@93.184.215.14/", "https:///", "file:///etc/passwd",
        "https://example..org/", f"https://{'a' * 64}.example/", "https://xn--zz--/",
    ],
)  # fmt: skip
async def test_what_is_no_https_address_is_refused(target: str) -> None:
    with pytest.raises(BadAddress):
        await pinned(target, private=False)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "0.0.0.0", "10.0.0.1", "100.64.0.1", "169.254.169.254", "172.16.0.1", "192.168.0.1",
        "192.0.0.8", "192.0.0.192", "192.0.2.1", "192.88.99.1", "168.63.129.16", "198.18.0.1", "224.0.0.1", "240.0.0.1",
        "255.255.255.255", "2130706433", "0x7f000001",
        "[::]", "[::1]", "[::10.0.0.1]", "[::93.184.215.14]", "[::ffff:10.0.0.1]", "[::ffff:0:10.0.0.1]",
        "[64:ff9b::10.0.0.1]", "[64:ff9b::169.254.169.254]", "[64:ff9b::168.63.129.16]", "[64:ff9b:1::93.184.215.14]",
        "[100::1]", "[2001::1]", "[2001:1::1]", "[2001:db8::1]", "[2002:a00:1::]", "[2002:a83f:8110::]", "[3fff::1]",
        "[4000::1]", "[fc00::1]", "[fd00:ec2::254]", "[fe80::1]", "[fec0::1]", "[ff02::1]", "[ff0e::1]",
    ],
)  # fmt: skip
async def test_no_webhook_leads_into_the_services_own_network(host: str) -> None:
    with pytest.raises(BadAddress, match="not public"):
        await pinned(f"https://{host}/", private=False)
    assert (await pinned(f"https://{host}/", private=True)).headers == {"host": host}


@pytest.mark.parametrize(
    "host",
    ["93.184.215.14", "[2606:2800:21f:cb07::1]", "[64:ff9b::93.184.215.14]", "[2002:5db8:d70e::1]"],
)
async def test_public_addresses_are_allowed(host: str) -> None:
    assert (await pinned(f"https://{host}/", private=False)).headers == {"host": host}


async def test_one_private_address_among_a_names_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: Any, **__: Any) -> list[Any]:
        return [(None, None, None, "", (address, 443)) for address in ("93.184.215.14", "10.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    with pytest.raises(BadAddress, match=r"10\.0\.0\.1"):
        await pinned("https://example.org/", private=False)


async def test_a_public_address_is_asked_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: Any, **__: Any) -> list[Any]:
        return [(None, None, None, "", ("93.184.215.14", 443))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    address = await pinned("https://example.org:8443/hook", private=False)
    assert str(address.url) == "https://93.184.215.14:8443/hook"
    assert (address.headers, address.extensions) == ({"host": "example.org:8443"}, {"sni_hostname": "example.org"})
