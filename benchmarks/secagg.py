"""What secure aggregation costs. Run: python benchmarks/secagg.py [--large] [--flower PYTHON]

One process, one thread, processor time. Every client of a session is played in full, one after another, and its state
is kept as bytes between the steps, as a real client would keep it. A client's time is the sum over all its steps,
encoding included, with nothing cached from another client; it is taken of a sample spread over the cohort. A server's
time is the sum over all that it does in the session: reading and checking every message, writing every message, opening
the sum. Sessions of 500 take three turns, and the turn with the least time of the server counts.

Then the schemes side by side, and a round of training with and without, by plan and on all cores.

--large adds 10,000 clients, once. --flower names a Python that has Flower installed, whose own masks are measured too.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll import Plan, run
from atoll.core.parts import Part
from atoll.secagg import graph, masks, scheme, wire
from atoll.secagg import server as s
from atoll.secagg.client import Client, in_memory
from atoll.secagg.client_state import ClientState, Floors, Phase, Vector
from atoll.secagg.encoding import decode, encode, finest
from atoll.secagg.saved import dump, load
from atoll.secagg.server import Close, Server

MODEL = bytes(32)
BATCH = 100
"""Clients that speak before the server listens; one at a time would leave its caches full of their work."""
SAMPLE = 20
"""Clients whose time is taken."""
FLOWER = """
import time, os
import numpy as np
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_addition
vector, made, added = [np.zeros({d}, np.int64)], [], []
for _ in range({turns}):
    start = time.process_time(); mask = pseudo_rand_gen(os.urandom(32), 1 << 32, [({d},)])
    made.append(time.process_time() - start); vector = parameters_addition(vector, mask)
    added.append(time.process_time() - start)
