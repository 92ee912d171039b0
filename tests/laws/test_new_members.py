"""A new member is held to the laws of its family the moment it exists, in the package's folder or anywhere else.

Honest and broken members are written to a temporary folder, and the suite itself is run over them in a process.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any
from xml.etree import ElementTree

import pytest
from laws.faulty_members import FAULTS
from network.fork_server import ForkServer

from atoll.core.parts import members
from atoll.testing import LawError, cases, check, families, laws
from atoll.testing.__main__ import main
from atoll.testing.law import Law

ROOT = Path(__file__).parents[2]
SUITE = ("tests/laws/test_member_laws.py", "tests/laws/test_option_laws.py")

HONEST = {
    "aggregators/shrunk_mean": """
        from atoll.core.aggregator import Aggregator, stacked
        from atoll.core.options import ShareAboveZero

        EXAMPLES = [{"factor": 0.5}, {"factor": 1.0}]

        def shrunk_mean(factor: ShareAboveZero) -> Aggregator:
            return stacked(lambda updates_CD, weight_C: factor * updates_CD.mean(0))
        """,
    "algorithms/anchored": """
        from atoll.core.algorithm import Algorithm
        from atoll.core.options import Positive

        EXAMPLE = {"mu": 0.2}

        def anchored(mu: Positive) -> Algorithm:
            def local_grad(grad_D, params_D, task):
                return grad_D + mu * (params_D - task.broadcast.params_D)

            return Algorithm(local_grad=local_grad)
        """,
    "transforms/rescaled": """
        from atoll.core.options import Positive
        from atoll.core.transform import Transform

        EXAMPLE = {"by": 4.0}

        def rescaled(by: Positive) -> Transform:
            def encode(vector_V, memory, encoding):
                return by * vector_V, {}, memory

            return Transform(encode, lambda carrier, side: carrier / by, linear=True, contractive=True)
        """,
    "train.works/class_shares": """
        import numpy as np
        from atoll.core.client_work import ClientWork
        from atoll.core.options import Count
        from atoll.train.array_work import array_work

        EXAMPLE = {"num_classes": 10}

        def class_shares(num_classes: Count) -> ClientWork:
            def train(arrays, task, memory):
                memory["rounds"] = memory.get("rounds", np.zeros(1)) + 1
                shares = np.bincount(task.y, minlength=num_classes) / len(task.y)
                return {"shares": shares}, len(task.y), {}

            def evaluate(arrays, task):
                return {"right": float((task.y == arrays["shares"].argmax()).sum()), "loss": float(len(task.y))}

            return array_work(first=lambda dataset: {"shares": np.zeros(num_classes)}, train=train, evaluate=evaluate)
        """,
    "metrics/within": """
        from atoll.core.metric import Metric
        from atoll.core.options import Positive
        from atoll.metrics.forms import NUMBERS
        from atoll.metrics.sums import weighted_mean

        EXAMPLE = {"distance": 0.5}

        def within(distance: Positive) -> Metric:
            def near(samples):
                return (samples.scores - samples.targets).abs() <= distance

            return weighted_mean("within", (NUMBERS,), near)
        """,
    "attacks/shifted": """
        from atoll.core.attack import Attack

        EXAMPLE = {"by": 0.5}

        def shifted(by: float) -> Attack:
            return Attack(update=lambda honest, known: honest._replace(delta_D=honest.delta_D + by))
        """,
}
NUM_LAWS = {"train.works": 9, "aggregators": 26, "algorithms": 9, "transforms": 13, "metrics": 12, "attacks": 8}
"""At least so many tests must run over an honest member, with all its examples."""
BROKEN = {
    "aggregators/first_come": (
        """
        from atoll.core.aggregator import Aggregator, stacked

        def first_come() -> Aggregator:
            return stacked(lambda updates_CD, weight_C: updates_CD[0].clone())
        """,
        {"a permutation changes nothing"},
    ),
    "aggregators/without_example": (
        """
        from atoll.core.aggregator import Aggregator, stacked
        from atoll.core.options import Positive

        def without_example(factor: Positive) -> Aggregator:
            return stacked(lambda updates_CD, weight_C: factor * updates_CD.mean(0))
        """,
        {"it is built by its example"},
    ),
    "algorithms/tired": (
        """
        from atoll.core.algorithm import Algorithm

        def tired() -> Algorithm:
            calls = []

            def finish(delta_D, task):
                calls.append(1)
                update, state = Algorithm().finish(delta_D, task)
                return update._replace(delta_D=delta_D / len(calls)), state

            return Algorithm(finish=finish)
        """,
        {"every engine gives the same run", "the order of clients changes nothing", "a resumed run ends the same"},
    ),
    "train.works/forgetful": (
        """
        import numpy as np
        from atoll.core.client_work import ClientWork
        from atoll.train.array_work import array_work

        def forgetful() -> ClientWork:
            rounds = []

            def train(arrays, task, memory):
                rounds.append(1)
                return {"mean": arrays["mean"] + len(rounds) * task.x.mean()}, len(task.y), {}

            def evaluate(arrays, task):
                return {"loss": float(np.abs(task.x.mean() - arrays["mean"]).sum())}

            return array_work(first=lambda dataset: {"mean": np.zeros(1)}, train=train, evaluate=evaluate)
        """,
        {"every engine gives the same bits", "a resumed run ends the same", "sums of an evaluation add up"},
    ),
    "transforms/one_way": (
        """
        from atoll.core.transform import Transform

        def one_way() -> Transform:
            def encode(vector_V, memory, encoding):
                return 4 * vector_V, {}, memory

            return Transform(encode, lambda carrier, side: carrier, contractive=True, sensitivity=lambda l2_in: l2_in)
        """,
        {"the norm stays within its sensitivity", "the error is no longer than the vector"},
    ),
    "metrics/last_slice": (
        """
        from atoll.core.metric import Metric
        from atoll.metrics.accuracy import accuracy

        def last_slice() -> Metric:
            return accuracy()._replace(merge=lambda one, other: other)
        """,
        {"slices and their order change nothing"},
    ),
    "attacks/careless": (
        """
        from atoll.core.attack import Attack

        def careless() -> Attack:
            return Attack(collude=lambda updates, bad_C, known: updates._replace(delta_D=-updates.delta_D))
        """,
        {"only the attackers change"},
    ),
}
HOME = "import atoll.{0}\natoll.{0}.__path__.append('{1}')\n"
GREETINGS = {
    "atoll/greetings/__init__": "",
    "atoll/greetings/hello": """
        EXAMPLE = {"name": "Ada"}

        def hello(name: str) -> str:
            return f"Hello, {name}"
        """,
    "atoll/greetings/mumble": """
        __all__ = ["mumble"]

        def mumble() -> str:
            return "..."
        """,
    "laws/greetings": """
        from atoll.testing.law import law, must

        CONTRACT = str

        @law()
        def a_greeting_has_words(member):
            must(member.build().strip(".") != "", "it says nothing: return a word")
        """,
}


def write(folder: Path, texts: dict[str, str]) -> Path:
    """Write files of a package, each from its path and text."""
    for path, text in texts.items():
        file = folder / f"{path.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text).lstrip())
    return folder


def outcomes(
    processes: ForkServer, folder: Path, chosen: dict[str, str], *options: str
) -> tuple[Counter[str], dict[str, set[str]]]:
    """Run the suite over members, given by path and name: how many laws held for each path, and which were broken."""
    report = folder / "report.xml"
    command = ["-m", "pytest", *SUITE, "-p", "no:cacheprovider", f"--junit-xml={report}", *options]
    command += [word for path, name in chosen.items() for word in ("--member", f"{path.split('/')[-2]}={name}")]
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = processes.start(command, folder / "out.txt", ROOT, {"PYTHONPATH": paths}, python=True)
    assert done.wait(300) in (0, 1), done.said
    held: Counter[str] = Counter()
    broken: dict[str, set[str]] = {path: set() for path in chosen}
    for case in ElementTree.parse(report).iter("testcase"):
        title = case.get("name", "")
        path = max((path for path, name in chosen.items() if name in title), key=lambda path: len(chosen[path]))
        if case.find("failure") is None:
            held[path] += 1
        else:
            broken[path].add(title.rpartition(": ")[2].rstrip("]"))
    return held, broken


@pytest.mark.parametrize("left_out", ["algorithms", pytest.param("", id="none", marks=pytest.mark.slow)])
def test_new_members_are_held_to_their_laws_inside_and_outside(
    processes: ForkServer, tmp_path: Path, left_out: str
) -> None:
    """The families' packages get temporary folders as part of their own; those outside are named by their modules.

    The laws of algorithms take as long as those of all other families together.
    """
    honest, broken_members = (
        {path: text for path, text in texts.items() if path.split("/")[0] != left_out} for texts in (HONEST, BROKEN)
    )
    faulty = {path: text for path, (text, _) in broken_members.items()}
    outside, inside = write(tmp_path / "strangers", {**honest, **faulty}), write(tmp_path / "inside", honest)
    homes = [HOME.format(family, inside / family.replace(".", "/")) for family in families()]
    (tmp_path / "homes.py").write_text("".join(homes))
    chosen = {f"inside/{path}": path.split("/")[1] for path in honest}
    for path in (*honest, *faulty):
        chosen[f"outside/{path}"] = f"{outside.name}.{path.replace('/', '.')}:{path.split('/')[1]}"
    held, broken = outcomes(processes, tmp_path, chosen, "-p", "homes", "--tb=no")
    for path in honest:
        assert not broken[f"inside/{path}"] and not broken[f"outside/{path}"]
        assert held[f"inside/{path}"] == held[f"outside/{path}"] >= NUM_LAWS[path.split("/")[0]], held
    for path, (_, expected) in broken_members.items():
        assert broken[f"outside/{path}"] >= expected, (path, broken)
    assert held["outside/aggregators/first_come"] > len(broken["outside/aggregators/first_come"])


def test_a_new_file_is_listed_drawn_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from laws.random_plans import random_plan

    import atoll.aggregators

    new = ("aggregators/shrunk_mean", "aggregators/first_come")
    folder = write(tmp_path, {path: HONEST.get(path) or BROKEN[path][0] for path in new})
    monkeypatch.setattr(atoll.aggregators, "__path__", [*atoll.aggregators.__path__, str(folder / "aggregators")])
    assert "shrunk_mean" in members("aggregators")
    listed = [case for case in cases("aggregators") if case.member.part.name == "shrunk_mean"]
    assert len(listed) == len(cases("aggregators", "shrunk_mean")) > 20
    drawn = [plan.get("aggregator", {}) for plan in map(random_plan, range(150))]
    assert {"name": "shrunk_mean", "factor": 0.5} in drawn
    with pytest.raises(LawError, match="first_come: a permutation changes nothing: the order of clients changes"):
        check("aggregators", "first_come")
    assert main(["aggregators", "shrunk_mean"]) == 0
    assert "laws, 0 broken" in capsys.readouterr().out
    assert main(["aggregators", "first_come"]) == 1
    assert (
        "BROKEN  aggregators first_come: a permutation changes nothing: the order of clients" in capsys.readouterr().out
    )
    assert main(["aggregator", "first_come"]) == 2
    assert "there are no laws for 'aggregator': did you mean 'aggregators'?" in capsys.readouterr().err
    assert main([]) == 2 and "usage: python -m atoll.testing FAMILY" in capsys.readouterr().out


def test_a_new_family_gets_its_laws_by_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family is a folder of the package, and its laws are a file of the same name in atoll.testing."""
    import atoll.testing

    write(tmp_path, GREETINGS)
    monkeypatch.setattr(atoll, "__path__", [*atoll.__path__, str(tmp_path / "atoll")])
    monkeypatch.setattr(atoll.testing, "__path__", [*atoll.testing.__path__, str(tmp_path / "laws")])
    assert "greetings" in families()
    assert check("greetings", "hello") == 2
    with pytest.raises(LawError, match="greetings mumble: a greeting has words: it says nothing"):
        check("greetings")


@pytest.mark.parametrize(("family", "law"), [(family, law) for family in families() for law in laws(family)], ids=str)
def test_every_law_can_be_broken(family: str, law: Law) -> None:
    build = FAULTS[family][str(law)]

    def faulty() -> Any:
        return build()

    broken = [case for case in cases(family, faulty) if str(case.law) == str(law)]
    assert len(broken) == 1
    with pytest.raises(LawError, match=re.escape(str(broken[0]))):
        broken[0].check()
