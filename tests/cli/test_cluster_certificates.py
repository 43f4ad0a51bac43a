"""`serve-app cluster certificates`: nodes trust each other and nobody else; nothing is overwritten unasked."""

from __future__ import annotations

import shlex
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from .conftest import Run

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


def talk(server: Path, client: Path, address: str) -> str:
    """What the client reads from the server. Raises ssl.SSLError when either does not trust the other."""
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
                context(client, server=False).wrap_socket(plain, server_hostname=address) as secured,
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
    assert "tls/head.example is there already: give --renew" in refused.error_line
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
