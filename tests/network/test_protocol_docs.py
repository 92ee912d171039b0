"""What the documents say of the protocol is what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.network.protocol.endpoints import ENDPOINTS, openapi
from atoll.network.protocol.identity import public_bytes, read_stamp, sign, signed_by

DOCS = Path(__file__).parents[2] / "docs"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))


def test_the_openapi_document_is_in_step() -> None:
    assert json.loads((DOCS / "openapi.json").read_text()) == json.loads(json.dumps(openapi())), (
        "write it again, as the end of docs/protocol.md says"
    )


def test_every_reference_of_the_openapi_document_leads_somewhere() -> None:
    document = openapi()

    def refs(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for inner in value.values() for ref in refs(inner)]
        return [ref for inner in value for ref in refs(inner)] if isinstance(value, list) else []

    found = set(refs(document))
    assert len(found) > 15
    for ref in found:
        place: Any = document
        for key in ref.removeprefix("#/").split("/"):
            place = place[key]
    operations = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(operations) == len(set(operations)) == len(ENDPOINTS)


def test_the_guide_names_every_request() -> None:
    rows = re.findall(r"^\| `(\w+) (\S+)` \| (yes|no) \|", (DOCS / "protocol.md").read_text(), re.MULTILINE)
    assert rows == [(each.method, each.path, "no" if each.public else "yes") for each in ENDPOINTS]


def test_the_guides_example_is_signed_as_it_says() -> None:
    request, signed = re.findall(r"```\n(.*?)\n```", (DOCS / "protocol.md").read_text(), re.DOTALL)[:2]
    head, _, body = request.partition("\n\n")
    (method, path), *lines = (line.split(" ", 1) for line in head.splitlines())
    headers = {name.rstrip(":"): value for name, value in lines}
    stamp = read_stamp(headers)
    assert stamp is not None
    assert stamp.body == signed.splitlines()[3]
    assert sign(KEY, stamp._replace(signature=b""), method, path, body.encode()) == stamp
    assert signed_by(public_bytes(KEY), stamp, method, path)
    assert KEY.sign(signed.encode()) == stamp.signature
