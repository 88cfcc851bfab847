"""What Flower's FedAvg takes, these strategies take too, under the same names."""

import inspect

import flwr.serverapp.strategy
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict

from fedpsa_strategy import CA2FL, FedAsync, FedAvg, FedBuff, FedFa, FedPSA, Midpoint
from fedpsa_strategy.server.options import Evaluation
from fedpsa_strategy.server.strategy import AsyncStrategy
from support.grids import ScriptedGrid, update
from support.runs import in_train, run, virtual


def parameters(function):
    return inspect.signature(function).parameters


def accuracy_of(message, grid):
    metrics = {"num-examples": 1, "accuracy": 0.25 * grid.partition(message)}
    return RecordDict({"metrics": MetricRecord(metrics)})


@pytest.mark.parametrize("strategy", [CA2FL, FedAsync, FedAvg, FedBuff, FedFa, FedPSA, Midpoint])
def test_every_keyword_of_flowers_fedavg_is_taken(strategy):
    theirs = {
        name: item.default for name, item in parameters(flwr.serverapp.strategy.FedAvg).items()
    }
    assert {"fraction_train", "min_available_nodes", "weighted_by_key"} <= theirs.keys()
    all_of_them = {"num_clients": 4}
    needs = {
        FedPSA: {"sketch_fn": lambda arrays: [1.0]},
        CA2FL: all_of_them,
        Midpoint: all_of_them,
    }
    made = strategy(**theirs, **needs.get(strategy, {}))
    for name, value in theirs.items():
        assert getattr(made.flower, name) == value


def test_start_is_called_as_in_flower():
    theirs = parameters(flwr.serverapp.strategy.FedAvg.start)
    ours = dict(parameters(AsyncStrategy.start))
    if "should_stop" not in theirs:  # new in 1.43
        assert ours.pop("should_stop").default is None
    assert list(ours) == list(theirs)
    assert [item.default for item in ours.values()] == [item.default for item in theirs.values()]


def test_an_unknown_keyword_is_refused():
    with pytest.raises(TypeError, match="fraction_trian"):
        FedBuff(fraction_trian=0.5)


@pytest.mark.parametrize("clock", [{}, virtual(3)])
def test_should_stop_ends_a_run_after_a_version(clock):
    asked = []
    strategy = FedBuff(buffer_size=2, listeners=[], **clock)

    def should_stop(server_round, result):
        asked.append((server_round, sorted(result.evaluate_metrics_serverapp)))
        return True if server_round == 3 else None  # as a function that just ends does

    result = run(
        strategy,
        ScriptedGrid(3),
        num_versions=10,
        evaluate_fn=lambda version, arrays: MetricRecord({"loss": 1.0 / (1 + version)}),
        should_stop=should_stop,
    )
    # As in Flower, what is known of a version when it is asked for includes its evaluation.
    assert asked == [(version, list(range(version + 1))) for version in (1, 2, 3)]
    assert strategy.state.version == 3
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert result.arrays is strategy.state.arrays


def test_should_stop_may_raise():
    def should_stop(server_round, result):
        raise KeyError("accuracy")

    with pytest.raises(KeyError):
        run(FedBuff(buffer_size=1), ScriptedGrid(2), should_stop=should_stop)


@pytest.mark.parametrize(("fraction", "least", "busy"), [(0.5, 1, 4), (0.25, 5, 5), (1.0, 2, 8)])
def test_share_and_least_number_of_busy_nodes(fraction, least, busy):
    grid = ScriptedGrid(8)
    strategy = FedBuff(
        buffer_size=2, fraction_train=fraction, min_train_nodes=least, min_available_nodes=8
    )
    run(strategy, grid, num_versions=6)
    assert grid.most_outstanding == busy


