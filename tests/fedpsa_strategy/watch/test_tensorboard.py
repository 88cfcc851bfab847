import builtins
import importlib.util
import sys

import pytest

from fedpsa_strategy.watch.tensorboard import TensorBoardLog
from support.events import aggregated, evaluated, started, uploaded
from support.grids import FakeTime

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed: pip install -e '.[tensorboard]'",
)


def scalars(path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(path))
    accumulator.Reload()
    return {
        tag: [(item.step, pytest.approx(item.value)) for item in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


@needs_tensorboard
def test_scalars_can_be_read_back_by_time(tmp_path):
    clock = FakeTime()
    with TensorBoardLog(tmp_path, clock.monotonic) as log:
        log(started())
        log(uploaded(20.0, staleness=3, kappa=0.5, temperature=None))  # no temperature yet
        clock.now = 8.0
        log(uploaded(30.4, staleness=3, kappa=0.75, temperature=2.5))
        log(aggregated(30.4, 1, 2, effective_number=1.5))
        log(evaluated(86_400.0, accuracy=0.25, loss=2.0))
        log(evaluated(86_401.0, where="clients", accuracy=0.5))
    assert scalars(tmp_path) == {
        "upload/kappa": [(20, 0.5), (30, 0.75)],
        "upload/temperature": [(30, 2.5)],
        "upload/staleness": [(20, 3.0), (30, 3.0)],
        "speed/uploads_per_second": [(30, 0.25)],
        "version/effective_number": [(30, 1.5)],
        "evaluate-server/accuracy": [(86_400, 0.25)],
        "evaluate-server/loss": [(86_400, 2.0)],
        "evaluate-clients/accuracy": [(86_401, 0.5)],
    }


@needs_tensorboard
def test_a_resumed_run_takes_the_place_of_what_was_interrupted(tmp_path):
    clock = FakeTime()
    for first, values in ((started(), (0.1, 0.2, 0.3)), (started(20.0, version=2), (0.8, 0.9))):
        with TensorBoardLog(tmp_path, clock.monotonic) as log:
            log(first)
            for index, kappa in enumerate(values, start=1):
                log(uploaded(first.time + 10.0 * index, staleness=3, kappa=kappa, temperature=None))
    assert scalars(tmp_path)["upload/kappa"] == [(10, 0.1), (20, 0.2), (30, 0.8), (40, 0.9)]


def test_without_the_package_the_error_names_the_command(tmp_path, monkeypatch):
    original = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return original(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoardLog(tmp_path)
    assert list(tmp_path.iterdir()) == []
