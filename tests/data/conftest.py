"""What the tests of the data room share: a toy data set, an empty cache, real data, a local web server."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import DataError
from atoll.data.dataset import Dataset


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: needs a large download or much time; leave out with -m 'not slow'")


def balanced(num_per_class: int = 40, num_classes: int = 5, num_owners: int = 12) -> Dataset:
    """Balanced classes, shuffled, with owners of unequal size."""
    rng = np.random.default_rng(7)
    train_y = rng.permutation(np.repeat(np.arange(num_classes), num_per_class))
    owners = np.concatenate([np.arange(num_owners), rng.integers(0, num_owners, len(train_y) - num_owners)])
    return Dataset(
        name="toy",
        train_x=rng.normal(size=(len(train_y), 3)).astype(np.float32),
        train_y=train_y,
        test_x=np.zeros((2, 3), dtype=np.float32),
        test_y=np.array([0, 1]),
        num_classes=num_classes,
        owners=rng.permutation(owners),
    )


@pytest.fixture(scope="session")
def toy() -> Dataset:
    return balanced()


@pytest.fixture(scope="session")
def make_toy() -> Callable[..., Dataset]:
    return balanced


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("ATOLL_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


TEST_DATA = "ATOLL_TEST_DATA"
"""Environment variable: a directory of raw files laid out as the cache, such as DIR/heart/processed.va.data."""


@pytest.fixture(scope="session")
def real() -> Callable[..., Dataset]:
    """Load a data set through the catalogue, as a user does; skip where no source can be reached."""
    loaded: dict[str, Dataset] = {}

    def load(name: str, **options: object) -> Dataset:
        key = f"{name} {options}"
        if key not in loaded:
            part = getattr(importlib.import_module(f"atoll.data.catalog.{name}"), name)
            with pytest.MonkeyPatch.context() as patch:
                prepared = os.environ.get(TEST_DATA)
                if prepared and (Path(prepared) / name).is_dir():
                    patch.setenv("ATOLL_DATA", prepared)
                try:
                    loaded[key] = part(quiet=True, **options)
                except DataError as error:
                    pytest.skip(f"needs real data, of the network or of {TEST_DATA}: {error}")
        return loaded[key]

    return load


class Web:
    """A local web server whose pages are set by the test."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.half_sent = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append(self.path)
                page = web.pages.get(self.path)
                if page is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page[: len(page) // 2])
                self.wfile.flush()
                web.half_sent.set()
                web.go_on.wait(30)
                if self.path not in web.broken:
                    self.wfile.write(page[len(page) // 2 :])

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    thread = threading.Thread(target=web.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield web
    web.go_on.set()
    web.server.shutdown()
    web.server.server_close()
    thread.join()
