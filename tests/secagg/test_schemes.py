"""Laws of every scheme: the exact sum of the survivors, for all drop-outs and on every host."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from members import every

from atoll.core.errors import PlanError
from atoll.core.parts import Part, examples
from atoll.secagg.encoding import finest
from atoll.secagg.scheme import ClientHost, Scheme, Session, in_this_process
from atoll.simulation.client_hosts import in_processes

EVERY = every("secagg.schemes")
LENGTH = 301


def scheme(name: str, **options: object) -> Scheme:
    built: Scheme = Part(name, **{**examples("secagg.schemes", name)[0], **options}).build("secagg.schemes")
    return built


def session(num: int, silent: dict[int, str] | None = None, length: int = LENGTH) -> Session:
    clients = tuple(3 + 5 * i for i in range(num))
    encoding = finest(1.0, num)
    rng = np.random.default_rng(num)
    vectors = {
        c: rng.integers(-encoding.levels, encoding.levels + 1, length).astype("<i4").view("<u4") for c in clients
    }
    lost = {clients[place]: step for place, step in (silent or {}).items()}
    return Session("test", 2, 7, bytes(32), clients, lost, length, encoding, lambda client: vectors[client])


def exact(asked: Session, survivors: tuple[int, ...]) -> np.ndarray:
    total = np.sum([asked.vector(client).astype(np.uint64) for client in survivors], axis=0)
    return total.astype(np.uint32)


def expected(asked: Session, how: Scheme) -> tuple[int, ...]:
    late = how.steps[how.counts_from + 1 :]
    return tuple(c for c in asked.clients if asked.silent.get(c) in (None, *late))


@pytest.mark.parametrize("host", [in_this_process, in_processes(2)], ids=["one process", "two processes"])
@pytest.mark.parametrize("name", EVERY)
def test_the_sum_is_exact(name: str, host: ClientHost) -> None:
    how, asked = scheme(name), session(7)
    outcome = how.simulate(asked, host)
    assert outcome.survivors == asked.clients
    assert outcome.total_L is not None and np.array_equal(outcome.total_L, exact(asked, asked.clients))
    assert outcome.bytes_up >= 7 * 4 * LENGTH and not outcome.why


@pytest.mark.parametrize("name", EVERY)
def test_the_sum_is_exact_for_every_drop_out(name: str) -> None:
    how = scheme(name)
    for steps in product(how.steps, how.steps):
        asked = session(6, {1: steps[0], 4: steps[1]})
        outcome = how.simulate(asked, in_this_process)
        assert outcome.survivors == expected(asked, how), steps
        assert outcome.total_L is not None and np.array_equal(outcome.total_L, exact(asked, outcome.survivors)), steps


@pytest.mark.parametrize("left", [1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_there_is_no_sum_of_one_client_and_by_default_none_of_two(name: str, left: int) -> None:
    how = scheme(name)
    outcome = how.simulate(session(4, dict.fromkeys(range(4 - left), how.steps[how.counts_from])), in_this_process)
    assert outcome.total_L is None and outcome.survivors == () and "needed" in outcome.why


@pytest.mark.parametrize("name", EVERY)
def test_a_sum_below_the_minimum_of_survivors_is_not_opened(name: str) -> None:
    how = scheme(name)
    for least, opens in ((4, True), (5, False)):
        asked = session(6, dict.fromkeys(range(2), how.steps[how.counts_from]))._replace(min_survivors=least)
        assert (how.simulate(asked, in_this_process).total_L is not None) == opens


@pytest.mark.parametrize("name", EVERY)
def test_a_cohort_of_one_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="ask"):
        scheme(name).check(1)


@pytest.mark.parametrize("name", EVERY)
def test_messages_look_like_noise(name: str) -> None:
    """Compare the bytes of the largest messages with the uniform distribution by chi-square; vectors are zero."""
    answers: list[bytes] = []

    def host(make):  # type: ignore[no-untyped-def]
        from contextlib import contextmanager

        @contextmanager
        def recording():  # type: ignore[no-untyped-def]
            with in_this_process(make) as ask:

                def ask_and_record(messages):  # type: ignore[no-untyped-def]
                    for answer in ask(messages):
                        answers.append(answer)
                        yield answer

                yield ask_and_record

        return recording()

    asked = session(3, length=50_000)._replace(vector=lambda client: np.zeros(50_000, "<u4"))
    assert scheme(name).simulate(asked, host).total_L is not None
    largest = [answer for answer in answers if len(answer) > 100_000]
    assert len(largest) == 3 and len(set(largest)) == 3
    if name == "ckks":  # ciphertexts are residues with framing, not uniform bytes; that they differ must do
        return
    for each in largest:
        counts = np.bincount(np.frombuffer(each[200:-200], np.uint8), minlength=256)
        mean = counts.sum() / 256
        assert ((counts - mean) ** 2 / mean).sum() < 255 + 6 * np.sqrt(2 * 255)


def test_additive_takes_any_number_of_servers_above_one() -> None:
    for servers in (2, 3, 5):
        asked = session(4, {2: "input"})
        outcome = scheme("additive", servers=servers).simulate(asked, in_this_process)
        assert outcome.total_L is not None and np.array_equal(outcome.total_L, exact(asked, outcome.survivors))
        assert outcome.bytes_up == 4 * (8 + 32 * (servers - 1)) + 3 * (8 + 4 * LENGTH)
    with pytest.raises(PlanError, match=r"servers must be in \[2, 1000\], got 1; one server would see every vector"):
        scheme("additive", servers=1)


def test_pairwise_refuses_impossible_settings() -> None:
    with pytest.raises(PlanError, match="curious"):
        scheme("pairwise", server="friendly")
    with pytest.raises(PlanError, match=r"pairwise: dropouts must be in \[0, 1\), got 1\.5"):
        scheme("pairwise", dropouts=1.5)
    assert scheme("pairwise", server="curious").steps == ("advertise", "share", "input", "unmask")
    assert scheme("pairwise").steps == ("advertise", "share", "input", "consent", "unmask")


def test_a_curious_server_needs_fewer_steps_and_gets_the_same_sum() -> None:
    for steps in product(("advertise", "share", "input", "unmask"), repeat=2):
        asked = session(6, {0: steps[0], 5: steps[1]})
        how = scheme("pairwise", server="curious")
        outcome = how.simulate(asked, in_this_process)
        assert outcome.total_L is not None and np.array_equal(outcome.total_L, exact(asked, expected(asked, how)))
