"""The certificate of `make serve TLS=1`: made once, renewed in time, keys for their owner alone."""

from __future__ import annotations

import ssl
import stat
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509

from serve_app.certificates import CERTIFICATE_DAYS, ends_at
from serve_app.launch.driver import driver_environment
from serve_app.launch.haproxy_config import amended
from serve_app.launch.laptop_tls import prepare
from serve_app.launch.preflight import LaunchError, free_port

PATHS = "/chat/completions"

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    prepare(tmp_path, NOW)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "tls", *(tmp_path / "tls").iterdir()]}
    assert modes == {"tls": 0o700, "ca.pem": 0o600, "ca-key.pem": 0o600, "server.pem": 0o600}


def test_a_second_start_changes_nothing(tmp_path: Path) -> None:
    first = prepare(tmp_path, NOW)
    before = (first.authority.read_bytes(), first.served.read_bytes())
    second = prepare(tmp_path, NOW + timedelta(days=CERTIFICATE_DAYS - 31))
    assert (second.authority.read_bytes(), second.served.read_bytes()) == before


def test_a_certificate_that_ends_soon_is_renewed_by_the_same_authority(tmp_path: Path) -> None:
    made = prepare(tmp_path, NOW)
    authority = made.authority.read_bytes()
    later = NOW + timedelta(days=CERTIFICATE_DAYS - 29)
    prepare(tmp_path, later)
    assert made.authority.read_bytes() == authority
    assert ends_at(made.served) == later + timedelta(days=CERTIFICATE_DAYS)


@pytest.mark.parametrize("lost", ["ca.pem", "ca-key.pem", "server.pem"])
def test_what_is_lost_is_made_again_and_fits(tmp_path: Path, lost: str) -> None:
    made = prepare(tmp_path, NOW)
    (tmp_path / "tls" / lost).unlink()
    prepare(tmp_path, NOW)
    authority = x509.load_pem_x509_certificate(made.authority.read_bytes())
    x509.load_pem_x509_certificate(made.served.read_bytes()).verify_directly_issued_by(authority)


def test_a_damaged_key_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    made = prepare(tmp_path, NOW)
    (tmp_path / "tls" / "ca-key.pem").write_text("no key")
    made.served.unlink()
    with pytest.raises(LaunchError, match=r"tls can't be read or written .* delete that folder"):
        prepare(tmp_path, NOW)


def test_only_the_entrance_for_clients_is_encrypted() -> None:
    text = "frontend http_frontend\n    bind 127.0.0.1:8000\n    use_backend gateways if { path_beg / }\n"
    lines = amended(text, "127.0.0.1", Path("/run/lane.sock"), PATHS, "", "/run/served.pem").splitlines()
    assert [line for line in lines if " ssl " in line] == [
        "    bind 127.0.0.1:8000 ssl crt /run/served.pem alpn http/1.1"
    ]
    assert "    http-request set-header x-forwarded-proto https" in lines
    plain = amended(text, "127.0.0.1", Path("/run/lane.sock"), PATHS)
    assert " ssl " not in plain
    assert "x-forwarded-proto" not in plain


CONFIG = """
defaults
    mode http
    timeout connect 60s
    timeout client 60s
    timeout server 60s
frontend prometheus
    bind :{exporter}
    http-request use-service prometheus-exporter if {{ path /metrics }}
frontend http_frontend
    bind 127.0.0.1:{front}
    http-request return status 200 if {{ path /health }}
"""


def get(url: str, verify: ssl.SSLContext | bool = True) -> httpx.Response:
    return httpx.get(url, verify=verify, trust_env=False, timeout=60)


def test_clients_of_the_authority_are_served_others_and_plain_http_are_not(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    now = datetime.now(UTC)
    made = prepare(tmp_path, now)
    other = prepare(tmp_path / "other", now)
    front, exporter = free_port(), free_port()
    binary = driver_environment(tmp_path, tmp_path / "run", exporter, made.served)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    file = tmp_path / "haproxy.cfg"
    file.write_text(CONFIG.format(front=front, exporter=exporter))
    with subprocess.Popen([binary, "-db", "-f", str(file)], stderr=subprocess.DEVNULL) as process:
        try:
            trusting = ssl.create_default_context(cafile=made.authority)
            deadline = time.monotonic() + 60
            while True:
                try:
                    answer = httpx.get(
                        f"https://localhost:{front}/health", verify=trusting, trust_env=False, timeout=60
                    )
                    break
                except httpx.ConnectError:
                    assert process.poll() is None, "HAProxy refuses the configuration"
                    assert time.monotonic() < deadline
                    time.sleep(0.02)
            assert answer.status_code == 200
            distrusting = ssl.create_default_context(cafile=other.authority)
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                get(f"https://localhost:{front}/health", verify=distrusting)
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                get(f"http://127.0.0.1:{front}/health")
        finally:
            process.terminate()
