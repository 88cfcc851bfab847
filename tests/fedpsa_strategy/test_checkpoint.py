"""Checkpoints are whole or refused, and an interrupted run ends as if it had never been."""

import errno

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpsa_strategy import (
    CA2FL,
    FedAsync,
    FedAvg,
    FedBuff,
    FedFa,
    FedPAC,
    FedPSA,
    Midpoint,
    UniformLatency,
)
from fedpsa_strategy.server.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointStore,
    load,
    pack,
    unpack,
)
from fedpsa_strategy.server.options import Evaluation, Limits
from fedpsa_strategy.server.snapshot import ResumeError
from support.grids import ScriptedGrid, Stopped, model_arrays, statistics, update
from support.runs import Killed, Recorder, counting_evaluation, run, virtual

METHODS = {
    "fedpsa": lambda **kw: FedPSA(
        sketch_fn=lambda arrays: np.add(arrays["w"].numpy(), 0.5), queue_size=6, buffer_size=3, **kw
    ),
    "fedbuff": lambda **kw: FedBuff(buffer_size=3, **kw),
    "fedasync": FedAsync,
    "fedfa": lambda **kw: FedFa(buffer_size=3, **kw),
    "ca2fl": lambda **kw: CA2FL(buffer_size=3, **kw),
    "midpoint": lambda **kw: Midpoint(buffer_size=3, momentum=0.5, memory="half", **kw),
    "fedavg": FedAvg,
    "fedpac": lambda **kw: FedPAC(head_keys=["head"], num_classes=2, num_features=1, **kw),
}


class Store(CheckpointStore):
    """A store that a process which was killed cannot write to any more."""

    alive = True

    def kill(self):
        self.alive = False
        raise Killed

    def save(self, number, state):
        if not self.alive:
            raise Killed
        return super().save(number, state)


def client(message):
    """A deterministic function of the message, as every real client is; integers included."""
    rng = np.random.default_rng(message.content["config"]["seed"])
    start = message.content["arrays"]["w"].numpy()
    content = update(
        rng.normal(size=2) - 0.1 * start,
        sketch=rng.normal(size=2),
        head=rng.normal(size=1).astype(np.float32),
        count=message.content["arrays"]["count"].numpy() + 1,
    )
    if "fedpac" in message.content:
        content["fedpac"] = statistics(rng)
    return content


def go(
    method,
    *,
    store=None,
    resume=None,
    die_after=None,
    stop_at_call=None,
    num_versions=7,
    every=1,
    seed=3,
):
    answered = [0]

    def behaviour(message):
        answered[0] += 1
        if die_after is not None and answered[0] > die_after:
            store.kill()
        return client(message)

    recorder = Recorder()
    evaluate, _ = counting_evaluation()
    grid = ScriptedGrid(6, behaviour) if stop_at_call is None else Closing(stop_at_call)
    grid.nodes = [seed * 100 + node for node in grid.nodes]  # other ids in every process
    strategy = METHODS[method](
        max_in_flight=3,
        seed=5,
        evaluation=Evaluation(every=2),
        listeners=[recorder],
        checkpointer=Checkpointer(store, every_versions=every, resume_from=resume),
        **virtual(6, UniformLatency(seed=2)),
    )
    arrays = model_arrays([1.0, 2.0], head=np.ones(1, np.float32), count=np.asarray(0))
    strategy.trainable = ["w", "head"]
    result = run(strategy, grid, num_versions=num_versions, arrays=arrays, evaluate_fn=evaluate)
    return result, recorder


class Closing(ScriptedGrid):
    """A grid of which every call fails from the n-th on that has to do with train messages."""

    def __init__(self, calls):
        super().__init__(6, client)
        self.calls = calls

    def _count(self, train):
        self.calls -= train
        if self.calls < 0:
            raise Stopped

    def push_messages(self, messages):
        accepted = super().push_messages(messages)  # they arrived, but nobody is told
        self._count(messages[0].metadata.message_type == "train")
        return accepted

    def pull_messages(self, message_ids):
        self._count(self.outstanding_train > 0)
        return super().pull_messages(message_ids)


def assert_ends_as(again, whole):
    """The same model, and metrics that are the last of the whole run's, without a gap."""
    model, *histories = values(again)
    expected, *all_histories = values(whole)
    assert model == expected
    for history, everything in zip(histories, all_histories, strict=True):
        assert history
        assert list(history.items()) == list(everything.items())[-len(history) :]


