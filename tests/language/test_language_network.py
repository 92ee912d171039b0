"""Language models in a real federation: server and clients, each with a base of its own, and the simulation's bits."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import rows
from network.federation import Federation, certificates, federation, simulated, until
from network.fork_server import ForkServer, fork_server
from safetensors.torch import load_file

from atoll import Plan
from atoll.language.export import export_run
from atoll.models.hf_files import base_hash

transformers = pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
pytest.importorskip("peft", reason="needs the extra llm: pip install 'atoll[llm]'")

NUM = 3
NAME = "letters"
PLANS: dict[str, dict[str, Any]] = {
    "fedit": {"algorithm": "fedit"},
    "ffa-lora": {"algorithm": "ffa_lora"},
    "flora": {"algorithm": "flora"},
    "fedex-lora-of-ranks": {"algorithm": {"name": "fedex_lora", "ranks": [1, 2, 4]}},
    "codecs": {"algorithm": "flora", "uplink": [{"name": "top_k", "fraction": 0.2}, {"name": "quantise", "bits": 8}]},
    "fedit-in-secret": {"algorithm": {"name": "fedit", "ranks": [2, 4]}, "secagg": {}},
    "ffa-lora-in-secret": {"algorithm": "ffa_lora", "secagg": {}},
    "kept": {"keep": ["*lora_B*"]},
    "ia3": {"model.tune": "ia3", "local.lr": 0.1, "downlink": ["delta", "half"]},
    "several-agents": {"algorithm": "fedit", "model.personal_rank": 2, "keep": ["*.personal.*"]},
}
FAST = ("fedex-lora-of-ranks", "fedit-in-secret", "several-agents")


@pytest.fixture(scope="module")
def language_processes() -> Iterator[ForkServer]:
    """Starts commands as processes that have imported what language models need."""
    with fork_server(
        "transformers.models.llama.modeling_llama", "peft", "transformers.models.auto.modeling_auto"
    ) as it:
        yield it


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def plan(base: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Three owners; the server's base lies in a directory of its own, which has the base's name."""
    folder = tmp_path_factory.mktemp("language")
    shutil.copytree(base, folder / NAME)
    few = [line for line in texts.read_text().splitlines() if any(f"owner {number}" in line for number in range(NUM))]
    (folder / "texts.jsonl").write_text("\n".join(few) + "\n")
    data = {"name": "atoll.data.sequences:jsonl", "path": str(folder / "texts.jsonl"), "tokenizer": str(base)}
    return Plan(
        data={**data, "owner": "who", "text": "said", "length": 12, "test": 0.2},
        partition="natural",
        model={"name": "hf_causal", "path": str(folder / NAME), "rank": 4, "alpha": 8.0},
        local={"lr": 1.0, "batch_size": 4, "epochs": 2},
        evaluation={"metrics": ["perplexity"]},
        rounds=2,
        engine="inline",
    )


@pytest.fixture(scope="module")
def shared(
    language_processes: ForkServer, certs: Path, plan: Plan, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Federation]:
    """A server that is started with one plan after another, and clients that stay."""
    with federation(tmp_path_factory.mktemp("law"), language_processes, certs, plan) as made:
        made.serve("--clients", str(NUM), plan=False)
        made.enrol(NUM)
        for number in range(NUM):
            own = made.root / f"base-{number}"
            shutil.copytree(base, own)
            made.join(number, "--base", f"{NAME}={own}", once=False)
        yield made


def served(made: Federation, name: str, plan: Plan) -> None:
    """Start the server again with another plan, which may name the operator's own data."""
    assert made.server is not None
    made.server.kill()
    made.write(plan)
    made.serve("--name", name, "--clients", str(NUM))


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in PLANS])
def test_a_network_ends_with_the_bits_of_a_simulation(
    shared: Federation, name: str, plan: Plan, tmp_path: Path
) -> None:
    plan = plan.replace(PLANS[name])
    served(shared, name, plan)
    assert shared.wait_for(name, 120) == "all rounds done"
    alone = simulated(plan, tmp_path / "run")
    ours, theirs = rows(shared.directory(name)), rows(tmp_path / "run")
    keeps = "keep" in PLANS[name]
    if keeps:  # no server has a whole model
        left = load_file(shared.directory(name) / "model.safetensors")
        whole = load_file(tmp_path / "run" / "model.safetensors")
        assert left and all(torch.equal(value, whole[f"client.0.{key}"]) for key, value in left.items())
    else:
        assert shared.model(name) == alone
        assert ours == theirs and len(ours) == plan.rounds
    for number in range(NUM):
        mine = shared.root / f"c{number}" / "runs" / name / "model.safetensors"
        until(mine.exists, 30, str(mine))
        if keeps:
            prefix = f"client.{number}."
            own = {key.removeprefix(prefix): value for key, value in whole.items() if key.startswith(prefix)}
            found = load_file(mine)
            assert found.keys() == own.keys() and all(torch.equal(found[key], own[key]) for key in own)
        else:
            assert mine.read_bytes() == alone
    start = shared.lines(name)[0]
    assert f'"base":"{NAME}"' in start.replace(" ", "") and base_hash(plan.model.options["path"]) in start
    assert plan.model.options["path"] not in start
    if name == "flora":
        card = (export_run(shared.directory(name), tmp_path / "adapter") / "README.md").read_text()
        assert shared.audited(name).head.hash in card


def change(path: Path) -> None:
    """Change one weight of a base."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    model.save_pretrained(path)


def test_a_base_that_changes_under_a_run_is_noticed(
    language_processes: ForkServer, certs: Path, plan: Plan, base: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / NAME)
    with federation(
        tmp_path / "f", language_processes, certs, plan.replace({"model.path": str(tmp_path / NAME)})
    ) as made:
        made.serve("--clients", "1").kill()
        made.serve("--clients", "1").kill()  # it goes on
        change(tmp_path / NAME)
        server = made.serve("--clients", "1", ready=False)
        assert server.wait(60) == 5 and "other weights in its model.path" in server.said


def test_another_base_is_refused_and_the_others_go_on(
    language_processes: ForkServer, certs: Path, plan: Plan, base: Path, tmp_path: Path
) -> None:
    shutil.copytree(base, tmp_path / "other")
    change(tmp_path / "other")
    with federation(tmp_path / "f", language_processes, certs, plan) as made:
        made.serve("--clients", str(NUM), "--once")
        made.enrol(NUM)
        checks = [made.join(n, "--check", "--base", f"{NAME}={base if n else tmp_path / 'other'}") for n in range(2)]
        assert [check.wait(60) for check in checks] == [5, 0]
        for number in range(NUM):
            made.join(number, "--base", f"{NAME}={base if number else tmp_path / 'other'}")
        made.wait(120)
        assert [{each["client"] for each in commit["cohort"]} for commit in made.commits()] == [{1, 2}, {1, 2}]
        assert made.audited().rounds == 2
        said = made.clients[0].said
        hashes = base_hash(str(tmp_path / "other")), base_hash(str(base))
        assert all(each in said for each in hashes) and all(each in checks[0].said for each in hashes)
        log = (made.root / "server.out").read_text()
        assert "their hash is" in log and str(tmp_path / "other") not in log
