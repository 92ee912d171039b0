import time

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that says when each round begins."""

    def configure_train(self, server_round, *args, **options):
        print(f"ROUND {server_round} {time.time()}", flush=True)
        return super().configure_train(server_round, *args, **options)


@app.main()
def main(grid, context):
    config = context.run_config
    num = config["clients"]
    strategy = Timed(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=num, min_evaluate_nodes=0, min_available_nodes=num
    )
    arrays = ArrayRecord([np.zeros(config["params"], dtype=np.float32)])
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=config["rounds"])
    print(f"ROUND end {time.time()}", flush=True)
