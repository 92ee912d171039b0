"""A server with these certificates is believed by those who have its authority, and by nobody else."""

from __future__ import annotations

import datetime
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from atoll.core.errors import RunError
from atoll.network.server.certs import make_certificates
from atoll.network.server.web import tls_context

NOW = datetime.datetime.now(datetime.UTC)


def greet(directory: Path, authority: Path, name: str, mutual: Path | None = None) -> str | None:
    """Shake hands with a TLS 1.3 server on this machine; the version that was agreed on.

    With `mutual` the server asks for certificates of that authority, and the client shows its own.
    """
    server = tls_context(directory / "server.pem", directory / "server.key", mutual and mutual / "ca.pem")
    client = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    if mutual is not None:
        client.load_cert_chain(authority / "ward.pem", authority / "ward.key")
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(there, server_side=True) as tls:
                tls.sendall(b"welcome")
                tls.recv(1)
        except (ssl.SSLError, OSError):
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(here, server_hostname=name) as tls:
            assert tls.recv(7) == b"welcome"
            return tls.version()
    finally:
        here.close()
        thread.join()


def test_names_and_addresses_are_believed_and_others_are_not(tmp_path: Path) -> None:
    make_certificates(tmp_path / "one", ["localhost", "127.0.0.1", "server.example"], NOW)
    make_certificates(tmp_path / "two", ["localhost"], NOW)
    for name in ("localhost", "127.0.0.1", "server.example"):
        assert greet(tmp_path / "one", tmp_path / "one", name) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        greet(tmp_path / "one", tmp_path / "one", "other.example")
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        greet(tmp_path / "one", tmp_path / "two", "localhost")


def test_clients_show_certificates_of_the_same_authority(tmp_path: Path) -> None:
    for name in ("one", "two"):
        made = make_certificates(tmp_path / name, ["localhost"], NOW, ["ward", "ward-2"])
        assert [path.name for path in made[3:]] == ["ward.pem", "ward.key", "ward-2.pem", "ward-2.key"]
        assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in made if path.suffix == ".key")
    assert greet(tmp_path / "one", tmp_path / "one", "localhost", mutual=tmp_path / "one") == "TLSv1.3"
    with pytest.raises(ssl.SSLError, match="unknown ca"):
        greet(tmp_path / "one", tmp_path / "one", "localhost", mutual=tmp_path / "two")


@pytest.mark.parametrize("name", ["", "ca", "server", "../x", "a/b", ".x", "x" * 64, "naïve", "a b"])
def test_a_clients_name_is_a_safe_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunError, match="file name"):
        make_certificates(tmp_path, ["localhost"], NOW, ["good", name])
    assert list(tmp_path.iterdir()) == []


def test_old_certificates_are_not_believed(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], NOW - datetime.timedelta(days=400))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        greet(tmp_path, tmp_path, "localhost")


def test_the_key_is_private_and_nothing_is_overwritten(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], NOW)
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600
    with pytest.raises(RunError, match="already"):
        make_certificates(tmp_path, ["localhost"], NOW)
    with pytest.raises(RunError, match="--host"):
        make_certificates(tmp_path / "other", [], NOW)
