"""A webhook leads to a public address, and to the one that was looked at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.webhook_address import UNUSABLE, BadAddress, pinned


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
    with pytest.raises(BadAddress) as refused:
        await pinned(f"https://{host}/", private=False)
    assert str(refused.value) == UNUSABLE
    assert (await pinned(f"https://{host}/", private=True)).headers == {"host": host}


@pytest.mark.parametrize(
    "host",
    ["93.184.215.14", "[2606:2800:21f:cb07::1]", "[64:ff9b::93.184.215.14]", "[2002:5db8:d70e::1]"],
)
async def test_public_addresses_are_allowed(host: str) -> None:
    assert (await pinned(f"https://{host}/", private=False)).headers == {"host": host}


async def test_one_private_address_among_a_names_refuses_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def found(*_: Any, **__: Any) -> list[Any]:
        return [(None, None, None, "", (address, 443)) for address in ("93.184.215.14", "10.0.0.1")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    with pytest.raises(BadAddress) as refused:
        await pinned("https://example.org/", private=False)
    assert str(refused.value) == UNUSABLE
    assert "10.0.0.1" in caplog.text


async def test_a_name_that_is_nowhere_and_one_that_is_private_are_told_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise an account's holder could list the names and addresses of the service's own network."""

    async def found(host: str, *_: Any, **__: Any) -> list[Any]:
        if host == "nowhere.internal":
            raise OSError("Name or service not known")
        return [(None, None, None, "", ("10.0.0.1", 443))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    for host in ("nowhere.internal", "ledger.internal"):
        with pytest.raises(BadAddress) as refused:
            await pinned(f"https://{host}/", private=False)
        assert str(refused.value) == UNUSABLE
        assert host in caplog.text


@pytest.mark.parametrize("port", [0, 22, 80, 5432, 8443, 65535])
async def test_only_the_port_of_https_is_called_unless_private_addresses_are_allowed(port: int) -> None:
    target = f"https://93.184.215.14:{port}/"
    with pytest.raises(BadAddress, match="port 443"):
        await pinned(target, private=False)
    assert (await pinned(target, private=True)).url.port == port
    assert (await pinned("https://93.184.215.14:443/", private=False)).url.port is None


async def test_a_public_address_is_asked_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: Any, **__: Any) -> list[Any]:
        return [(None, None, None, "", ("93.184.215.14", 443))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found)
    address = await pinned("https://example.org/hook", private=False)
    assert str(address.url) == "https://93.184.215.14/hook"
    assert (address.headers, address.extensions) == ({"host": "example.org"}, {"sni_hostname": "example.org"})
