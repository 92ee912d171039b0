"""Requests to the operator's address: where it is, its token, and how to ask. Loads no torch."""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path
from typing import NamedTuple, cast

import httpx2
import msgspec

from atoll.core.errors import RunError
from atoll.network.protocol.endpoints import Body, Endpoint, Reply
from atoll.network.protocol.identity import check_private, write_secret
from atoll.network.protocol.operator_endpoints import HEALTH

TOKEN, ADDRESS = "operator.token", "admin.json"
SECONDS = 60.0
"""Maximum time until an answer: an approval waits for a commit."""


class Address(NamedTuple):
    """The address of a server for its operator, and the token that it asks for."""

    url: str
    token: str


def operator_token(home: Path) -> str:
    """Return the operator's token in a home; make one at the first start."""
    with contextlib.suppress(FileExistsError):
        write_secret(home / TOKEN, secrets.token_urlsafe(32).encode() + b"\n")
    return read_token(home / TOKEN)


def read_token(path: Path) -> str:
    """Read the operator's token from a file."""
    try:
        check_private(path)
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"the operator's token cannot be read from {path} ({error}): name its file") from error
    if len(token) < 32 or not token.isascii():
        raise RunError(f"{path} holds no operator's token: remove it, and the server makes another when it starts")
    return token


def write_address(home: Path, host: str, port: int) -> None:
    """Write the operator's address to a home, where commands on this machine find it."""
    new = home / f".{ADDRESS}.new"
    new.write_text(json.dumps({"url": f"http://{f'[{host}]' if ':' in host else host}:{port}"}) + "\n")
    new.replace(home / ADDRESS)


def address_of(home: Path) -> Address:
    """Read the operator's address and token of a home."""
    try:
        url = str(json.loads((home / ADDRESS).read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{home} is not the home of a server that was started: name it with --home, or start one with atoll serve"
        ) from error
    return Address(url, read_token(home / TOKEN))


def ask(address: Address, endpoint: Endpoint[Body, Reply], body: Body | None = None, **parameters: str | int) -> Reply:
    """Make a request of the operator; RunError if the server refuses it or does not answer."""
    data = None if body is None else msgspec.json.encode(body)
    with _connected(address) as client:
        try:
            response = client.request(endpoint.method, endpoint.url(**parameters), content=data)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RunError(
                f"no server answers at {address.url} ({error}): start it with atoll serve, or name another --home"
            ) from error
    try:
        answer = response.json()
        if not isinstance(answer, dict) or not (response.is_success or "error" in answer):
            raise ValueError("another form")
    except ValueError as error:
        raise RunError(
            f"{address.url} answered {response.status_code}, as no Atoll server does: check --admin"
        ) from error
    if not response.is_success:
        raise RunError(str(answer["error"]))
    return cast(Reply, answer)


def is_answering(address: Address) -> bool:
    """Return whether a server still answers."""
    with _connected(address) as client:
        try:
            client.request(HEALTH.method, HEALTH.path)
        except httpx2.HTTPError:
            return False
    return True


def _connected(address: Address) -> httpx2.Client:
    headers = {"authorization": f"Bearer {address.token}"}
    return httpx2.Client(base_url=address.url, headers=headers, timeout=SECONDS, trust_env=False)
