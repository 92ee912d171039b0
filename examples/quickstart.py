"""FedAvg against FedProx on skewed data: one file, no download, a few seconds on a quiet machine.

Run: python examples/quickstart.py
"""

import atoll

for algorithm in ("fedavg", {"name": "fedprox", "mu": 0.1}):
    plan = atoll.Plan(
        data="digits",  # 1,797 handwritten digits that come with Atoll
        partition={"name": "dirichlet", "num_clients": 30, "alpha": 0.1},  # every client sees few classes
        model={"name": "mlp_2nn", "hidden": 64},
        algorithm=algorithm,
        local={"epochs": 5, "batch_size": 16, "lr": 0.1},
        policy={"size": 6},  # six clients a round
        rounds=60,
        evaluation={"clients_every": 20},
    )
    result = atoll.run(plan, progress=True)
    clients = result.history[-1]["clients_test"]
    print(
        f"{plan.algorithm.name}: {100 * result.accuracy:.1f} % on the test set; "
        f"over clients {100 * clients['mean']:.1f} % ± {100 * clients['std']:.1f}, "
        f"worst tenth {100 * clients['worst_decile']:.1f} %"
    )
    result.plot().savefig(f"quickstart-{plan.algorithm.name}.png")
