"""What clients keep never reaches the server: nothing of it is in any request, answer, file, blob or database.

Shapes: D parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from network.federation import Federation, federation
from network.fork_server import ForkServer
from network.proxy import FaultyProxy
from network.test_own_models import NUM, message_size, plan_of
from torch import Tensor

from atoll import Plan, run
from atoll.commit.run_state import read_state
from atoll.core.messages import MEMBERS
from atoll.core.wire import HEADER, MAGIC
from atoll.train.build import build_job
from atoll.train.own_models import OwnModels

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
BLOCK = 32
"""Any window of 64 bytes holds a whole block of 32, wherever it begins."""
UPDATE = b"PUT /v1/runs/law/tasks/"


def opened(data: bytes) -> Iterator[bytes]:
    """Yield bytes as they are, and whatever is compressed in them."""
    yield data
    at = data.find(ZSTD_MAGIC)
    while at >= 0:
        with contextlib.suppress(zstandard.ZstdError):
            yield zstandard.ZstdDecompressor().decompressobj().decompress(data[at:])
        at = data.find(ZSTD_MAGIC, at + 1)


def blocks_of(vectors: Iterable[Tensor]) -> set[bytes]:
    """Return all aligned blocks of vectors as they lie in memory; a short one at an end is left out."""
    raw = [vector.contiguous().numpy().tobytes() for vector in vectors]
    return {each[at : at + BLOCK] for each in raw for at in range(0, len(each) - BLOCK + 1, BLOCK)}


def found_in(known: bytes, blocks: set[bytes]) -> set[bytes]:
    """Return the blocks that occur somewhere, at any byte."""
    starts, found = np.frombuffer(b"".join(block[:8] for block in blocks), dtype="<u8"), set[bytes]()
    for shift in range(8):
        words = np.frombuffer(known, dtype="<u8", offset=shift, count=(len(known) - shift) // 8)
        places = shift + 8 * np.flatnonzero(np.isin(words, starts))
        found |= {known[at : at + BLOCK] for at in places.tolist()} & blocks
    return found


def known_to(server: Path, proxy: FaultyProxy) -> bytes:
    """Return all that the server was sent, has sent, and has on its disk."""
    files = [path.read_bytes() for path in server.rglob("*") if path.is_file()]
    assert {"store.db", "metrics.jsonl", "model.safetensors"} <= {path.name for path in server.rglob("*")}
    return b"".join(part for each in (*proxy.captured, *proxy.answers, *files) for part in opened(each))


def versions_of(plan: Plan, path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the shared parameters after each round, and what every client has of its own then, of a simulation."""
    job = build_job(plan)
    shared, own = [job.first_D], list[Tensor]()
    for rounds in range(1, plan.rounds + 1):
        run(plan.replace({"engine": "inline", "rounds": rounds}), out=path / str(rounds))
        state = read_state(path / str(rounds) / "checkpoint.safetensors", plan.identity())
        shared.append(state.params_D)
        models = OwnModels(job, [lambda: job.model], state.params_D, state.clients)
        for client, model in models.items():
            memory = state.clients.get(client, {})
            own += [memory[name].reshape(-1) for name in memory if name != MEMBERS]
            own += [each.reshape(-1) for each in model.state_dict().values() if each.is_floating_point()]
    return shared, own


def sent_sizes(proxy: FaultyProxy) -> set[int]:
    """Return the sizes of all updates that were delivered, as their messages state them, without compression."""
    bodies = [request.partition(b"\r\n\r\n")[2] for request in proxy.captured if request.startswith(UPDATE)]
    assert bodies and all(body.startswith(MAGIC) for body in bodies)
    return {int(HEADER.unpack_from(body)[-1]) for body in bodies}


def run_through(network: Federation, certs: Path) -> FaultyProxy:
    """Let clients work to the end through a proxy that reads everything."""
    proxy = FaultyProxy(network.port, certs, seed=1)
    with proxy.between():
        network.serve("--clients", str(NUM))
        network.url = f"https://localhost:{proxy.port}"
        network.enrol(NUM)
        clients = [network.join(number, app="network.apps:with_own_models") for number in range(NUM)]
        assert [client.wait(60) for client in clients] == [0] * NUM, network.said()
    return proxy


SLOW = (
    *("fedper", "lg_fedavg", "fedbn", "ditto", "apfl", "pfedme", "per_fedavg"),
    *("mean_regularised", "interpolation", "fine_tuning", "local"),
)


@pytest.mark.parametrize("algorithm", ["fedrep", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_the_server_never_holds_what_is_a_clients_own(
    processes: ForkServer, certs: Path, tmp_path: Path, algorithm: str
) -> None:
    plan = plan_of(algorithm, rounds=3, policy={"size": NUM})
    with federation(tmp_path / "f", processes, certs, plan) as network:
        proxy = run_through(network, certs)
        known = known_to(network.home, proxy)
        sizes = sent_sizes(proxy)
    shared, own = versions_of(plan, tmp_path / "alone")
    public = blocks_of(shared)
    assert found_in(known, public) == public  # what is shared is found, so that the search works
    secret = blocks_of(own) - public
    assert len(secret) >= plan.rounds * NUM
    assert not found_in(known, secret)
    assert sizes == {message_size(algorithm)}
