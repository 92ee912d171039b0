"""Who added how much to the model? No download, less than a minute on two quiet cores.

Run: python examples/contribution.py
"""

import atoll

BAD = (2, 5, 7)

for attack in ("label_flip", "free_rider"):
    for how in ("leave_one_out", "shapley", "tmc_shapley", "gtg_shapley"):
        plan = atoll.Plan(
            name=f"{how} against {attack}",
            data="digits",
            partition={"name": "iid", "num_clients": 10},
            model={"name": "mlp_2nn", "hidden": 32},
            local={"epochs": 2, "lr": 0.1},
            rounds=10,
            attack=attack,  # clients 2, 5 and 7 learn wrong labels, or send noise in place of work
            attackers={"clients": BAD},
            server={"samples": 200},  # what models are measured on
            contribution=how,
            evaluation={"every": 0},
        )
        result = atoll.run(plan)
        ranked = sorted(result.contribution, key=lambda client: result.contribution[client])
        shares = "  ".join(f"{client}: {result.contribution[client]:+.3f}" for client in ranked)
        models = sum(row["contribution"]["evaluations"] for row in result.history)
        print(f"{plan.name}: {models:,} models were measured\n  from least to most {shares}")
        assert set(ranked[: len(BAD)]) == set(BAD), "the bad clients come out lowest"
