"""Metrics as Prometheus gets them, and the Grafana dashboard that shows them."""

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from fedpsa_strategy.server.events import NodeLeft, Overdue, Quarantined
from fedpsa_strategy.watch.prometheus import PrometheusMetrics
from support.events import (
    aggregated,
    dispatched,
    ended,
    evaluated,
    joined,
    node,
    rejected,
    started,
    uploaded,
)

pytest.importorskip("prometheus_client")

DASHBOARD = Path(__file__).parents[3] / "docker" / "grafana" / "fedpsa.json"
ADDRESS = "127.0.0.1:0"


def scrape(metrics):
    """Return name -> labels -> value, as Prometheus would read it."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics") as answer:
        text = answer.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items(), reverse=True))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def run_events(listen):
    task = {"version": 7, "sequence": 0}
    for event in (
        *map(joined, range(3)),
        started(version=7),
        *(dispatched(1.0, client, num_bytes=1000, **task) for client in range(3)),
        uploaded(
            2.0,
            staleness=3,
            num_bytes=400,
            metrics={"train-seconds": 2.5, "sensitivity-seconds": 0.02},
            kappa=0.8,
            temperature=1.5,
            **task,
        ),
        rejected(3.0, 1, "the update's norm 12.5 is above 10", **task),
        Overdue(time=3.0, waited=99.0, limit=9.0, **task, **node(2)),
        Quarantined(time=3.0, failures=3, until=603.0, **node(1)),
        aggregated(3.0, 8, 1, effective_number=4.5),
        evaluated(3.0, version=8, accuracy=0.75, loss=0.5),
        NodeLeft(time=4.0, **node(2)),
    ):
        listen(event)


def test_a_scrape_says_how_the_run_stands():
    names = {"run": "mine", "strategy": "fedpsa", "data": "digits"}
    with PrometheusMetrics(ADDRESS, wall=lambda: 1000.0, **names) as metrics:
        assert math.isnan(scrape(metrics)["fedpsa_temperature"][""])
        run_events(metrics)
        found = scrape(metrics)
        assert found["fedpsa_run_info"] == {"fedpsa,mine,digits": 1.0}
        assert found["fedpsa_uploads_total"] == {"": 1.0}
        assert found["fedpsa_rejected_total"] == {"the update's norm N is above N": 1.0}
        assert found["fedpsa_overdue_total"] == {"": 1.0}
        assert found["fedpsa_quarantines_total"] == {"": 1.0}
        assert found["fedpsa_received_bytes_total"] == {"": 400.0}
        assert found["fedpsa_sent_bytes_total"] == {"": 3000.0}
        assert found["fedpsa_version"] == {"": 8.0}
        assert found["fedpsa_running"] == {"": 1.0}
        assert found["fedpsa_last_upload_timestamp_seconds"] == {"": 1000.0}
        assert found["fedpsa_nodes"] == {"": 2.0}
        assert found["fedpsa_busy_nodes"] == {"": 0.0}
        assert found["fedpsa_staleness_sum"] == {"": 3.0}
        assert found["fedpsa_staleness_bucket"]["4.0"] == 1.0
        assert found["fedpsa_staleness_bucket"]["2.0"] == 0.0
        assert found["fedpsa_kappa_mean"] == {"": 0.8}
        assert found["fedpsa_temperature"] == {"": 1.5}
        assert found["fedpsa_effective_number"] == {"": 4.5}
        assert found["fedpsa_client_seconds_sum"] == {"train": 2.5, "sensitivity": 0.02}
        assert found["fedpsa_evaluation"] == {"server,accuracy": 0.75, "server,loss": 0.5}
        metrics(ended(5.0, version=8, uploads=1, rejected=1))
        assert scrape(metrics)["fedpsa_running"] == {"": 0.0}


def test_reasons_from_clients_cannot_fill_the_server():
    with PrometheusMetrics(ADDRESS) as metrics:
        for index in range(200):
            reason = (
                f'client error: {"ab"[index % 2]}{chr(0x4E00 + index)} "\n\\ {index} ' + "x" * 900
            )
            metrics(rejected(reason=reason))
        found = scrape(metrics)["fedpsa_rejected_total"]
    assert len(found) == 31
    assert found["other reasons"] == 170.0
    assert max(map(len, found)) <= 120


def test_an_address_in_use_is_named_before_the_run():
    with PrometheusMetrics(ADDRESS) as metrics:
        address = f"127.0.0.1:{metrics.port}"
        with pytest.raises(ConnectionError, match=re.escape(f"prometheus = '{address}'")):
            PrometheusMetrics(address)
    with PrometheusMetrics(address) as again:  # it is free afterwards
        assert again.port == int(address.rpartition(":")[2])
    with pytest.raises(ConnectionError, match=r"prometheus = '127\.0\.0\.1:99999'"):
        PrometheusMetrics("127.0.0.1:99999")


# --- Grafana --------------------------------------------------------------------------------------


def queries():
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_what_is_exported_and_shows_all_of_it():
    with PrometheusMetrics(ADDRESS, run="a", strategy="b", data="c") as metrics:
        run_events(metrics)
        exported = {name for name in scrape(metrics) if name.startswith("fedpsa_")}
    asked = {name for query in queries() for name in re.findall(r"\bfedpsa_\w+", query)}
    assert asked <= exported
    # A histogram is shown by some of its series; `_created` stands beside every counter.
    families = {re.sub(r"_(bucket|sum|count)$", "", n) for n in exported if "_created" not in n}
    assert families == {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}


def test_panels_do_not_lie_over_each_other():
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    fields = [
        (x, y)
        for p in places
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(fields) == len(set(fields))
    assert max(x for x, _ in fields) < 24


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Prometheus")
def test_a_real_prometheus_answers_every_query(tmp_path):
    with PrometheusMetrics(ADDRESS, run="a", strategy="b", data="c") as metrics:
        run_events(metrics)
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 200ms}\nscrape_configs: [{job_name: fedpsa, "
            f"static_configs: [{{targets: ['127.0.0.1:{metrics.port}']}}]}}]\n"
        )
        with PrometheusMetrics(ADDRESS) as other:
            port = other.port  # free a moment later
        server = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             f"--web.listen-address=127.0.0.1:{port}"],
            cwd=tmp_path, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            give_up = time.monotonic() + 30
            while not ask(port, "rate(fedpsa_uploads_total[5s])"):
                assert time.monotonic() < give_up
                run_events(metrics)
                time.sleep(0.2)
            for query in queries():
                query = query.replace("$instance", ".*").replace("$__rate_interval", "5s")
                assert ask(port, query), query
        finally:
            server.terminate()
            server.wait(10)


def ask(port, query):
    address = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    try:
        with urllib.request.urlopen(address) as answer:
            return json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{query}: {error.read().decode()}") from None
    except OSError:
        return []
