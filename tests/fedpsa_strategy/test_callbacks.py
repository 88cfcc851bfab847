"""What a user's callback is told of a run, through the door that built-in ones use too."""

import pytest
from flwr.app import MessageType, MetricRecord

from fedpsa_strategy import Callback, FedAvg, FedBuff
from fedpsa_strategy.server.callbacks.stop import STOP_REQUESTED
from fedpsa_strategy.server.checkpoint import Checkpointer, CheckpointStore
from fedpsa_strategy.server.options import Evaluation, Limits
from support.grids import DecodingGrid, ScriptedGrid, Unreadable, update
from support.runs import Killed, Recorder, counting_evaluation, recorded, run, virtual


class Diary(Callback):
    """Writes down what it is told, and where the run stands then."""

    def __init__(self):
        self.notes = []

    def note(self, *what):
        self.notes.append(what)

    def of(self, name):
        return [note[1:] for note in self.notes if note[0] == name]

    def started(self):
        self.note("started", self.run.version, len(self.run.clients))

    def published(self):
        result = self.run.result
        known = [result.train_metrics_clientapp, result.evaluate_metrics_serverapp]
        self.note("published", self.run.version, [max(history) for history in known])

    def until(self, moment):
        self.note("until", self.run.clock.now, moment)
        return True

    def stepped(self):
        self.note("stepped", self.run.whole, self.run.uploads)

    def interrupted(self):
        self.note("interrupted", self.run.version)

    def ended(self, reason):
        self.note("ended", reason, max(self.run.result.evaluate_metrics_serverapp))


def go(diary, *, more=(), behaviour=lambda message: update(), num_versions=4, **kwargs):
    strategy = FedBuff(buffer_size=2, callbacks=[diary, *more], **virtual(4), **kwargs)
    evaluate, _ = counting_evaluation()
    grid = ScriptedGrid(4, behaviour, delay=1.0)
    return recorded(strategy, grid, num_versions=num_versions, evaluate_fn=evaluate)


def test_a_callback_is_told_of_every_part_of_a_run():
    diary = Diary()
    recorder = go(diary)
    assert diary.notes[0] == ("started", 0, 4)
    # Of a version when its metrics and its evaluation are known.
    assert diary.of("published") == [(v, [v, v]) for v in range(1, 5)]
    assert all(now <= moment for now, moment in diary.of("until"))
    moments = {moment for _, moment in diary.of("until")}
    assert moments >= {event.time for event in recorder.of("upload")}
    assert all(whole for whole, _ in diary.of("stepped"))
    assert {uploads for _, uploads in diary.of("stepped")} >= set(range(1, 9))
    assert diary.notes[-1] == ("ended", "4 versions are made", 4)
    assert not diary.of("interrupted")


def test_a_callback_is_told_that_a_run_ends_before_its_time():
    wished = Diary()
    go(wished, limits=Limits(stop_fn=lambda: bool(wished.of("published"))))
    assert wished.notes[-2] == ("interrupted", 1)
    assert wished.notes[-1][:2] == ("ended", STOP_REQUESTED)

    killed, answered = Diary(), []

    def behaviour(message):
        answered.append(message)
        if len(answered) > 4:
            raise Killed
        return update()

    with pytest.raises(Killed):
        go(killed, behaviour=behaviour)
    assert killed.notes[-1][0] == "interrupted"
    assert not killed.of("ended")


def test_a_run_is_saved_though_a_callback_fails_when_it_is_interrupted(tmp_path):
    class Failing(Callback):
        def interrupted(self):
            raise RuntimeError("nothing to save to")

    store, wish = CheckpointStore(tmp_path), Diary()
    with pytest.raises(RuntimeError, match="nothing to save to"):
        go(
            Failing(),
            more=[wish],
            limits=Limits(stop_fn=lambda: bool(wish.of("published"))),
            checkpointer=Checkpointer(store),
        )
    assert store.load_newest()["version"] == 1


def test_a_callback_can_end_a_run_before_a_moment():
    class Curfew(Callback):
        """No reply takes effect after this time."""

        over = False

        def until(self, moment):
            self.over = moment > 300.0
            return not self.over

        def ends(self):
            return "it is late" if self.over else None

    recorder = go(Curfew(), num_versions=1000)
    (end,) = recorder.of("end")
    assert end.reason == "it is late"
    assert 0 < max(event.time for event in recorder.of("upload")) <= 300.0


def test_a_callback_may_move_the_clock_to_times_before_the_next_reply():
    class Bells(Callback):
        """Rings every ten units."""

        rung = ()

        def until(self, moment):
            while (time := 10.0 * (len(self.rung) + 1)) < moment:
                self.run.clock.advance(time)
                self.rung += (self.run.clock.now,)
            return True

    bells = Bells()
    recorder = go(bells, num_versions=10)
    (end,) = recorder.of("end")
    assert len(bells.rung) > 3
    assert bells.rung == tuple(10.0 * (i + 1) for i in range(len(bells.rung)))
    assert end.time - 10.0 <= bells.rung[-1] < end.time