def values(result):
    history = {v: dict(m) for v, m in result.evaluate_metrics_serverapp.items()}
    train = {v: dict(m) for v, m in result.train_metrics_clientapp.items()}
    return {key: array.data for key, array in result.arrays.items()}, history, train


def test_an_array_that_stands_in_several_places_is_saved_once():
    model = np.arange(1000.0)
    state = {"rule": {"model": model}, "models": [{"vector": model}], "other": model.copy()}
    data = pack(state)
    assert len(data) < 2.3 * model.nbytes
    found = unpack(data)
    assert found["rule"]["model"] is found["models"][0]["vector"]
    assert found["other"] is not found["rule"]["model"]
    np.testing.assert_array_equal(found["other"], model)


@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_anywhere_and_resumed_ends_in_the_same_model(method, tmp_path):
    whole, recorder = go(method)
    num_uploads = len(recorder.of("upload"))
    resumed = 0
    for die_after in range(1, num_uploads, 2):
        store = Store(tmp_path / str(die_after))
        with pytest.raises(Killed):
            go(method, store=store, die_after=die_after)
        if not store.paths():
            continue  # killed before the first version
        again, later = go(method, resume=store.load_newest(), seed=4)
        resumed += 1
        assert_ends_as(again, whole)
        sequences = [event.sequence for event in later.of("dispatch")]
        first = {event.sequence: event.client for event in recorder.of("dispatch")}
        assert all(first[event.sequence] == event.client for event in later.of("dispatch"))
        assert len(sequences) == len(set(sequences))
    assert resumed >= 2


def test_a_run_can_be_interrupted_again_and_again(tmp_path):
    whole, _ = go("fedpsa", num_versions=12)
    saved, deaths = None, 0
    for attempt in range(50):
        store = Store(tmp_path)
        try:
            result, _ = go(
                "fedpsa", store=store, resume=saved, die_after=7, num_versions=12, seed=attempt
            )
            break
        except Killed:
            deaths += 1
            saved = store.load_newest()
    assert deaths >= 3
    assert_ends_as(result, whole)


@pytest.mark.parametrize("method", ["fedpsa", "fedavg"])
def test_whatever_the_grid_is_asked_when_it_ends_the_run_nothing_is_lost(method, tmp_path):
    whole, recorder = go(method)

    def without_node(events):
        return [{**event.to_dict(), "node_id": 0} for event in events]

    expected = {kind: without_node(recorder.of(kind)) for kind in ("dispatch", "upload")}
    done = set()
    for calls in range(20):
        store = CheckpointStore(tmp_path / str(calls))
        with pytest.raises(Stopped):
            go(method, store=store, every=0, stop_at_call=calls)
        (path,) = store.paths()
        again, later = go(method, resume=load(path), seed=4)
        assert_ends_as(again, whole)
        done.add(load(path)["uploads"])
        for kind, events in expected.items():
            # What comes after the resume is the rest, to the last event.
            rest = without_node(later.of(kind))
            assert rest == events[len(events) - len(rest) :]
        assert len(later.of("upload")) == len(expected["upload"]) - load(path)["uploads"]
    assert len(done) > 3


def test_checkpoints_do_not_grow_with_the_number_of_versions(tmp_path):
    def size(num_versions):
        store = CheckpointStore(tmp_path / str(num_versions))
        go("fedbuff", store=store, num_versions=num_versions, every=num_versions)
        (path,) = store.paths()
        return path.stat().st_size

    assert size(200) < size(20) + 100  # longer numbers


def test_with_the_wall_clock_only_what_came_after_the_checkpoint_is_lost(tmp_path):
    def attempt(saved, die_after):
        answered = [0]

        def behaviour(message):
            answered[0] += 1
            if die_after and answered[0] > die_after:
                store.kill()
            return update()

        grid = ScriptedGrid(4, behaviour, delay=1.0)
        strategy = FedBuff(
            buffer_size=2,
            max_in_flight=2,
            checkpointer=Checkpointer(store, every_versions=3, resume_from=saved),
        )
        return strategy, lambda: run(strategy, grid, num_versions=20)

    store = Store(tmp_path)
    strategy, start = attempt(None, 17)
    with pytest.raises(Killed):
        start()
    reached = strategy.state.version
    saved = store.load_newest()
    store = CheckpointStore(tmp_path)
    assert reached - 3 < saved["version"] <= reached
    strategy, start = attempt(saved, None)
    result = start()
    assert strategy.state.version == 20
    assert sorted(result.train_metrics_clientapp) == list(range(saved["version"], 21))
    assert strategy.clock.now > saved["time"] > 0