print(min(made), min(added))
"""


def mask_speed(d: int, flower: str | None, turns: int = 30) -> None:
    """Milliseconds for one mask of d values, made and made-and-added: the least over the turns."""
    out, vector, wide = np.empty(d, "<u4"), np.zeros(d, "<u4"), np.zeros(d, np.int64)

    def numpy_mask() -> np.ndarray:
        """As Flower's SecAgg+ does it: the seed folded to 32 bits, NumPy's Mersenne twister, 64 bits a value."""
        seed = int(np.bitwise_xor.reduce(np.frombuffer(os.urandom(32), "<u4")))
        return np.random.RandomState(seed).randint(0, (1 << 32) - 1, d, dtype=np.int64)

    rows = {
        "AES-256-CTR (Atoll)": (
            lambda: masks.expand(os.urandom(32), out),
            lambda: masks.apply(vector, [masks.Mask(os.urandom(32), True)]),
        ),
        "NumPy, as in Flower's SecAgg+": (numpy_mask, lambda: wide + numpy_mask()),
    }
    times = {name: tuple(least(work, turns) for work in works) for name, works in rows.items()}
    if flower:
        text = subprocess.run(
            [flower, "-c", FLOWER.format(d=d, turns=turns)], capture_output=True, text=True, check=True
        ).stdout
        made, added = map(float, text.split())
        times["Flower's own pseudo_rand_gen"] = (made, added)
    own = times["AES-256-CTR (Atoll)"]
    print(f"\nOne mask of {d:,} values, ms\n\n| | made | against Atoll | made and added | against Atoll |")
    print("|---|---:|---:|---:|---:|")
    for name, (made, added) in times.items():
        print(f"| {name} | {made * 1e3:.2f} | {made / own[0]:.1f}x | {added * 1e3:.2f} | {added / own[1]:.1f}x |")


def least(work: Callable[[], object], turns: int) -> float:
    best = float("inf")
    for _ in range(turns):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


class Session:
    """One session of n clients, of whom some fall silent before they send their vector."""

    def __init__(self, n: int, d: int, mode: wire.Mode, dropouts: float, lost: float) -> None:
        self.n, self.mode, self.dropouts, self.lost = n, mode, dropouts, lost
        self.encoding = finest(1.0, n)
        config = wire.Config(d + 1, self.encoding, mode, dropouts, 0.1)
        identities = [Ed25519PrivateKey.generate() for _ in range(n)]
        registry = {i: key.public_key().public_bytes_raw() for i, key in enumerate(identities)}
        own = Ed25519PrivateKey.generate()
        self.server = Server(identity=own, registry=registry)
        self.clients = [
            Client(
                client=i,
                identity=key,
                server_key=own.public_key().public_bytes_raw(),
                once=in_memory(),
                registry=registry,
                floors=Floors(mode=mode),
            )
            for i, key in enumerate(identities)
        ]
        self.invite = wire.Invite("benchmark", 0, 0, config, MODEL, wire.cohort(range(n)))
        self.params = graph.parameters(n, dropouts, 0.1, mode)
        rng = np.random.default_rng(0)
        self.gone = set(rng.permutation(n)[: int(n * lost)].tolist())
        self.values_D = rng.uniform(-1, 1, d)  # one vector, turned a little for each client
        self.sample = {i for i in np.linspace(0, n - 1, SAMPLE).astype(int).tolist() if i not in self.gone}
        self.client_times = dict.fromkeys(self.sample, 0.0)
        self.server_time, self.opening_time = 0.0, 0.0
        self.up = {"vector": 0, "keys": 0}
        self.down = 0

    def play(self) -> None:
        states = [dump(client.begin(MODEL)) for client in self.clients]
        exact = np.zeros(self.invite.config.length, self.encoding.dtype)
        state, out = self.timed(self.server.open, self.invite)
        iterator = iter(out)
        while state.phase is not s.Phase.DONE:
            while batch := self.timed(lambda it=iterator: list(islice(it, BATCH))):
                replies = []
                for number, data in batch:
                    if number in self.gone and state.phase is s.Phase.INPUT:
                        continue
                    self.down += len(data)
                    after, said, added = self.client_step(number, load(states[number], ClientState), data)
                    states[number] = dump(after)
                    replies += said
                    if added is not None:
                        exact += added
                self.up["vector" if state.phase is s.Phase.INPUT else "keys"] += sum(map(len, replies))
                graph.graph(self.params, state.session, state.root)  # the server's own, which no client can empty
                state = self.timed(self.take, state, replies)
            before = self.server_time
            state, out = self.timed(self.server.handle, state, Close(state.phase))
            self.opening_time = self.server_time - before
            iterator = iter(out)
        result = self.server.result(state)
        assert (result == exact).all(), "the sum is not the sum"
        decode(result, self.encoding)

    def take(self, state: s.ServerState, replies: list[bytes]) -> s.ServerState:
        for reply in replies:
            state, _ = self.server.handle(state, reply)
        return state

    def client_step(
        self, number: int, state: ClientState, data: bytes
    ) -> tuple[ClientState, list[bytes], np.ndarray | None]:
        client, sampled, encoded = self.clients[number], number in self.sample, None
        if sampled:
            graph.graph.cache_clear()
            graph.parameters.cache_clear()
        start = time.process_time()
        state, replies = client.handle(state, data)
        if state.phase is Phase.READY:
            encoded = encode(np.roll(self.values_D, number), 1.0, self.encoding, masks.Stream())
            state, replies = client.handle(state, Vector(encoded))
        if sampled:
            self.client_times[number] += time.process_time() - start
        return state, replies, encoded

    def timed(self, work: Callable[..., Any], *args: object) -> Any:
        start = time.process_time()
        result = work(*args)
        self.server_time += time.process_time() - start
        return result

    def row(self) -> str:
        survivors = self.n - len(self.gone)
        plain = 4 * (self.invite.config.length - 1)
        times = sorted(self.client_times.values())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return (
            f"| {self.n:,} | {self.mode} | {self.lost:.0%} | {self.params.degree}, {self.params.threshold} "
            f"| {median(times) * 1e3:.0f} (most {times[-1] * 1e3:.0f}) "
            f"| {self.server_time:.2f} | {self.opening_time:.2f} "
            f"| {self.up['vector'] / survivors / plain:.4f}x | {self.up['keys'] / self.n / 1024:.1f} "
            f"| {self.down / self.n / 1024:.1f} | {peak:.0f} |"
        )


HEAD = """
{d:,} values, 32 bits each; 10 % may collude; drop-outs are lost after they shared