def test_a_checkpoint_from_before_evaluation_was_a_callback_goes_on_as_a_new_one(tmp_path):
    def resumed(saved):
        strategy = FedBuff(
            buffer_size=1,
            max_in_flight=2,
            evaluation=Evaluation(interval=70.0),
            checkpointer=Checkpointer(
                store if saved is None else None, every_versions=3, resume_from=saved
            ),
            **virtual(4),
        )
        recorder = recorded(
            strategy,
            ScriptedGrid(4),
            num_versions=5 if saved is None else 12,
            evaluate_fn=lambda version, arrays: MetricRecord({"loss": 1.0 / (1 + version)}),
        )
        return [(event.time, event.version) for event in recorder.of("evaluate")]

    store = CheckpointStore(tmp_path)
    resumed(None)
    saved, earlier = store.load_newest(), store.load_newest()
    earlier["evaluations"] = earlier["callbacks"].pop("Evaluations")
    del earlier["published"]
    assert earlier["evaluations"]["next_time"] > 70.0
    evaluations = resumed(earlier)
    assert evaluations == resumed(saved)
    assert evaluations[0][0] == earlier["evaluations"]["next_time"]


@pytest.mark.parametrize("place", ["push", "evaluate_fn"])
@pytest.mark.parametrize(
    "evaluation", [Evaluation(), Evaluation(interval=70.0)], ids=["versions", "times"]
)
def test_a_run_that_is_interrupted_at_an_evaluation_goes_on_there(evaluation, place, tmp_path):
    class Ends(ScriptedGrid):
        """Is gone when the messages of this evaluation are sent."""

        def push_messages(self, messages):
            for message in messages:
                asked = message.metadata.message_type == MessageType.EVALUATE
                if asked and (place, message.content["config"]["server-round"]) == last:
                    raise Killed
            return super().push_messages(messages)

    def evaluate(version, arrays):
        if (place, version) == last:
            raise Killed
        return MetricRecord({"loss": 1.0 / (1 + version)})

    def go(saved=None):
        strategy = FedBuff(
            buffer_size=1,
            max_in_flight=2,
            fraction_evaluate=1.0,
            evaluation=evaluation,
            callbacks=[diary],
            checkpointer=Checkpointer(store, resume_from=saved),
            listeners=[recorder],
            **virtual(4),
        )
        grid = Ends(4)
        run(strategy, grid, num_versions=8, evaluate_fn=evaluate, should_stop=should_stop)

    def should_stop(version, result):
        asked.append(version)
        return False

    def told():
        evaluations = [event for event in recorder.of("evaluate") if event.where == "server"]
        uploads = [event.sequence for event in recorder.of("upload")]
        return evaluations, uploads, [version for version, _ in diary.of("published")], asked

    store, last = CheckpointStore(tmp_path), None
    diary, recorder, asked = Diary(), Recorder(), []
    go()
    whole = told()
    assert whole[2:] == ([*range(1, 9)],) * 2

    last = (place, next(event.version for event in whole[0] if event.version > 2))
    diary, recorder, asked = Diary(), Recorder(), []
    with pytest.raises(Killed):
        go()
    version, last = last[1], None
    go(store.load_newest())
    assert told() == whole
    assert version in {e.version for e in recorder.of("evaluate") if e.where == "clients"}


def test_a_version_that_is_made_while_sending_is_published_too():
    """A round ends when what remains of it can neither be read nor be sent again."""

    class Full(DecodingGrid):
        """Takes no message in the third second, and gives it no id."""

        def push_messages(self, messages):
            return [] if 2 <= self.time.now < 3 else super().push_messages(messages)

    grid = Full(3, lambda message: update() if grid.time.now < 2 else Unreadable())
    first, *_ = sorted(grid.nodes)
    grid.delay = lambda m: 0.01 if m.metadata.dst_node_id == first or grid.time.now > 0.5 else 2.0
    diary, recorder = Diary(), Recorder()
    evaluate, calls = counting_evaluation()
    strategy = FedAvg(fraction_train=1.0, callbacks=[diary], listeners=[recorder])
    run(strategy, grid, num_versions=1, evaluate_fn=evaluate)
    assert [event.reason for event in recorder.of("reject")] == [
        "the message could not be sent"
    ] * 2
    assert diary.of("published") == [(1, [1, 1])]
    assert calls == [0, 1]
    assert diary.notes[-1] == ("ended", "1 versions are made", 1)
