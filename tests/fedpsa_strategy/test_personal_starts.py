"""What a client starts from is the rule's decision, and stays what it was sent."""

from dataclasses import dataclass

import numpy as np
import pytest

from fedpsa_strategy.methods.base import Buffered, BufferedRule
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore, load
from fedpsa_strategy.server.strategies import strategy_of
from support.grids import Ending, Stopped, model_arrays, update
from support.runs import Recorder, run, virtual


class ShiftedRule(BufferedRule):
    """Sends each client x - 0.5 h_i, where h_i is the sum of its updates."""

    def start(self, model):
        super().start(model)
        self.memory = {}
        self.starts = []

    def start_for(self, client):
        if client not in self.memory:
            return self.model
        return self.model - np.float32(0.5) * self.memory[client]

    def add(self, update):
        self.memory[update.client] = self.memory.get(update.client, 0) + update.delta
        self.starts.append(update.start)
        return super().add(update)

    def aggregate(self, updates):
        return self.model + sum(update.delta for update in updates) / np.float32(len(updates))


@dataclass(frozen=True)
class Shifted(Buffered):
    """Personal starts."""

    rule = ShiftedRule


def go(*, store=None, resume=None, pulls=None, num_versions=6, whole_models=False):
    """Clients send their start back, as whole models: the server has to know what it sent."""
    sent = {}

    def behaviour(message):
        start = message.content["arrays"]["w"].numpy()
        config = message.content["config"]
        sent[config["seed"]] = start
        step = np.random.default_rng(config["seed"]).normal(size=2).astype(np.float32)
        if not whole_models:
            return update(step - np.float32(0.1) * start)
        content = update(start + step)
        del content["fedpsa"]
        return content

    grid = Ending(5, behaviour, pulls=pulls)
    recorder = Recorder()
    strategy = strategy_of(Shifted)(
        buffer_size=2,
        max_in_flight=3,
        listeners=[recorder],
        checkpointer=Checkpointer(store, resume_from=resume),
        **virtual(5),
    )
    arrays = model_arrays([1.0, 2.0])
    try:
        result = run(strategy, grid, num_versions=num_versions, arrays=arrays)
    except Stopped:
        return strategy, recorder, sent, None
    return strategy, recorder, sent, result.arrays["w"].numpy().tobytes()


@pytest.mark.parametrize("whole_models", [False, True])
def test_a_run_with_personal_starts_is_resumed_to_the_same_bits(tmp_path, whole_models):
    _, _, _, expected = go(whole_models=whole_models)
    personal = 0
    for pulls in range(3, 15):
        store = CheckpointStore(tmp_path / str(pulls))
        go(store=store, pulls=pulls, whole_models=whole_models)
        (path,) = store.paths()
        saved = load(path)
        personal += len(saved["models"]) > 1
        *_, model = go(resume=saved, whole_models=whole_models)
        assert model == expected
    assert personal > 5


def test_the_start_is_what_was_sent_though_the_memory_has_changed_since():
    strategy, _, sent, _ = go(num_versions=8)
    starts = [start.tobytes() for start in strategy.rule.starts]
    assert set(starts) <= {start.tobytes() for start in sent.values()}
    assert len(set(starts)) > 8  # versions: most of them are somebody's own


def test_personal_starts_are_kept_only_while_in_flight(tmp_path):
    store = CheckpointStore(tmp_path)
    strategy, *_ = go(store=store, pulls=14)
    saved = store.load_newest()
    assert len(saved["tasks"]) <= 3
    assert len(saved["models"]) <= 1 + len(saved["tasks"])
    assert len({id(task.start) for task in strategy.state.in_flight.values()}) <= 3


def test_shared_starts_are_stored_once(tmp_path):
    strategy, *_ = go(store=CheckpointStore(tmp_path), pulls=1)
    tasks = strategy.state.in_flight.values()
    assert len(tasks) == 3
    assert {id(task.start) for task in tasks} == {id(strategy.state.model)}
    assert len(CheckpointStore(tmp_path).load_newest()["models"]) == 1