def test_the_run_waits_for_the_nodes_it_needs():
    grid = ScriptedGrid(4)
    late, grid.nodes = grid.nodes, grid.nodes[:1]
    seen = []

    def get_node_ids():
        if grid.time.now > 5.0:
            grid.nodes = late
        seen.append((grid.time.now, len(grid.nodes), len(grid.sent)))
        return list(grid.nodes)

    grid.get_node_ids = get_node_ids
    run(FedBuff(buffer_size=2, min_available_nodes=4), grid, num_versions=2)
    assert any(count == 1 for _, count, _ in seen)
    assert all(sent == 0 for _, count, sent in seen if count == 1)


@pytest.mark.parametrize(("fraction", "least", "asked"), [(0.5, 1, 2), (0.25, 3, 3), (1.0, 1, 4)])
def test_share_and_least_number_of_nodes_that_evaluate(fraction, least, asked):
    grid = ScriptedGrid(4, lambda m: update() if in_train(m) else accuracy_of(m, grid))
    strategy = FedBuff(
        buffer_size=1,
        fraction_evaluate=fraction,
        min_evaluate_nodes=least,
        evaluation=Evaluation(every=100),
        **virtual(4),
    )
    run(strategy, grid, num_versions=1)
    evaluations = [m for m in grid.sent if m.metadata.message_type == MessageType.EVALUATE]
    versions = {message.content["config"]["server-round"] for message in evaluations}
    assert len(evaluations) == asked * len(versions)


def test_replies_are_weighted_by_the_key_that_is_named_also_by_fractions():
    """Models move by 1 and 5 with weights ½ and 1½: (½·1 + 1½·5) / 2 = 4."""

    def behaviour(message):
        first = grid.partition(message) == 0
        metrics = {"share": 0.5 if first else 1.5, "train-loss": 1.0 if first else 5.0}
        arrays = ArrayRecord({"w": Array(np.full(2, 1.0 if first else 5.0, np.float32))})
        return RecordDict({"arrays": arrays, "metrics": MetricRecord(metrics)})

    grid = ScriptedGrid(2, behaviour)
    strategy = FedAvg(fraction_train=1.0, weighted_by_key="share", **virtual(2))
    result = run(strategy, grid, num_versions=1)
    assert result.arrays["w"].numpy() == pytest.approx([4.0, 4.0])
    assert result.train_metrics_clientapp[1]["train-loss"] == pytest.approx(4.0)


def test_records_have_the_names_that_were_chosen():
    def behaviour(message):
        assert isinstance(message.content["model"], ArrayRecord)
        assert isinstance(message.content["settings"], ConfigRecord)
        if not in_train(message):
            return accuracy_of(message, grid)
        content = update()
        content["model"] = content.pop("arrays")
        return content

    grid = ScriptedGrid(2, behaviour)
    strategy = FedBuff(
        buffer_size=1,
        fraction_evaluate=1.0,
        arrayrecord_key="model",
        configrecord_key="settings",
        **virtual(2),
    )
    result = run(strategy, grid, num_versions=2, config={"lr": 0.5})
    assert strategy.state.rejected == 0
    assert result.arrays["w"].numpy() == pytest.approx([2.0, 2.0])
    assert result.evaluate_metrics_clientapp[2]["accuracy"] == pytest.approx(0.125)


def test_own_functions_combine_the_metrics():
    calls = []

    def combine(records, key):
        calls.append((len(records), key))
        (metrics,) = records[0].metric_records.values()
        return MetricRecord({"seen": len(records), **({"all": 1} if "accuracy" in metrics else {})})

    grid = ScriptedGrid(4, lambda m: update() if in_train(m) else accuracy_of(m, grid))
    strategy = FedBuff(
        buffer_size=3,
        fraction_evaluate=1.0,
        train_metrics_aggr_fn=combine,
        evaluate_metrics_aggr_fn=combine,
        **virtual(4),
    )
    result = run(strategy, grid, num_versions=2)
    assert dict(result.train_metrics_clientapp[1]) == {"seen": 3}
    assert dict(result.evaluate_metrics_clientapp[2]) == {"seen": 4, "all": 1}
    assert {key for _, key in calls} == {"num-examples"}
