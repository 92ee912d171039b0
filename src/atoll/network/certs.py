"""Certificates for trying things out: a certificate authority of one's own, and a certificate for a server."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.core.errors import RunError

DAYS = 365


def make_certificates(directory: Path, hosts: Sequence[str], now: datetime.datetime) -> None:
    """Write ca.pem, server.pem and server.key into a directory; nothing that is there is overwritten.

    The authority's key is forgotten at once: nobody can make another certificate that clients with this ca.pem trust.
    """
    there = [name for name in ("ca.pem", "server.pem", "server.key") if (directory / name).exists()]
    if there:
        raise RunError(f"{directory / there[0]} is there already: keep it, or name another directory")
    if not hosts:
        raise RunError("a certificate needs a name: give --host, e.g. --host localhost")
    directory.mkdir(parents=True, exist_ok=True)
    ca_key, server_key = generate_private_key(SECP256R1()), generate_private_key(SECP256R1())
    ca_name, name = _name("Atoll development authority"), _name(hosts[0])
    ca = (
        _blank(ca_name, ca_name, ca_key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        _blank(name, ca_name, server_key, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    number = os.open(directory / "server.key", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(number, "wb") as file:
        file.write(secret)
    (directory / "server.pem").write_bytes(server.public_bytes(pem) + ca.public_bytes(pem))
    (directory / "ca.pem").write_bytes(ca.public_bytes(pem))


def _blank(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
