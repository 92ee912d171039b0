"""Makes an authority, and certificates of it for a server and clients."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.core.errors import RunError
from atoll.network.protocol.identity import write_secret

DAYS = 365
FILE_NAME = re.compile(r"(?!(ca|server)$)[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def make_certificates(
    directory: Path, hosts: Sequence[str], now: datetime.datetime, clients: Sequence[str] = ()
) -> list[Path]:
    """Write ca.pem, server.pem, server.key and NAME.pem, NAME.key of each client; overwrite nothing.

    Clients need certificates only for mutual TLS; their identity is always shown by their signatures. The authority's
    key is not kept: not even a thief of the directory can issue another certificate that this ca.pem vouches for. For
    one more certificate, make all of them anew, or use the authority of an organisation.
    """
    wrong = [name for name in clients if not FILE_NAME.fullmatch(name)]
    if wrong:
        raise RunError(f"'{wrong[0]}' cannot be a client's file name: use letters, digits, - and _, not ca or server")
    names = ["server", *dict.fromkeys(clients)]
    there = [
        path for name in ("ca", *names) for path in (_pem(directory, name), _key(directory, name)) if path.exists()
    ]
    if there:
        raise RunError(f"{there[0]} is there already: keep it, or name another directory")
    if not hosts:
        raise RunError("a certificate needs a name: give --host, e.g. --host localhost")
    ca_key, ca_name = generate_private_key(SECP256R1()), _name("Atoll development authority")
    ca = (
        _blank(ca_name, ca_name, ca_key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    for name in names:
        key = generate_private_key(SECP256R1())
        alternative = [_host(host) for host in hosts] if name == "server" else [x509.DNSName(name)]
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if name == "server" else ExtendedKeyUsageOID.CLIENT_AUTH
        certificate = (
            _blank(_name(hosts[0] if name == "server" else name), ca_name, key, now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.SubjectAlternativeName(alternative), critical=False)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        write_secret(_key(directory, name), secret)
        _pem(directory, name).write_bytes(certificate.public_bytes(pem) + ca.public_bytes(pem))
    _pem(directory, "ca").write_bytes(ca.public_bytes(pem))
    return [_pem(directory, "ca"), *(path for name in names for path in (_pem(directory, name), _key(directory, name)))]


def _pem(directory: Path, name: str) -> Path:
    return directory / f"{name}.pem"


def _key(directory: Path, name: str) -> Path:
    return directory / f"{name}.key"


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