| clients | server | lost | k, t | client, ms | server, s | opening, s | upload | keys up, KiB | down, KiB | peak, MiB |
|---:|---|---:|---|---:|---:|---:|---:|---:|---:|---:|"""


def schemes(n: int = 50, length: int = 199_215) -> None:
    """Processor time of a whole session, all clients and servers in one process, and what a client sends."""
    encoding = finest(1.0, n)
    rng = np.random.default_rng(0)
    vector = rng.integers(-encoding.levels, encoding.levels, length).astype("<i4").view("<u4")
    asked = scheme.Session("benchmark", 0, 0, MODEL, tuple(range(n)), {}, length, encoding, lambda client: vector)
    print(f"\nA sum of {n} vectors of {length:,} values of 32 bits\n")
    print("| scheme | processor time a client, ms | upload |\n|---|---:|---:|")
    cases = {
        "pairwise, active server": Part("pairwise"),
        "pairwise, curious server": Part("pairwise", server="curious"),
        "additive, 2 servers": Part("additive"),
        "ckks": Part("ckks"),
    }
    for name, part in cases.items():
        how = part.build("secagg.schemes")
        found = []
        took = least(lambda how=how, found=found: found.append(how.simulate(asked, scheme.in_this_process)), 2)
        assert (found[0].total_L == vector * np.uint32(n)).all(), "the sum is not the sum"
        print(f"| {name} | {took / n * 1e3:.1f} | {found[0].bytes_up / n / length / 4:.2f}x |", flush=True)


def training(rounds: int = 6) -> None:
    """Seconds of a round of 50 clients with mlp_2nn on MNIST, with and without, in turns, without the first round."""
    plan = Plan(data="mnist", model="mlp_2nn", partition={"num_clients": 100}, policy={"size": 50}, rounds=rounds)
    plan = plan.replace({"evaluation.every": 0, "local.batch_size": 10})
    print("\n50 clients a round, mlp_2nn, MNIST, 600 samples each, batches of 10: seconds a round\n")
    print("| passes | plain | curious server | | active server | |\n|---:|---:|---:|---:|---:|---:|")
    for epochs in (1, 5):
        kinds = [None, {"scheme": {"name": "pairwise", "server": "curious"}}, {"scheme": {"name": "pairwise"}}]
        times: list[list[float]] = [[] for _ in kinds]
        for _ in range(2):
            for kind, seen in zip(kinds, times, strict=True):
                history = run(plan.replace({"local.epochs": epochs, "secagg": kind})).history
                seen += [row["round_seconds"] for row in history[1:]]
        plain, curious, active = map(median, times)
        print(
            f"| {epochs} | {plain:.2f} | {curious:.2f} | {curious / plain:.2f}x "
            f"| {active:.2f} | {active / plain:.2f}x |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="add 10,000 clients, which takes some ten minutes")
    parser.add_argument("--flower", help="a Python that has Flower installed")
    parser.add_argument("--only", choices=["masks", "sessions", "schemes", "training"])
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "masks": lambda: mask_speed(1_000_000, options.flower),
        "sessions": lambda: sessions(large=options.large),
        "schemes": schemes,
        "training": training,
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()


def sessions(*, large: bool) -> None:
    """The costs of sessions of many clients."""
    cases = [
        (500, "curious", 0.1, 0.0),
        (500, "active", 0.1, 0.0),
        (500, "curious", 0.3, 0.3),
        (500, "active", 0.3, 0.3),
    ]
    print(HEAD.format(d=100_000), flush=True)
    for case in cases:
        print(min((played(*case) for _ in range(3)), key=lambda session: session.server_time).row(), flush=True)
    if large:
        print(played(10_000, "curious", 0.1, 0.1).row(), flush=True)


def played(n: int, mode: wire.Mode, dropouts: float, lost: float) -> Session:
    session = Session(n, 100_000, mode, dropouts, lost)
    session.play()
    return session


if __name__ == "__main__":
    sys.exit(main())
