"""Language models of Hugging Face: what is trained and travels, in every engine, under privacy, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.api import run
from atoll.core.adapters import adapted_layers, factor, scaling_of
from atoll.core.algorithm import Batch
from atoll.core.errors import PlanError
from atoll.core.messages import Broadcast, Payload, Task, stack
from atoll.core.params import flatten, load
from atoll.core.parts import Part
from atoll.core.plan import Plan
from atoll.core.wire import packed_size
from atoll.models.hf_causal import CausalLM, hf_causal
from atoll.models.hf_files import base_hash, quantise
from atoll.testing.runs import must_resume
from atoll.train import evaluate
from atoll.train.build import build_job
from atoll.train.clipping import layer_inputs, layer_sums, summed
from atoll.train.job import Job, broadcast_of, first_server
from atoll.train.loop import _order, load_batch, workspace
from atoll.train.private import _part
from atoll.train.trainer import Trainer

pytest.importorskip("transformers", reason="needs the extra llm: pip install 'atoll[llm]'")
pytest.importorskip("peft", reason="needs the extra llm: pip install 'atoll[llm]'")

ADAPTER = 2 * 2 * (4 * 16 + 16 * 4)
"""Two layers, q and v, two factors of rank 4."""
NOISE = {"clip": 0.5, "sigma": 1.0, "delta": 1e-4, "test_noise": True}


def tokens(plan: Plan, num: int = 4) -> Tensor:
    return build_job(plan).federation.first(num)[0]


def test_only_the_adapter_is_trained_and_travels(llm_plan: Plan) -> None:
    result, job = run(llm_plan), build_job(llm_plan)
    assert job.spec.num_params == ADAPTER and not job.spec.buffers
    assert result.history[0]["bytes_up"] == 4 * packed_size(Payload(torch.zeros(ADAPTER)))
    assert result.history[0]["bytes_down"] == result.history[0]["bytes_up"]
    assert sum(tensor.numel() for tensor in result.model.state_dict().values()) == ADAPTER
    frozen = [each for each in result.model.parameters() if not each.requires_grad]
    first = [each for each in job.model.parameters() if not each.requires_grad]
    assert len(frozen) > 10 and all(torch.equal(*pair) for pair in zip(frozen, first, strict=True))


def test_first_factors_come_from_the_seed(llm_plan: Plan) -> None:
    models = [build_job(llm_plan.replace({"seed": seed})).model for seed in (0, 0, 1)]
    factors = [[factor(layer, "A") for layer in adapted_layers(model, "this").values()] for model in models]
    assert all(torch.equal(*pair) for pair in zip(factors[0], factors[1], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(factors[0], factors[2], strict=True))
    assert not any(factor(layer, "B").any() for layer in adapted_layers(models[0], "this").values())


def test_loss_and_perplexity_are_those_of_transformers(llm_plan: Plan) -> None:
    result, federation = run(llm_plan), build_job(llm_plan).federation
    assert isinstance(result.model, CausalLM)
    x, y = federation.test_samples(0, 1000).load()
    with torch.no_grad():
        scores = result.model.model(input_ids=x).logits
        nats = nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten(), ignore_index=-100)
    assert result.test["perplexity"] == pytest.approx(math.exp(float(nats)), rel=1e-5)
    assert result.test["perplexity"] < run(llm_plan.replace({"rounds": 1})).test["perplexity"]


def test_clients_are_measured_one_by_one(llm_plan: Plan, tmp_path: Path) -> None:
    run(llm_plan.replace({"evaluation.clients_every": 1}), out=tmp_path / "run", report=False)
    found = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert len(found["perplexity"]) == len(found["loss"]) == 8
    assert all(1 < value < 200 for value in found["perplexity"])


def test_evaluation_in_passes_gives_the_same(llm_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(llm_plan).test
    monkeypatch.setattr(evaluate, "MOST_OUTPUTS", 3 * 12 * 31)
    parts = run(llm_plan).test
    assert parts["perplexity"] == pytest.approx(whole["perplexity"], rel=1e-6)


@pytest.mark.parametrize("algorithm", [pytest.param("fedavg", marks=pytest.mark.slow), "flora"])
def test_processes_and_resume_give_the_same_bits(llm_plan: Plan, algorithm: str) -> None:
    plan = llm_plan.replace({"algorithm": algorithm, "local.epochs": 1})
    one, two = (run(plan.replace({"engine": engine})) for engine in ("inline", {"name": "processes", "workers": 2}))
    assert torch.equal(one.params_D, two.params_D)
    must_resume(plan)


def weights(job: Job, vector_M: Tensor) -> list[Tensor]:
    """What each adapted layer adds to its frozen one, in float64."""
    model, found = load(copy.deepcopy(job.model), job.spec, vector_M), []
    for layer in adapted_layers(model, "this").values():
        rest: Any = getattr(layer.base_layer, "rest", torch.zeros(())).double()  # type: ignore[union-attr]
        product = factor(layer, "B").detach().double() @ factor(layer, "A").detach().double()
        found.append(scaling_of(layer) * (rest + product))
    return found


@pytest.mark.parametrize("algorithm", ["fedit", "ffa_lora", "flora", "fedex_lora"])
def test_aggregation_is_exact_where_it_says_so(llm_plan: Plan, algorithm: str) -> None:
    plan = llm_plan.replace({"algorithm": algorithm, "policy.size": 8, "local.epochs": 8})
    result, job = run(plan.replace({"rounds": 1})), build_job(plan)
    sent = {0: broadcast_of(job, job.first_D, first_server(job, job.first_D))}
    updates = stack([Trainer(job).train_one(Task(client, 0, 0), sent[0], {}).update for client in range(8)])
    share_C = updates.weight.double() / updates.weight.double().sum()
    due = [torch.zeros_like(weight) for weight in weights(job, job.first_D)]
    for share, delta_D in zip(share_C, updates.delta_D, strict=True):
        client_M = job.first_D.clone()
        client_M[: len(delta_D)] += delta_D
        due = [total + share * weight for total, weight in zip(due, weights(job, client_M), strict=True)]
    found = weights(job, result.params_D)
    error = sum(float((a - b).square().sum()) for a, b in zip(found, due, strict=True))
    error = (error / sum(float(each.square().sum()) for each in due)) ** 0.5
    assert error > 0.05 if algorithm == "fedit" else error < 1e-6
    if algorithm != "ffa_lora":
        assert result.history[0]["algorithm"]["aggregation_error"] == pytest.approx(error, rel=1e-2, abs=1e-7)


def gradients_of_a_loop(job: Job, batch: Batch) -> list[dict[str, Tensor]]:
    """The gradient of each sample by itself."""
    named = dict(job.model.named_parameters())
    leaves, found = [named[slot.name] for slot in job.spec.trainable], []
    for x, y in zip(batch.x, batch.y, strict=True):
        grads = torch.autograd.grad(job.loss(job.model(x[None]), y[None]).sum(), leaves)
        found.append({slot.name: grad for slot, grad in zip(job.spec.trainable, grads, strict=True)})
    return found


@pytest.mark.parametrize("tune", ["lora", "ia3", "head"])
def test_gradients_of_samples_are_those_of_a_loop(llm_plan: Plan, tune: str) -> None:
    plan = llm_plan.replace({"privacy": {"name": "sample", **NOISE}, "model.tune": tune})
    job = build_job(plan)
    assert bool(job.layers) == (tune != "ia3")  # by the layers' inputs and slopes, or sample by sample
    shaken_D = job.first_D + 0.1 * torch.randn(job.first_D.shape, generator=torch.Generator().manual_seed(0))
    load(job.model, job.spec, shaken_D)
    batch = load_batch(job, torch.arange(5), Task(0, 0, 0), job.first_D, 0)
    expected = gradients_of_a_loop(job, batch)
    leaves = {slot.name: dict(job.model.named_parameters())[slot.name].detach() for slot in job.spec.trainable}
    order = _order(job, workspace(job), Broadcast(shaken_D, {}), {}, torch.ones(()), 1, batch, Task(0, 0, 0), 0.0, 1)
    for row, due in enumerate(expected):
        if job.layers:
            shifts = [batch.weight.new_zeros(5, *layer.shape).requires_grad_() for layer in job.layers]
            outputs, inputs = layer_inputs(job.model, job.layers, leaves, batch.x, shifts)
            slopes = torch.autograd.grad(job.loss(outputs, batch.y).sum(), shifts)
            one_hot = torch.eye(5)[row]
            found = summed(job.layers, layer_sums(job.model, job.layers, inputs, list(slopes)), one_hot)
        else:
            alone = Batch(batch.x[row : row + 1], batch.y[row : row + 1], torch.ones(1))
            _, sums = _part(job, leaves, alone, order, 0, 0)
            found = dict(zip(leaves, sums(None), strict=True))
        for name, grad in due.items():
            assert (found[name] - grad).abs().max() <= 1e-5 * max(1.0, float(grad.abs().max())), name
            assert bool(grad.any())


PLANS: dict[str, dict[str, Any]] = {
    "user-level": {"privacy": {"name": "central", **NOISE}, "sampler": "poisson"},
    "distributed": {
        "privacy": {"name": "distributed", **NOISE},
        "sampler": "round_robin",
        "secagg": {"modulus_bits": 64},
        "policy.size": 6,
    },
    "local": {"privacy": {"name": "local", **NOISE}},
    "sample-level": {"privacy": {"name": "sample", **NOISE}},
    "secure": {"secagg": {}},
    "codecs": {"uplink": [{"name": "top_k", "fraction": 0.1}, "quantise"]},
    "robust": {"aggregator": {"name": "trimmed_mean", "f": 1}},
    "contribution": {"contribution": "leave_one_out", "server.samples": 8},
    "detection": {"detection": "distance"},
    "personal": {"keep": ["*lora_B*"]},
}


@pytest.mark.parametrize("name", list(PLANS))
def test_the_rest_of_a_plan_works_on_adapters(llm_plan: Plan, name: str) -> None:
    plan = llm_plan.replace({**PLANS[name], "rounds": 1, "local.epochs": 1})
    result = run(plan)
    assert bool(result.params_D.isfinite().all()) and result.reason == "all rounds done"
    assert not torch.equal(result.params_D, build_job(plan).first_D)
    if "privacy" in PLANS[name]:
        assert result.history[-1]["privacy"]["epsilon"] > 0


@pytest.mark.parametrize("tune", ["ia3", "head"])
def test_other_parts_of_a_model_can_be_tuned(llm_plan: Plan, tune: str) -> None:
    plan = llm_plan.replace({"model.tune": tune, "local.lr": 0.1})
    result, job = run(plan), build_job(plan)
    assert {"ia3_l" if tune == "ia3" else "lm_head"} == {
        part for slot in job.spec.slots for part in slot.name.split(".") if part in ("ia3_l", "lm_head")
    }
    assert result.test["perplexity"] < run(plan.replace({"local.lr": 1e-9})).test["perplexity"]


def test_checkpointing_changes_nothing_and_bfloat16_little(llm_plan: Plan) -> None:
    plain = run(llm_plan)
    again = run(llm_plan.replace({"model.checkpointing": True}))
    assert (again.params_D - plain.params_D).abs().max() < 1e-5
    gentle = llm_plan.replace({"local.lr": 0.05})
    plain, half = run(gentle), run(gentle.replace({"model.dtype": "bfloat16"}))
    dtypes = {each.dtype for each in half.model.parameters() if not each.requires_grad}
    assert dtypes == {torch.bfloat16} and half.params_D.dtype == torch.float32
    assert half.test["perplexity"] == pytest.approx(plain.test["perplexity"], rel=0.02)


INT8: dict[str, dict[str, Any]] = {
    **{name: PLANS[name] for name in ("user-level", "sample-level", "secure", "codecs")},
    "fedex_lora": {"algorithm": "fedex_lora"},
    "flora": {"algorithm": "flora"},
    "ffa_lora": {"algorithm": "ffa_lora"},
    "ia3": {"model.tune": "ia3", "local.lr": 0.1},
    "agents": {"algorithm": "fedit", "model.personal_rank": 2, "keep": ["*.personal.*"]},
    "checkpointing": {"model.checkpointing": True},
    "processes": {"engine": {"name": "processes", "workers": 2}},
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("sample-level", "fedex_lora") else pytest.param(name, marks=pytest.mark.slow) for name in INT8],
)
def test_an_adapter_beside_eight_bits_learns_what_one_beside_float32_does(llm_plan: Plan, name: str) -> None:
    pytest.importorskip("torchao", reason="needs the extra int8: pip install 'atoll[llm,int8]'")
    plan = llm_plan.replace({"local.lr": 0.05, **INT8[name], "rounds": 1, "local.epochs": 1})
    plain, small = run(plan), run(plan.replace({"model.dtype": "int8"}))
    moved, apart = plain.params_D - build_job(plan).first_D, plain.params_D - small.params_D
    assert 0 < apart.norm() < 0.3 * moved.norm()
    assert small.test["perplexity"] == pytest.approx(plain.test["perplexity"], rel=0.03)


def test_eight_bits_are_what_is_held_and_nothing_of_them_travels(llm_plan: Plan, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs the extra int8: pip install 'atoll[llm,int8]'")
    plan = llm_plan.replace({"model.dtype": "int8"})
    result = run(plan)
    assert set(result.model.state_dict()) == set(run(llm_plan.replace({"rounds": 0})).model.state_dict())
    base, head = result.model.model.model.layers[0].mlp.down_proj.weight, result.model.model.lm_head.weight
    assert base.qdata.dtype == torch.int8 and head.dtype == torch.bfloat16
    assert copy.deepcopy(result.model).model.model.layers[0].mlp.down_proj.weight is base
    must_resume(plan)
    result.save_adapter(tmp_path / "merged", merged=True)


def test_eight_bits_need_a_package_and_linear_layers(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torchao.quantization", None)
        with pytest.raises(PlanError, match=r"pip install \"atoll\[llm,int8\]\""):
            hf_causal(str(base), dtype="int8")
    pytest.importorskip("torchao", reason="needs the extra int8: pip install 'atoll[llm,int8]'")
    with pytest.raises(PlanError, match="linear layers"):
        quantise(nn.Conv1d(1, 1, 1))


def test_packed_texts_do_not_see_each_other(base: Path) -> None:
    apart, together = hf_causal(str(base), separator=0).eval(), hf_causal(str(base)).eval()
    one, two = torch.tensor([[0, 5, 6, 7]]), torch.tensor([[0, 9, 8]])
    packed = torch.cat([one, two], dim=1)
    with torch.no_grad():
        alone = torch.cat([together(one), together(two)], dim=1)
        assert torch.allclose(apart(packed), alone, atol=1e-5)
        assert not torch.allclose(together(packed), alone, atol=1e-2)


def test_copies_share_the_base(base: Path) -> None:
    model = hf_causal(str(base))
    twin = copy.deepcopy(model)
    for (name, old), (_, new) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert (old is new) == (not old.requires_grad), name
        assert torch.equal(old, new)


def test_a_size_is_known_without_reading_weights(base: Path) -> None:
    with torch.device("meta"):
        sizes = {name: each.shape for name, each in hf_causal(str(base)).named_parameters()}
    assert sizes == {name: each.shape for name, each in hf_causal(str(base)).named_parameters()}


def test_the_hash_is_of_the_weights(base: Path, tmp_path: Path) -> None:
    import transformers

    own = base_hash(str(base))
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(tmp_path / "shards", max_shard_size="8KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert base_hash(str(tmp_path / "shards")) == own
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "other")
    hf_causal(str(base), sha256=own)
    with pytest.raises(PlanError, match="get the same base as all others"):
        hf_causal(str(tmp_path / "other"), sha256=own)


def test_a_name_on_the_hub_is_a_base_too(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's own cache, as after a first fetch; nothing is asked of a network."""
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(base, cached / "snapshots" / "a1")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    x = torch.tensor([[0, 5, 6, 7]])
    named = hf_causal("someone/tiny", sha256=base_hash(str(base))).eval()
    assert torch.equal(named(x), hf_causal(str(base)).eval()(x))
    with pytest.raises(PlanError, match="or a name on the hub"):
        hf_causal("someone/unknown")


