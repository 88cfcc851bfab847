"""Methods of others do what docs/METHODS.md says, also where ours never go."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from fedpsa_strategy import (
    BufferedRule,
    FedAsync,
    FedBuff,
    FedFa,
    FedPSA,
    Method,
    Midpoint,
    NormGuard,
    Rule,
    setting,
)
from fedpsa_strategy.errors import DivergedError
from fedpsa_strategy.methods.base import Buffered, Sketched, SketchedRule, check_declared
from fedpsa_strategy.methods.fedbuff import FedBuffMethod
from fedpsa_strategy.methods.mapped_memory import MappedMemory
from fedpsa_strategy.methods.midpoint import MidpointMethod, MidpointRule
from fedpsa_strategy.methods.remembering import HalfMemory
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore
from fedpsa_strategy.server.strategies import strategy_of
from support.grids import ScriptedGrid, model_arrays, update
from support.runs import in_train, killed_and_resumed, run, virtual


def client(message):
    """An update, and states, that depend on the task's seed alone."""
    rng = np.random.default_rng(message.content["config"]["seed"])
    given = message.content["arrays"]
    states = {
        key: np.asarray(given[key].numpy() * 0.9 + rng.random(given[key].shape), given[key].dtype)
        for key in given
        if key != "w"
    }
    return update(rng.normal(size=2), sketch=rng.normal(size=2), **states)


def options(**more):
    return {"max_in_flight": 3, "trainable": ["w"], "listeners": [], **virtual(5), **more}


def method(rule, *bases, **attributes):
    body = {"rule": rule, "label": "Mine", **attributes}
    return dataclass(frozen=True)(type("Mine", bases or (Buffered,), body))


def arrays():
    mean, scale = np.zeros(3, np.float32), np.asarray(1.0, np.float32)
    return model_arrays((1.0, 2.0), running_mean=mean, scale=scale)


def check_resumed(kind, folder, **more):
    def strategy(**given):
        return kind(**options(**given, **more))

    resumed, whole, _ = killed_and_resumed(
        strategy, lambda: client, folder, arrays=arrays(), num_versions=12
    )
    assert resumed == whole


@pytest.mark.parametrize("kind", [FedBuff, FedFa, FedAsync])
def test_a_state_that_is_a_single_number_survives_a_resume(kind, tmp_path):
    check_resumed(kind, tmp_path)


@dataclass(frozen=True)
class Pair:
    count: int = 0
    scale: float = 1.0


class Hoarder(BufferedRule):
    """Keeps its state in all the ways that the base class promises to restore."""

    def start(self, model):
        super().start(model)
        self.pair = Pair()
        self.last = {}

    def aggregate(self, updates):
        for item in updates:
            self.last.setdefault(item.client, deque(maxlen=2)).append(item.squared_norm)
        self.mean = 0.5 * getattr(self, "mean", np.float64(1)) + np.mean(
            [sum(norms) for norms in self.last.values()]
        )
        self.pair = Pair(self.pair.count + 1, self.pair.scale * 0.9)
        factor = self.pair.scale / (1 + self.mean)
        return (self.model + factor * updates[0].delta).astype(self.model.dtype)


def test_state_of_every_promised_kind_is_restored(tmp_path):
    check_resumed(strategy_of(method(Hoarder)), tmp_path, buffer_size=2)


def test_numbers_come_back_in_their_precision():
    rule = method(Hoarder)().make_rule()
    rule.start(np.zeros(2, np.float32))
    rule.mean, rule.last = np.float64(0.1), {3: deque([1.0], maxlen=2)}
    other = method(Hoarder)().make_rule()
    other.load_state_dict(rule.state_dict())
    assert type(other.mean) is np.float64
    assert other.last[3].maxlen == 2
    assert type(other.pair) is Pair


class Mean(BufferedRule):
    def aggregate(self, updates):
        return self.model + np.mean([item.delta for item in updates], axis=0, dtype=np.float32)


def test_a_buffer_works_in_rounds(tmp_path):
    grid = ScriptedGrid(5, client)
    strategy = strategy_of(method(Mean, rounds=True))(buffer_size=2, **options())
    run(strategy, grid, num_versions=2, arrays=arrays())
    assert strategy.state.uploads == 6  # rounds of three, whatever the size of the buffer


class Memorising(Mean):
    def start(self, model):
        super().start(model)
        self.memory = {}

    def aggregate(self, updates):
        self.memory.update({item.client: item.delta for item in updates})
        return super().aggregate(updates)


def test_a_memory_in_a_file_is_still_in_one_after_a_resume(tmp_path):
    made, kind = [], strategy_of(method(Memorising, remembers_clients=True))

    def noted(**given):
        made.append(kind(memory_path=tmp_path / "memory", **given))
        return made[-1]

    check_resumed(noted, tmp_path / "checkpoints")
    assert all(isinstance(strategy.rule.memory, MappedMemory) for strategy in made)


class SketchingMidpoint(MidpointRule, SketchedRule):
    pass


