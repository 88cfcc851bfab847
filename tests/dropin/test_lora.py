"""The example that fine-tunes LoRA adapters: only they travel, and it learns, before and after."""

import json
import sys
from importlib import import_module

import pytest

from support.lora_app import FOLDER, after, before
from task.torchvision_import import import_torchvision_datasets

import_torchvision_datasets()  # which transformers imports; works beside any build of torch
pytest.importorskip("peft")

MODULES = ("example_task", "client", "server")


@pytest.fixture
def run_app(tmp_path, monkeypatch):
    """Run the app's files on the local engine; return what its server wrote."""
    from simulation.engines.local.run import run_locally

    def run(files, **config):
        app, results = tmp_path / "app", tmp_path / "run"
        for folder in (app, results):
            folder.mkdir()
        for name, text in files.items():
            (app / name).write_text(text)
        run_config = {"run-dir": str(results)} | {k.replace("_", "-"): v for k, v in config.items()}
        run_locally(run_config, app_dir=app, num_clients=4, workers=0, stream=False)
        return json.loads((results / "summary.json").read_text())

    yield run
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def net(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    yield import_module("example_task").Net()
    sys.modules.pop("example_task", None)


def test_what_travels_is_what_the_page_says(net):
    from flwr.app import ArrayRecord, RecordDict
    from peft import get_peft_model_state_dict

    from fedpsa_strategy import arrays_of, load_arrays
    from fedpsa_strategy.wire.replies import count_bytes

    adapters = arrays_of(net, get_peft_model_state_dict)
    assert adapters.keys() == ArrayRecord(get_peft_model_state_dict(net)).keys()
    assert len(adapters) == len(arrays_of(net))
    numbers = sum(array.numpy().size for array in adapters.values())
    assert numbers == sum(p.numel() for p in net.parameters() if p.requires_grad)
    kilobytes = [
        round(count_bytes(RecordDict({"arrays": arrays})) / 1000)
        for arrays in (adapters, ArrayRecord(net.state_dict()))
    ]
    page = (FOLDER.parents[1] / "DROP_IN.md").read_text()
    assert "{} kB instead of {} kB".format(*kilobytes) in page
    load_arrays(net, adapters, get_peft_model_state_dict)


def test_adapters_are_trained_sent_and_sketched(run_app, monkeypatch):
    from fedpsa_strategy.server.apply import Apply

    rejected = []
    monkeypatch.setattr(Apply, "reject", lambda self, task, reason, **_: rejected.append(reason))
    summary = run_app(after(), num_server_rounds=1, local_epochs=1)
    assert summary["strategy"] == "FedPSA"
    assert set(summary["accuracies"]) == {"0", "1"}
    assert not rejected


@pytest.mark.slow
@pytest.mark.parametrize(("version", "rounds"), [("before", 16), ("after", 16)])
def test_it_learns_before_and_after(version, rounds, run_app):
    summary = run_app(before() if version == "before" else after(), num_server_rounds=rounds)
    assert summary["strategy"] == ("FedAvg" if version == "before" else "FedPSA")
    accuracies = list(summary["accuracies"].values())
    assert accuracies[0] < 0.5
    assert max(accuracies[-3:]) > 0.7
