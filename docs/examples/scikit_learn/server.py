import numpy as np
from data import CLASSES, load
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

import fedpsa_strategy

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    x, y = load()
    scores = x @ arrays["coef"].numpy().T + arrays["intercept"].numpy()
    return MetricRecord({"accuracy": float(np.mean(scores.argmax(axis=1) == y))})


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    make_strategy = getattr(fedpsa_strategy, config["strategy"])
    strategy = make_strategy(fraction_train=0.3, num_clients=10)
    start = {"coef": np.zeros((len(CLASSES), 64)), "intercept": np.zeros(len(CLASSES))}
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord({name: Array(values) for name, values in start.items()}),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    last = max(result.evaluate_metrics_serverapp)
    print("accuracy:", result.evaluate_metrics_serverapp[last]["accuracy"], flush=True)
