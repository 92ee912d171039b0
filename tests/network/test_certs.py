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
from atoll.network.certs import make_certificates

NOW = datetime.datetime.now(datetime.UTC)


def greet(directory: Path, authority: Path, name: str) -> str | None:
    """Shake hands with a TLS 1.3 server on this machine; the version that was agreed on."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    server.load_cert_chain(directory / "server.pem", directory / "server.key")
    client = ssl.create_default_context(cafile=str(authority / "ca.pem"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    here, there = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(there, server_side=True) as tls:
                tls.recv(1)
        except (ssl.SSLError, OSError):
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(here, server_hostname=name) as tls:
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
