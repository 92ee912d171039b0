"""A page that is served within this process, and browsers without a screen."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from atoll.network.server.access import Access, Role
from atoll.ui.app import Page, Served
from atoll.ui.local import LocalRuns
from atoll.ui.runs import Live, RunsDirectory
from atoll.ui.serving import page_server


@contextmanager
def served(directory: Path, what: Served | None = None, live: Live | None = None, port: int = 0) -> Iterator[str]:
    """Serve a directory of runs; its address."""
    access = Access(directory)
    page = Page(what or LocalRuns(access), RunsDirectory(directory, live), access, title="test")
    server, listener = page_server(page, "127.0.0.1", port, None, ())
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        page.close()
        server.should_exit = True
        thread.join()
        listener.close()


class Browser:
    """A browser that has signed in with a new token."""

    def __init__(self, url: str, access: Access, role: Role = Role.OPERATOR, name: str = "somebody") -> None:
        text, self.token = access.add(name, role, 3600)
        self.http = httpx2.Client(base_url=url, trust_env=False, timeout=30)
        answer = self.http.post("/ui/api/session", json={"token": text})
        assert answer.status_code == 200, answer.text
        self.session = answer.json()

    def get(self, path: str, **parameters: Any) -> Any:
        answer = self.http.get(f"/ui/api/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: dict[str, Any], status: int = 200, **headers: str) -> Any:
        answer = self.http.post(f"/ui/api/{path}", json=body, headers={"atoll-csrf": self.session["csrf"], **headers})
        assert answer.status_code == status, answer.text
        return answer.json()

    def act(self, action: str, status: int = 200, **body: Any) -> Any:
        return self.post(f"actions/{action}", body, status)

    @contextmanager
    def stream(self, *follow: str, last: str = "") -> Iterator[Iterator[tuple[str, str, Any]]]:
        """Yield messages: their event, id and data."""
        headers = {"last-event-id": last} if last else {}
        with self.http.stream("GET", "/ui/api/stream", params={"follow": list(follow)}, headers=headers) as answer:
            assert answer.status_code == 200
            yield messages(answer.iter_lines())


def messages(lines: Iterator[str]) -> Iterator[tuple[str, str, Any]]:
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        else:
            if "data" in fields:
                yield fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"])
            fields = {}


def write_run(path: Path, num_rows: int, **plan: Any) -> Path:
    """Write the directory of a run that was killed after some rounds."""
    import tomli_w

    path.mkdir(parents=True)
    (path / "plan.toml").write_text(tomli_w.dumps({"rounds": 100, "seed": 0, "algorithm": {"name": "fedavg"}, **plan}))
    (path / "run.json").write_text(json.dumps({"name": path.name, "num_clients": 3, "started": "2026-01-01T00:00:00Z"}))
    (path / "metrics.jsonl").write_text("".join(row_line(number) for number in range(1, num_rows + 1)))
    return path


def row_line(number: int, **more: Any) -> str:
    row = {"round": number, "seconds": number / 10, "train_loss": 1 / number, "test": {"accuracy": 1 - 1 / number}}
    return json.dumps({**row, **more}) + "\n"