def test_checkpoints_by_time_and_on_request(tmp_path):
    grid = ScriptedGrid(2, delay=1.0)
    saved = []

    class Counting(CheckpointStore):
        def save(self, number, state):
            saved.append(state["version"])
            return super().save(number, state)

    strategy = FedBuff(
        buffer_size=1,
        max_in_flight=1,
        checkpointer=Checkpointer(
            Counting(tmp_path), every_seconds=5.0, monotonic=grid.time.monotonic
        ),
        limits=Limits(stop_fn=lambda: grid.time.now > 12.0),
    )
    run(strategy, grid, num_versions=100)
    assert len(saved) == 3  # about 5 s and 10 s, and at the stop
    assert saved[-1] == strategy.state.version


# --- Files -------------------------------------------------------------------------------------

TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(deadline=None, max_examples=50)
@given(TREES, st.lists(st.floats(width=32), max_size=5))
def test_pack_round_trip(tree, numbers):
    array = np.asarray(numbers, np.float32)
    found = unpack(pack({"tree": tree, "array": array, "nested": [{"x": array.astype(np.int64)}]}))
    assert found["tree"] == tree
    assert found["array"].tobytes() == array.tobytes()
    assert found["nested"][0]["x"].dtype == np.int64


def test_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for number in range(5):
        store.save(number, {"number": number})
    assert [load(path)["number"] for path in store.paths()] == [3, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_killed_process_left_is_removed_and_others_read_nothing(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".checkpoint-000000000001.ckpt.4711").write_bytes(b"half")
    path = CheckpointStore(folder).save(2, {"x": 2})
    assert list(folder.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_future_that_did_not_happen_is_removed(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(9, {"number": 9}).write_bytes(b"damaged")
    store.save(5, {"number": 5})
    assert [load(path)["number"] for path in store.paths()] == [5]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda data: data[:-1], "checksum"),
        (lambda data: data[:120], "checksum"),
        (lambda data: data[:300] + bytes([data[300] ^ 1]) + data[301:], "checksum"),
        (lambda data: b"", "not a checkpoint"),
        (lambda data: b"PK\x03\x04 something else\n" + data, "not a checkpoint"),
        (lambda data: data.replace(b"checkpoint 3 ", b"checkpoint 9 ", 1), "format 9"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_falls_back_to_the_one_before(tmp_path, damage, text):
    store = CheckpointStore(tmp_path)
    store.save(1, {"number": 1})
    path = store.save(2, {"number": 2, "array": np.arange(100)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=text):
        load(path)
    assert store.load_newest() == {"number": 1}
    store.paths()[0].unlink()
    with pytest.raises(CheckpointError, match=text):
        store.load_newest()


def test_no_checkpoint_is_a_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"no usable checkpoint in .*there is none"):
        CheckpointStore(tmp_path / "nothing").load_newest()


def test_a_full_disk_does_not_stop_the_run_and_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(0, {"number": 0})
    full = [False]

    def fsync(descriptor):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fsync)

    def behaviour(message):
        full[0] = True
        return update()

    grid = ScriptedGrid(2, behaviour)
    strategy = FedBuff(
        buffer_size=1, checkpointer=Checkpointer(store, every_versions=1), **virtual(2)
    )
    run(strategy, grid, num_versions=3)
    assert strategy.state.version == 3
    assert store.load_newest() == {"number": 0}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_checkpoint_of_another_method_or_model_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    go("fedbuff", store=store, num_versions=2)
    saved = store.load_newest()
    with pytest.raises(ResumeError, match=r"FedBuff.*FedAvg"):
        go("fedavg", resume=saved)
    strategy = FedBuff(checkpointer=Checkpointer(resume_from=saved), **virtual(6))
    arrays = ArrayRecord({"w": Array(np.zeros(9, np.float32))})
    with pytest.raises(ResumeError, match="3 values"):
        run(strategy, ScriptedGrid(6, client), arrays=arrays)