def test_code_of_a_model_is_not_run(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "evil")
    config = json.loads((tmp_path / "evil" / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (tmp_path / "evil" / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(PlanError, match="code that comes with a model is not run"):
        hf_causal(str(tmp_path / "evil"))
    assert not (tmp_path / "ran").exists()


def test_wrong_options_are_refused_with_a_way_out(base: Path, tmp_path: Path, llm_plan: Plan) -> None:
    with pytest.raises(PlanError, match=r"name some of its layers: .*q_proj"):
        hf_causal(str(base), targets=("attention",))
    with pytest.raises(PlanError, match=r"give a directory with config\.json"):
        hf_causal(str(tmp_path))
    with pytest.raises(PlanError, match="float32"):
        hf_causal(str(base), tune="head", dtype="bfloat16")
    with pytest.raises(PlanError, match="use a model with them"):
        run(llm_plan.replace({"model.tune": "head", "algorithm": "fedit"}))


def test_a_missing_extra_says_how_to_install_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PlanError, match=r"pip install 'atoll\[llm\]'"):
        Part("hf_causal", path=str(base)).build("models")


def test_the_flat_vector_is_the_adapter(llm_plan: Plan) -> None:
    result, job = run(llm_plan), build_job(llm_plan)
    assert torch.equal(flatten(result.model, job.spec), result.params_D)
    x = tokens(llm_plan)
    again = load(build_job(llm_plan).model, job.spec, result.params_D).eval()
    with torch.no_grad():
        assert torch.equal(again(x), result.model(x))
