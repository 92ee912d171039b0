"""Suggestions for unknown keys: the right place of a setting, or its name here for that of another framework."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from atoll.core.errors import nearest

KEYS = {
    "rounds": "num_rounds n_rounds num_server_rounds server_rounds comm_round comm_rounds communication_rounds "
    "global_rounds global_epochs",
    "seed": "random_seed random_state manual_seed",
    "data": "dataset dataset_name data_set",
    "model": "net network architecture arch model_name",
    "loss": "loss_fn loss_function criterion",
    "algorithm": "strategy method federated_optimizer fl_algorithm",
    "algorithm.mu": "mu proximal_mu prox_mu fedprox_mu",
    "partition": "partitioner split data_split",
    "partition.num_clients": "num_clients n_clients clients num_partitions num_supernodes num_users num_nodes "
    "total_clients client_num_in_total",
    "partition.alpha": "alpha dirichlet_alpha partition_alpha",
    "local": "training train client client_config",
    "local.lr": "lr learning_rate client_lr local_lr eta learningrate",
    "local.batch_size": "batch_size batchsize bs local_bs train_batch_size",
    "local.epochs": "epochs local_epochs num_epochs n_epochs num_local_epochs local_ep epoch",
    "local.steps": "steps local_steps num_steps max_steps local_iterations",
    "local.optimizer": "optimizer optimiser optim client_optimizer",
    "local.optimizer.momentum": "momentum",
    "local.optimizer.weight_decay": "weight_decay wd l2",
    "local.schedule": "schedule scheduler lr_scheduler lr_schedule",
    "server.lr": "server_lr server_learning_rate global_lr eta_server",
    "policy.size": "clients_per_round num_clients_per_round cohort_size client_num_per_round sample_size "
    "num_sampled_clients",
    "policy.fraction": "fraction fraction_fit fraction_train client_fraction participation participation_rate "
    "sample_rate sampling_rate frac",
    "policy.min_reports": "min_fit_clients min_train_nodes min_available_clients min_reports",
    "policy.deadline": "timeout round_timeout deadline",
    "aggregator": "aggregation aggregation_rule rule defense defence",
    "uplink": "compression compressor codec quantization quantisation",
    "secagg": "secure_aggregation secagg_plus",
    "privacy": "dp differential_privacy",
    "privacy.epsilon": "epsilon target_epsilon eps",
    "privacy.delta": "delta target_delta",
    "privacy.sigma": "sigma noise_multiplier noise",
    "privacy.clip": "clip clipping clipping_norm max_grad_norm l2_norm_clip clip_norm",
    "attackers.num": "num_attackers num_malicious num_byzantine num_bad_clients",
    "attackers.fraction": "malicious_fraction byzantine_fraction attacker_fraction attack_ratio",
    "evaluation.every": "eval_every evaluate_every test_every eval_interval frequency_of_the_test",
    "stop.accuracy": "target_accuracy accuracy goal_accuracy",
    "engine": "backend simulator executor",
    "engine.workers": "workers num_workers n_jobs num_cpus num_processes cpus",
}
"""Key of a plan -> its names in other frameworks, or at the top of a plan by mistake, separated by spaces."""
BY_NAME = {name: key for key, names in KEYS.items() for name in names.split()}
UNSUPPORTED = dict.fromkeys(
    ("device", "cuda", "gpu", "gpus", "num_gpus", "use_gpu", "accelerator"),
    "all engines compute on the processor; 'engine' says how (auto, inline, vectorised, processes or ray)",
)
"""Settings of other frameworks that a plan does not have -> the nearest alternative."""


def suggest(name: str, known: Iterable[str], where: str = "") -> str:
    """Return the end of an error message: the setting that was probably meant; `known` are the keys of table `where`.

    >>> suggest("learning_rate", ["rounds"])
    "did you mean 'local.lr'? Known: rounds"
    """
    names = sorted(known)
    word = name.lower().replace("-", "_")
    if word in UNSUPPORTED:
        return UNSUPPORTED[word]
    same_ending = [key for key in plan_keys() if key.rpartition(".")[2] == word]
    candidates = [BY_NAME[word]] if word in BY_NAME else same_ending
    candidates = [key for key in candidates if key != f"{where}.{name}".lstrip(".")]
    if not candidates:
        return nearest(name, names)
    hint = f"did you mean {' or '.join(map(repr, candidates))}?"
    return f"{hint} Known: {', '.join(names)}" if names else hint


@cache
def plan_keys() -> tuple[str, ...]:
    """Return the keys of a plan and of its tables, such as `rounds` and `local.lr`, without the options of parts."""
    from atoll.core.plan import Plan  # not above: plan.py imports this file

    return tuple(Plan.dotted_keys())
