"""Agents with tasks of their own share an adapter of a language model, and keep another that is mixed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import Plan, run
from atoll.core.errors import PlanError, RunError
from atoll.core.personal_adapters import KEEP, mixing_weights
from atoll.language.export import export_run
from atoll.models.hf_causal import hf_causal
from atoll.train.build import build_job

transformers = pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
peft = pytest.importorskip("peft", reason="needs the extra llm: pip install 'atoll[llm]'")


@pytest.mark.parametrize("algorithm", ["fedit", "ffa_lora"])
def test_the_shared_adapter_travels_and_the_personal_one_stays(llm_plan: Plan, algorithm: str) -> None:
    plan = llm_plan.replace({"algorithm": algorithm, "model.personal_rank": 2, "keep": [KEEP], "policy.size": 8})
    job = build_job(plan)
    assert job.spec.slots == build_job(llm_plan.replace({"algorithm": algorithm})).spec.slots
    assert sum(slot.size for slot in job.spec.kept) == 2 * 2 * (2 * 16 + 16 * 2 + 1)
    result = run(plan)
    weights = [tuple(mixing_weights(result.models[client]).values()) for client in range(8)]
    assert len(set(weights)) == 8 and all(len(each) == 4 and 0 < min(each) <= max(each) < 1 for each in weights)
    assert next(iter(mixing_weights(result.models[0]))) == "model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("merged", [False, True])
def test_the_adapter_of_an_agent_is_both_in_one(llm_plan: Plan, base: Path, tmp_path: Path, merged: bool) -> None:
    plan = llm_plan.replace({"model.personal_rank": 2, "keep": [KEEP], "policy.size": 8})
    result = run(plan, out=tmp_path / "run", report=False)
    x = torch.tensor([[0, 5, 6, 7, 3, 9]])
    for client in (0, 3):
        out = result.save_adapter(tmp_path / f"agent-{client}", merged=merged, client=client)
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(out if merged else base)
        loaded = loaded if merged else peft.PeftModel.from_pretrained(loaded, out)
        with torch.no_grad():
            scores = [result.models[number](x) for number in (client, 1)]
            assert (loaded.eval()(input_ids=x).logits - scores[0]).abs().max() < 1e-4
            assert (scores[1] - scores[0]).abs().max() > 0.01
    with pytest.raises(RunError, match="write that of one client"):
        export_run(tmp_path / "run", tmp_path / "all")


def test_at_first_it_is_the_base(base: Path) -> None:
    model, plain = hf_causal(str(base), personal_rank=2).eval(), hf_causal(str(base)).eval()
    x = torch.tensor([[0, 5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    half = hf_causal(str(base), personal_rank=2, dtype="bfloat16", checkpointing=True)
    half(x).sum().backward()
    grads = [each.grad for name, each in half.named_parameters() if ".personal.B." in name]
    assert len(grads) == 4 and all(grad is not None and grad.dtype == torch.float32 and grad.any() for grad in grads)


def test_other_tuning_has_no_personal_adapter(base: Path) -> None:
    with pytest.raises(PlanError, match=r"adds adapters to those of lora, but model\.tune is 'ia3'"):
        hf_causal(str(base), tune="ia3", personal_rank=2)
