"""Every endpoint between clients and server, defined once: both sides and the documents use this table.

Control messages are JSON of the types named here; a body or an answer of type `bytes` travels as it is.
"""

from __future__ import annotations

import re
from types import NoneType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from atoll.network.protocol.exchange import MAX_PARCEL, SessionEnd, SessionPart
from atoll.network.protocol.messages import (
    VERSION,
    About,
    Answer,
    Challenge,
    Delivered,
    Delivery,
    Done,
    Enrol,
    Enrolled,
    Hello,
    Lines,
    Message,
    Missing,
    Nonce,
    OpenRuns,
    Orders,
    Poll,
    Problem,
    Readiness,
    Refusal,
    RunInfo,
    SiteEvaluation,
    Welcome,
)
from atoll.network.protocol.objects import CHUNK, MAX_MANIFEST

MAX_CONTROL = 1 << 20
"""Bytes of the largest control message."""
Body = TypeVar("Body")
Reply = TypeVar("Reply")
METADATA_HEADER = "atoll-told"
"""Carries a message as JSON beside a body of bytes."""
MAX_PUBLIC = 1 << 14
"""Bytes of the largest body of a request that anybody may make."""
OPENAPI_PATH = "/v1/openapi.json"
"""Where a server publishes this table as OpenAPI."""
T = TypeVar("T")
_RUN = "/v1/runs/{run}"
_TASK = f"{_RUN}/tasks/{{attempt}}"


class Endpoint(NamedTuple, Generic[Body, Reply]):
    """One request: of the protocol, or of the operator's address."""

    method: str
    path: str
    """With the names of its parameters in braces."""
    summary: str
    body: type[Body]
    answer: type[Reply]
    public: bool = False
    """Whether anybody may make it, without a client's signature or the operator's token."""
    max_body: int = MAX_CONTROL
    """Bytes of the largest body that a server reads."""
    max_answer: int = MAX_CONTROL
    """Bytes of the largest answer that a client reads."""
    metadata: type[Any] | None = None
    """The message in a header that describes a body of bytes."""

    @property
    def parameters(self) -> list[str]:
        """Return the names of the parameters in the path."""
        return re.findall(r"{(\w+)}", self.path)

    def url(self, **parameters: str | int) -> str:
        """Fill in the parameters of the path.

        >>> Endpoint(method="GET", path="/runs/{run}", summary="", body=bytes, answer=bytes).url(run="mnist")
        '/runs/mnist'
        """
        return self.path.format(**parameters)


def _get(
    path: str, answer: type[T], summary: str, *, public: bool = False, max_answer: int = MAX_CONTROL
) -> Endpoint[None, T]:
    return Endpoint(
        method="GET",
        path=path,
        summary=summary,
        body=NoneType,
        answer=answer,
        public=public,
        max_body=MAX_PUBLIC if public else MAX_CONTROL,
        max_answer=max_answer,
    )


def _post(path: str, body: type[Body], answer: type[T], summary: str, *, public: bool = False) -> Endpoint[Body, T]:
    max_body = MAX_PUBLIC if public else MAX_CONTROL
    return Endpoint(
        method="POST", path=path, summary=summary, body=body, answer=answer, public=public, max_body=max_body
    )


def _put(path: str, answer: type[T], summary: str, *, metadata: type[Message] | None = None) -> Endpoint[bytes, T]:
    return Endpoint(
        method="PUT", path=path, summary=summary, body=bytes, answer=answer, max_body=CHUNK, metadata=metadata
    )


