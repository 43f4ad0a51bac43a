"""`serve-app cluster`: nodes trust each other and nobody else; keys stay secret, nothing is overwritten unasked."""

from __future__ import annotations

import shlex
import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from serve_app.certificates import AUTHORITY_DAYS, make_authority

from .conftest import Result, Run

HEAD, WORKER = "head.example,127.0.0.2", "worker,127.0.0.3"


def variables(folder: Path) -> dict[str, str]:
    """As a shell reads them on the node."""
    parts = (line.partition("=") for line in shlex.split((folder / "ray-tls.env").read_text()))
    return {name: value for name, _, value in parts}


def context(node: Path, *, server: bool) -> ssl.SSLContext:
    """As Ray's processes talk to each other: both sides show a certificate."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(node / "ca.pem")
    made.load_cert_chain(node / "node.pem", node / "node-key.pem")
    return made


def talk(server: Path, client: Path, address: str, name: str | None = None) -> str:
    """Returns what the client, which asks for `name`, reads from the server at `address`.

    Raises ssl.SSLError when either does not trust the other.
    """
    with socket.create_server((address, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            try:
                with context(server, server=True).wrap_socket(connection, server_side=True) as secured:
                    secured.sendall(b"hello")
            except OSError:  # the client sees it, too
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname()) as plain,
                context(client, server=False).wrap_socket(plain, server_hostname=name or address) as secured,
            ):
                return secured.recv(10).decode()
        finally:
            thread.join(60)


def test_nodes_trust_each_other_by_their_addresses(run: Run, tmp_path: Path) -> None:
    made = run("cluster", "certificates", "--out", "tls", HEAD, WORKER, "--json").json
    assert [node["node"] for node in made["nodes"]] == ["head.example", "worker"]
    head, worker = tmp_path / "tls" / "head.example", tmp_path / "tls" / "worker"
    assert talk(head, worker, "127.0.0.2") == talk(worker, head, "127.0.0.3") == "hello"
    assert talk(head, head, "127.0.0.1") == "hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        talk(head, worker, "127.0.0.3")


def test_a_node_of_another_authority_gets_nothing(run: Run, tmp_path: Path) -> None:
    for folder in ("tls", "other"):
        run("cluster", "certificates", "--out", folder, HEAD)
    ours, other = tmp_path / "tls" / "head.example", tmp_path / "other" / "head.example"
    with pytest.raises(ssl.SSLError):
        talk(ours, other, "127.0.0.2")
    (other / "ca.pem").write_bytes((ours / "ca.pem").read_bytes())  # it trusts us, and shows a certificate of its own
    with pytest.raises((ssl.SSLError, ConnectionError)):
        assert talk(ours, other, "127.0.0.2") == "hello"


def test_a_node_is_added_by_the_same_authority_and_renewed_only_when_asked(run: Run, tmp_path: Path) -> None:
    run("cluster", "certificates", "--out", "tls", HEAD)
    head, worker = tmp_path / "tls" / "head.example", tmp_path / "tls" / "worker"
    before = (head / "node.pem").read_bytes()
    refused = run("cluster", "certificates", "--out", "tls", WORKER, HEAD)
    assert refused.code == 1
    assert "tls/head.example already exists: use --renew" in refused.error_line
    assert not worker.exists()
    run("cluster", "certificates", "--out", "tls", WORKER)
    assert (head / "node.pem").read_bytes() == before
    assert talk(head, worker, "127.0.0.2") == "hello"
    run("cluster", "certificates", "--out", "tls", "--renew", HEAD)
    assert (head / "node.pem").read_bytes() != before
    assert talk(head, worker, "127.0.0.2") == talk(worker, head, "127.0.0.3") == "hello"


def test_keys_are_for_their_owner_and_the_authoritys_goes_to_no_node(run: Run, tmp_path: Path) -> None:
    run("cluster", "certificates", "--out", "tls", HEAD, "--installed-at", "/opt/a folder")
    files = {path.relative_to(tmp_path / "tls").as_posix(): path for path in (tmp_path / "tls").rglob("*")}
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in files.items()}
    assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}
    assert set(modes) == {
        "ca.pem", "ca-key.pem", "head.example", "head.example/ca.pem", "head.example/node.pem",
        "head.example/node-key.pem", "head.example/ray-tls.env",
    }  # fmt: skip
    assert variables(tmp_path / "tls" / "head.example") == {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": "/opt/a folder/node.pem",
        "RAY_TLS_SERVER_KEY": "/opt/a folder/node-key.pem",
        "RAY_TLS_CA_CERT": "/opt/a folder/ca.pem",
    }


@pytest.mark.parametrize("node", ["", ",", "a b", "../up", "-dash", "10.0.0.300", "a,b/c"])
def test_what_is_no_name_or_address_is_refused(run: Run, tmp_path: Path, node: str) -> None:
    result = run("cluster", "certificates", "--out", "tls", "--", node)
    assert result.code == 2
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem"])
def test_half_an_authority_is_not_made_up_for(run: Run, tmp_path: Path, name: str) -> None:
    run("cluster", "certificates", "--out", "tls", HEAD)
    (tmp_path / "tls" / name).unlink()
    assert f"{name} is missing: restore it" in run("cluster", "certificates", "--out", "tls", WORKER).error_line
    assert not (tmp_path / "tls" / "worker").exists()


def test_a_damaged_authority_and_a_folder_that_cannot_be_made_are_one_line(run: Run, tmp_path: Path) -> None:
    run("cluster", "certificates", "--out", "tls", HEAD)
    (tmp_path / "tls" / "ca-key.pem").write_text("no key")
    assert "the authority in tls can't be read" in run("cluster", "certificates", "--out", "tls", WORKER).error_line
    (tmp_path / "file").touch()
    assert run("cluster", "certificates", "--out", "file/tls", HEAD).error_line


def node_certificate(run: Run, node: str, to: str, authority: str = "authority") -> Result:
    return run("cluster", "node-certificate", "--authority", authority, "--to", to, "--json", "--", node)


def test_nodes_that_make_their_own_certificates_trust_each_other_by_their_addresses(run: Run, tmp_path: Path) -> None:
    assert run("cluster", "certificates", "--out", "authority", "--json").json["nodes"] == []
    made = node_certificate(run, "127.0.0.2,::2,head.svc", "head").json
    assert made["node"] == "127.0.0.2"
    assert datetime.fromisoformat(made["ends"]) > datetime.now(UTC) + timedelta(days=365)
    node_certificate(run, "127.0.0.3", "worker")
    head, worker = tmp_path / "head", tmp_path / "worker"
    assert talk(head, worker, "127.0.0.2") == talk(worker, head, "127.0.0.3") == "hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        talk(head, worker, "127.0.0.3")


def test_a_node_reaches_the_head_by_a_name_that_the_heads_certificate_alone_has(run: Run, tmp_path: Path) -> None:
    run("cluster", "certificates", "--out", "authority")
    node_certificate(run, "127.0.0.2,localhost.head.svc", "head")
    node_certificate(run, "127.0.0.3", "worker")
    assert talk(tmp_path / "head", tmp_path / "worker", "127.0.0.2", "localhost.head.svc") == "hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        talk(tmp_path / "worker", tmp_path / "head", "127.0.0.3", "localhost.head.svc")


def test_a_node_gets_no_key_of_the_authority_and_its_own_is_for_its_owner(run: Run, tmp_path: Path) -> None:
    run("cluster", "certificates", "--out", "authority")
    shared = tmp_path / "tls"
    shared.mkdir()
    shared.chmod(0o777)  # as an emptyDir
    assert node_certificate(run, "10.0.0.7", "tls").code == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in shared.iterdir()}
    assert modes == {"ca.pem": 0o600, "node.pem": 0o600, "node-key.pem": 0o600}
    secret = (tmp_path / "authority" / "ca-key.pem").read_text()
    assert all(secret not in path.read_text() for path in shared.iterdir())


def test_a_node_that_starts_again_with_another_address_gets_another_certificate(run: Run, tmp_path: Path) -> None:
    run("cluster", "certificates", "--out", "authority")
    node_certificate(run, "127.0.0.2", "head")
    before = (tmp_path / "head" / "node-key.pem").read_bytes()
    node_certificate(run, "127.0.0.3", "head")
    assert (tmp_path / "head" / "node-key.pem").read_bytes() != before
    assert talk(tmp_path / "head", tmp_path / "head", "127.0.0.3") == "hello"
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        talk(tmp_path / "head", tmp_path / "head", "127.0.0.2")


@pytest.mark.parametrize("name", ["ca.pem", "ca-key.pem"])
def test_an_authority_that_is_not_mounted_is_named(run: Run, tmp_path: Path, name: str) -> None:
    run("cluster", "certificates", "--out", "authority")
    (tmp_path / "authority" / name).unlink()
    result = node_certificate(run, "10.0.0.7", "tls")
    assert result.code == 1
    assert f"authority/{name} is missing: mount the authority there" in result.error["message"]
    assert not (tmp_path / "tls").exists()


def test_an_authority_that_has_ended_signs_nothing(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "authority"
    folder.mkdir()
    old = make_authority("old", datetime.now(UTC) - timedelta(days=AUTHORITY_DAYS + 1))
    (folder / "ca.pem").write_bytes(old.certificate_pem)
    (folder / "ca-key.pem").write_bytes(old.key_pem)
    assert "the authority in authority has expired" in node_certificate(run, "10.0.0.7", "tls").error["message"]
    assert not (tmp_path / "tls").exists()


def test_a_key_of_another_authority_signs_nothing(run: Run, tmp_path: Path) -> None:
    for folder in ("authority", "other"):
        run("cluster", "certificates", "--out", folder)
    (tmp_path / "other" / "ca-key.pem").rename(tmp_path / "authority" / "ca-key.pem")
    found = node_certificate(run, "10.0.0.7", "tls").error["message"]
    assert "authority/ca-key.pem is not the key of authority/ca.pem" in found
    assert not (tmp_path / "tls").exists()


@pytest.mark.parametrize("node", ["", "$(POD_IPS)", "10.0.0.300", "10.0.0.7,$(FQ_RAY_IP)"])
def test_an_address_that_is_none_is_refused(run: Run, tmp_path: Path, node: str) -> None:
    run("cluster", "certificates", "--out", "authority")
    result = node_certificate(run, node, "tls")
    assert result.code == 2
    assert "must be names or addresses of a machine" in result.error["message"]
    assert not (tmp_path / "tls").exists()


def test_nothing_is_renewed_without_a_name(run: Run) -> None:
    assert run("cluster", "certificates", "--out", "tls", "--renew").code == 2
