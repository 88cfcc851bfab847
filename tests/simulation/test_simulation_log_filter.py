"""What a reader of a run's log gets to see."""

import pytest

from simulation.engines.flower.log_filter import readable

NOISE = """\
Using SuperLink: launch-a07554b4 (127.0.0.1:27587)
\x1b[92mINFO \x1b[0m:      Starting logstream for run_id `5809837680924382860`
\x1b[92mINFO \x1b[0m:      Starting Flower Simulation
\x1b[92mINFO \x1b[0m:      Start `flwr-serverapp` process
\x1b[93mWARNING \x1b[0m:   Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.
\x1b[92mINFO \x1b[0m:      Federation `@none/default` (4 simulated SuperNodes)
\x1b[92mINFO \x1b[0m:      To change federation size, use the following command:
\x1b[92mINFO \x1b[0m:      \tflwr federation simulation-config @none/default <s> --num-nodes <N>
Successfully installed tinyapp to /tmp/fedpsa-x/flwr/apps/tests.tinyapp.0.1.0.d9184df3.
/lib/ray/_private/worker.py:2051: FutureWarning: Tip: In future versions of Ray, Ray will no longer
  warnings.warn(
\x1b[36m(ClientAppActor pid=1)\x1b[0m \x1b[93mWARNING \x1b[0m:   Manually terminating ClientAppActor
\x1b[92mINFO \x1b[0m:      """.splitlines()

WORTH_SEEING = """\
\x1b[91mERROR \x1b[0m:     Simulation raised an exception
Traceback (most recent call last):
ValueError: Starting Flower Simulation
\x1b[93mWARNING \x1b[0m:   3 of 50 clients failed
\x1b[92mINFO \x1b[0m:      version 10: accuracy 0.93
\x1b[36m(ClientAppActor pid=1)\x1b[0m \x1b[91mERROR \x1b[0m:   out of memory
ERROR :     Exit Code: 700
WARNING: Federation of 3 clients""".splitlines()


@pytest.mark.parametrize("line", NOISE)
def test_what_every_run_says_is_left_out(line):
    assert readable(line, colours=True) is None


@pytest.mark.parametrize("line", WORTH_SEEING)
def test_all_else_is_shown(line):
    assert readable(line, colours=True) == line
    shown = readable(line, colours=False)
    assert shown is not None
    assert "\x1b" not in shown