ABOUT = _get("/v1/about", About, "What anybody may know of this server", public=True)
ENROL = _post("/v1/enrol", Enrol, Enrolled, "Become known", public=True)
CHALLENGE = _post("/v1/challenge", Challenge, Nonce, "Ask for something to sign", public=True)
SESSION = _post("/v1/session", Hello, Welcome, "Begin a session; the one before ends", public=True)
POLL = _post("/v1/poll", Poll, Orders, "Ask for work")
RUNS = _get("/v1/runs", OpenRuns, "What the runs are that have not ended")
RUN = _get(_RUN, RunInfo, "What a run is")
LEDGER = _get(f"{_RUN}/ledger/{{start}}", Lines, "The ledger from a record on")
MANIFEST = _get(f"{_RUN}/objects/{{name}}", bytes, "The manifest of an object, as msgpack", max_answer=MAX_MANIFEST)
GET_CHUNK = _get(f"{_RUN}/objects/{{name}}/{{index}}", bytes, "One chunk of an object")
MISSING = _post(f"{_TASK}/missing", Answer, Missing, "Announce an object; which chunks to send")
PUT_CHUNK = _put(f"{_TASK}/chunks/{{digest}}", Done, "Send a chunk")
UPDATE = _post(f"{_TASK}/update", Delivery, Delivered, "Deliver an update that was sent in chunks")
PUT_UPDATE = _put(f"{_TASK}/update", Delivered, "Deliver an update of one chunk, which is the body", metadata=Delivery)
SECURE = _post(f"{_TASK}/secure", Answer, Done, "Answer in secure aggregation")
EXCHANGE = Endpoint(
    method="PUT",
    path=f"{_TASK}/session",
    summary="Send a part of a message of a session, and get one, as msgpack",
    body=bytes,
    answer=bytes,
    max_body=CHUNK,
    max_answer=MAX_PARCEL,
    metadata=SessionPart,
)
END_SESSION = _post(f"{_TASK}/session", SessionEnd, Done, "End a session: it is whole, or why it is left")
READY = _post(f"{_TASK}/ready", NoneType, Done, "Ready: for the update to be added in secret, or for a session")
REFUSE = _post(f"{_TASK}/refuse", Refusal, Done, "Refuse a task")
EVALUATION = _post(f"{_RUN}/versions/{{version}}/evaluation", SiteEvaluation, Done, "Tell how a version does here")
READINESS = _post(f"{_RUN}/readiness", Readiness, Done, "Tell whether this client could take part")

ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (
    ABOUT,
    ENROL,
    CHALLENGE,
    SESSION,
    POLL,
    RUNS,
    RUN,
    LEDGER,
    MANIFEST,
    GET_CHUNK,
    MISSING,
    PUT_CHUNK,
    UPDATE,
    PUT_UPDATE,
    SECURE,
    EXCHANGE,
    END_SESSION,
    READY,
    REFUSE,
    EVALUATION,
    READINESS,
)


def openapi() -> dict[str, Any]:
    """Describe the protocol as an OpenAPI 3.1 document."""
    types: set[Any] = {kind for each in ENDPOINTS for kind in (each.answer, each.body, each.metadata)}
    types -= {NoneType, bytes, None}
    named = sorted(types | {Problem}, key=lambda kind: str(kind.__name__))
    _, schemas = msgspec.json.schema_components(named, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for each in ENDPOINTS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each)
    scheme = {
        "type": "apiKey",
        "in": "header",
        "name": "atoll-signature",
        "description": "Ed25519 over method, path, SHA-256 of the body, client, epoch, counter and time, which travel "
        "in atoll-body, atoll-client, atoll-epoch, atoll-counter and atoll-time",
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Atoll", "version": str(VERSION)},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"signature": scheme}},
    }


def _operation(endpoint: Endpoint[Any, Any]) -> dict[str, Any]:
    """Describe one endpoint as an OpenAPI operation."""
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in endpoint.parameters
    ]
    if endpoint.metadata is not None:
        content = _content(endpoint.metadata)
        parameters.append({"name": METADATA_HEADER, "in": "header", "required": True, "content": content})
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()}{re.sub('[^a-z]+', '_', endpoint.path[3:])}".rstrip("_"),
        "parameters": parameters,
        "responses": {
            "200": {"description": "done", "content": _content(endpoint.answer)},
            "default": {"description": "not done", "content": _content(Problem)},
        },
        "security": [] if endpoint.public else [{"signature": []}],
    }
    if endpoint.body is not NoneType:
        operation["requestBody"] = {"required": True, "content": _content(endpoint.body)}
    return operation


def _content(kind: type[Any]) -> dict[str, Any]:
    if kind is bytes:
        return {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
