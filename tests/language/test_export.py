"""What was trained is written for others: an adapter that peft loads, a merged model, and a card."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from atoll.api import Result, run
from atoll.cli.main import app
from atoll.core.errors import RunError
from atoll.core.plan import Plan
from atoll.models.hf_files import base_hash

transformers = pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
peft = pytest.importorskip("peft", reason="needs the extra llm: pip install 'atoll[llm]'")

X = torch.tensor([[0, 5, 6, 7, 3, 9], [0, 9, 9, 4, 12, 30]])


def scores(result: Result) -> Tensor:
    with torch.no_grad():
        found: Tensor = result.model(X)
    return found


def scores_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=X).logits
    return found


@pytest.mark.parametrize("algorithm", ["fedavg", "ffa_lora", "flora", "fedex_lora", "ia3"])
def test_peft_loads_the_adapter(llm_plan: Plan, base: Path, tmp_path: Path, algorithm: str) -> None:
    changes = {"model.tune": "ia3", "local.lr": 0.1} if algorithm == "ia3" else {"algorithm": algorithm}
    result = run(llm_plan.replace(changes))
    out = result.save_adapter(tmp_path / "adapter")
    assert not list(out.glob("model*.safetensors"))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    first = scores_of(plain)
    loaded = peft.PeftModel.from_pretrained(plain, out)
    assert (scores_of(loaded) - scores(result)).abs().max() < 1e-4
    assert (first - scores(result)).abs().max() > 0.05


@pytest.mark.parametrize("change", [{}, {"algorithm": "flora"}, {"model.tune": "ia3"}, {"model.tune": "head"}], ids=str)
def test_transformers_loads_the_merged_model(llm_plan: Plan, tmp_path: Path, change: dict[str, object]) -> None:
    result = run(llm_plan.replace({**change, "rounds": 1, "local.lr": 0.1}))
    out = result.save_adapter(tmp_path / "merged", merged=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (scores_of(merged) - scores(result)).abs().max() < 1e-4
    assert transformers.AutoTokenizer.from_pretrained(out).bos_token_id == 0


@pytest.mark.parametrize("change", [{"algorithm": "fedex_lora"}, {"model.tune": "ia3"}], ids=str)
def test_layers_that_hold_their_weight_transposed_are_merged(
    llm_plan: Plan, base: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    """As those of GPT-2 do, one of which is square: a product added the wrong way round would go unnoticed."""
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("config.json", "model.safetensors"))
    config = transformers.GPT2Config(
        vocab_size=31,
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(1)
    plain = transformers.GPT2LMHeadModel(config)
    plain.save_pretrained(tmp_path / "base")
    model = {"model.path": str(tmp_path / "base"), "model.targets": ["c_attn", "c_proj"], "local.lr": 0.1}
    result = run(llm_plan.replace({**model, **change, "rounds": 1}))
    out = result.save_adapter(tmp_path / "merged", merged=True)
    assert (scores_of(plain) - scores(result)).abs().max() > 0.01
    assert (scores_of(transformers.AutoModelForCausalLM.from_pretrained(out)) - scores(result)).abs().max() < 1e-5
    loaded = peft.PeftModel.from_pretrained(plain, result.save_adapter(tmp_path / "adapter"))
    assert (scores_of(loaded) - scores(result)).abs().max() < 1e-5


def test_the_command_writes_what_a_run_ended_with(llm_plan: Plan, base: Path, tmp_path: Path) -> None:
    noise = {"name": "local", "clip": 0.5, "sigma": 1.0, "delta": 1e-4}
    plan = llm_plan.replace({"algorithm": "flora", "privacy": noise, "name": "letters"})
    result = run(plan, out=tmp_path / "run", report=False)
    assert (tmp_path / "run" / "model.safetensors").stat().st_size < 20_000  # no base in it
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")])
    assert done.exit_code == 0, done.output
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert (scores_of(peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")) - scores(result)).abs().max() < 1e-4
    card = (tmp_path / "adapter" / "README.md").read_text()
    epsilon = result.history[-1]["privacy"]["epsilon"]
    facts = ["license: mit", "# letters", base_hash(str(base)), "| Clients | 8 |", "| Rounds | 2 |", "flora"]
    for fact in [*facts, f"epsilon {epsilon:.4g} at delta 0.0001", "Ledger | none"]:
        assert fact in card
    again = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--adapter", str(tmp_path / "adapter")])
    assert isinstance(again.exception, RunError) and "is not empty" in str(again.exception)


def test_other_models_and_heads_have_no_adapter(llm_plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="--merged"):
        run(llm_plan.replace({"model.tune": "head", "rounds": 1})).save_adapter(tmp_path / "one")
    with pytest.raises(RunError, match="adapters are of hf_causal alone"):
        run(Plan(rounds=1, engine="inline")).save_adapter(tmp_path / "two")
