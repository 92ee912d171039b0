"""The tables of endpoints are what the servers serve, and all that clients and operators ask for."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from network.in_process_server import operated, serving
from network.scripted_federation import SMALL, ScriptedFederation

from atoll.network.protocol import endpoints, operator_endpoints
from atoll.network.protocol.endpoints import Endpoint
from atoll.network.server.admin import admin_app
from atoll.network.server.http import ClientApi

SOURCE = Path(endpoints.__file__).parents[2]
TABLES = {"endpoints.py", "operator_endpoints.py", "endpoint.py"}
PATH = re.compile(r"/(v1|status|clients|runs|stop|health|metrics)\b")
"""What a path of either table begins with."""


def requests_of(table: Iterable[Endpoint[Any, Any]]) -> set[tuple[str, str]]:
    return {(each.method, each.path) for each in table}


def routes_of(app: Any) -> set[tuple[str, str]]:
    return {(method, route.path) for route in app.routes for method in route.methods - {"HEAD"}}


def test_a_server_serves_the_tables_and_nothing_else(tmp_path: Path) -> None:
    with operated(tmp_path / "home") as operations:
        api = ClientApi(operations)
        assert routes_of(api.app) == requests_of(endpoints.ENDPOINTS) | {("GET", endpoints.OPENAPI_PATH)}
        api.close()
        assert routes_of(admin_app(operations, "token")) == requests_of(operator_endpoints.ENDPOINTS)


def test_every_endpoint_answers_on_its_path_and_by_its_verb(tmp_path: Path) -> None:
    with operated(tmp_path / "home") as operations, serving(operations) as url, httpx2.Client(base_url=url) as client:
        for each in endpoints.ENDPOINTS:
            path = each.url(**dict.fromkeys(each.parameters, "0"))
            status = client.request(each.method, path).status_code
            assert status in (200, 400) if each.public else status == 401, (each.path, status)
            others = {"GET", "POST", "PUT"} - {it.method for it in endpoints.ENDPOINTS if it.path == each.path}
            assert {client.request(method, path).status_code for method in others} == {405}, each.path
            too_long = client.request(each.method, path, content=bytes(each.max_body + 1))
            assert too_long.status_code == 413, each.path
        assert client.get(endpoints.OPENAPI_PATH).json() == json.loads(json.dumps(endpoints.openapi()))
        assert client.get("/v1/other").status_code == 404


def test_paths_are_spelt_in_the_tables_alone() -> None:
    files = [*SOURCE.glob("network/**/*.py"), *SOURCE.glob("cli/*.py")]
    assert len(files) > 40
    for file in files:
        if file.name in TABLES:
            continue
        tree = ast.parse(file.read_text())
        texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                assert not PATH.match(node.value), f"{file.name}:{node.lineno} spells {node.value}"


def test_a_client_asks_for_what_is_in_the_table_alone(tmp_path: Path) -> None:
    scripted = ScriptedFederation(tmp_path / "federation", SMALL)
    scripted.result()
    asked = {(method, path) for method, path, _ in scripted.server.log}
    scripted.stack.close()
    known = [(each.method, re.sub(r"{\w+}", r"[\\w-]+", each.path)) for each in endpoints.ENDPOINTS]
    for method, path in asked:
        assert any(method == verb and re.fullmatch(pattern, path) for verb, pattern in known), (method, path)
    assert len({method for method, _ in asked}) == 3


@pytest.mark.parametrize("table", [endpoints.ENDPOINTS, operator_endpoints.ENDPOINTS])
def test_no_two_endpoints_are_one(table: tuple[Endpoint[Any, Any], ...]) -> None:
    assert len(requests_of(table)) == len(table)
    module = endpoints if table is endpoints.ENDPOINTS else operator_endpoints
    named = {value for value in vars(module).values() if isinstance(value, Endpoint)}
    assert named == set(table)  # none is defined and left out