@pytest.mark.parametrize("memory", ["ram", "half", "file"])
def test_a_method_with_sketches_remembers_clients_where_it_is_told_to(tmp_path, memory):
    made = []
    both = method(SketchingMidpoint, Sketched, MidpointMethod)(buffer_size=2, memory=memory)
    path = tmp_path / "memory" if memory == "file" else None

    def noted(**given):
        made.append(FedPSA(method=both, sketch_fn=sketch, memory_path=path, **given))
        return made[-1]

    check_resumed(noted, tmp_path / "checkpoints")
    kind = {"ram": dict, "half": HalfMemory, "file": MappedMemory}[memory]
    assert all(isinstance(strategy.rule.memory, kind) for strategy in made)


def test_a_memory_without_a_place_or_a_number_of_clients_is_refused():
    both = method(SketchingMidpoint, Sketched, MidpointMethod)
    with pytest.raises(ValueError, match="memory_path"):
        Midpoint(memory="file", num_clients=5)
    with pytest.raises(ValueError, match="memory_path"):
        FedPSA(method=both(memory="file"), sketch_fn=sketch, num_clients=5)
    for method_of_both in (both(memory="half"), FedBuffMethod()):
        with pytest.raises(ValueError, match="keeps nothing in a file"):
            strategy_of(type(method_of_both))(
                method=method_of_both, memory_path="m", num_clients=5, sketch=sketch
            )
    with pytest.raises(ValueError, match="num_clients"):
        FedPSA(method=both(), sketch_fn=sketch)


class EveryUpload(Rule):
    def add(self, item):
        self.model = self.model + item.delta
        return self.model


class Newest(Mean):
    def aggregate(self, updates):
        self.state_weights = [0.0] * (len(updates) - 1) + [1.0]
        return super().aggregate(updates)


@pytest.mark.parametrize("rule", [EveryUpload, Newest])
def test_states_follow_the_uploads(rule):
    """Uniformly by default, or with the weights that a rule names; the newest in both cases."""
    sent = iter(range(1, 100))
    grid = ScriptedGrid(5, lambda message: update(mean=np.full(2, next(sent), np.float32)))
    bases = (Method,) if rule is EveryUpload else (Buffered,)
    strategy = strategy_of(method(rule, *bases))(**options(max_in_flight=1))
    initial = model_arrays(mean=np.zeros(2, np.float32))
    result = run(strategy, grid, num_versions=2, arrays=initial)
    assert result.arrays["mean"].numpy().tolist() == [strategy.state.uploads] * 2


class Broken(Mean):
    def aggregate(self, updates):
        return self.settings.wrong(super().aggregate(updates))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda self, model: model.astype(np.float64), TypeError, "float64: must be"),
        (lambda self, model: np.stack([model, model]), TypeError, r"shape \(2, 2\)"),
        (lambda self, model: model * np.float32("nan"), DivergedError, "not finite.*'w'"),
    ],
)
def test_a_rule_that_makes_no_model_is_told_so(wrong, error, text):
    strategy = strategy_of(method(Broken, Buffered, wrong=wrong))(**options())
    with pytest.raises(error, match=text):
        run(strategy, ScriptedGrid(5, client), num_versions=2, arrays=arrays())


class Sketching(SketchedRule, Mean):
    pass


def sketch(model):
    return [1.0, 0.5]


def test_a_method_with_sketches_tells_its_clients_its_config():
    own = method(Sketching, Sketched, Buffered, client_config=lambda self: {"mine": 3})
    grid = ScriptedGrid(5, client)
    run(FedPSA(sketch_fn=sketch, method=own(), **options()), grid, arrays=arrays())
    assert all(item.content["config"]["mine"] == 3 for item in grid.sent if in_train(item))


def test_what_cannot_work_is_refused_before_a_run():
    with pytest.raises(TypeError, match=r"Mean must be a subclass of .*SketchedRule"):
        FedPSA(sketch_fn=sketch, method=method(Mean, Sketched, Buffered)())
    with pytest.raises(ValueError, match=r"use FedPSA\(method"):
        strategy_of(method(Sketching, Sketched, Buffered))()

    class Undecorated(Method):
        rule = Mean
        buffer_size: int = setting(3, "uploads per version")

    with pytest.raises(TypeError, match=r"needs @dataclass\(frozen=True\)"):
        check_declared(Undecorated)
    undeclared = method(Mean, Buffered, share=0.5, __annotations__={"share": float})
    with pytest.raises(TypeError, match=r"Mine\.share: declare settings with setting"):
        strategy_of(undeclared)


def test_callbacks_of_one_class_keep_their_own_state(tmp_path):
    store = CheckpointStore(tmp_path)
    guards = [NormGuard(most=0.5, action="clip"), NormGuard(ratio=2)]
    saving = Checkpointer(store, every_versions=1)
    strategy = FedBuff(**options(callbacks=guards, checkpointer=saving))
    run(strategy, ScriptedGrid(5, client), num_versions=2, arrays=arrays())
    saved = store.load_newest()["callbacks"]
    assert saved["NormGuard"] == guards[0].state_dict()
    assert saved["NormGuard 2"] == guards[1].state_dict()
    assert saved["NormGuard"] != saved["NormGuard 2"]


def test_trainable_arrays_that_are_named_twice_count_once():
    strategy = FedBuff(**options(trainable=["w", "w"]))
    run(strategy, ScriptedGrid(5, client), num_versions=1, arrays=arrays())
    assert strategy.state.layout.size == 2
