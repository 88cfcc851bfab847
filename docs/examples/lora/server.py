import json
from pathlib import Path

from example_task import CHARACTERS, KINDS, LENGTH, Net, load_data, loss, test
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from fedpsa_strategy import FedPSA, Probe

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    net = Net()
    set_peft_model_state_dict(net, arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": test(net, *load_data())})


@app.main()
def main(grid: Grid, context: Context) -> None:
    net = Net()
    batch = {"shape": (LENGTH,), "vocabulary": CHARACTERS, "num_classes": KINDS}
    probe = Probe.gaussian(net, **batch, loss_fn=loss)
    sketch_fn = probe.sketch_fn(Net(), state_fn=get_peft_model_state_dict)
    strategy = FedPSA(sketch_fn=sketch_fn, fraction_train=0.5, fraction_evaluate=0.0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(get_peft_model_state_dict(net)),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    accuracies = {k: v["accuracy"] for k, v in result.evaluate_metrics_serverapp.items()}
    summary = {"strategy": type(strategy).__name__, "accuracies": accuracies}
    if folder := context.run_config["run-dir"]:
        Path(folder, "summary.json").write_text(json.dumps(summary))
