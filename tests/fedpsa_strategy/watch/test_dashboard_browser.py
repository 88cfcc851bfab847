"""The dashboard in a real browser: a headless Chromium, driven over its DevTools protocol."""

import base64
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from fedpsa_strategy.server.events import Quarantined, Waiting
from fedpsa_strategy.watch.event_log import EventLog
from fedpsa_strategy.watch.run_log import RunLog
from support.events import (
    LAST_NODE,
    aggregated,
    dispatched,
    evaluated,
    joined,
    node,
    rejected,
    started,
    uploaded,
)

ROOT = Path(__file__).parents[3]
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
]
MARKUP = "<img src=x onerror=alert(1)> no reply"

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"
)


class Page:
    """One tab."""

    def __init__(self, socket):
        self.socket = socket
        self.sent = 0
        self.notices = []

    def call(self, method, **parameters):
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": parameters}
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv(timeout=30))
            if answer.get("id") == self.sent:
                assert "error" not in answer, answer
                return answer["result"]
            self.notices.append(answer)

    def evaluate(self, expression):
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, element):
        return self.evaluate(f"document.getElementById('{element}').innerText")

    def label(self, chart):
        return self.evaluate(f"document.getElementById('{chart}').getAttribute('aria-label')")

    def wait(self, expression, seconds=60.0):
        give_up = time.monotonic() + seconds
        while not (value := self.evaluate(f"Boolean({expression})")):
            assert time.monotonic() < give_up, f"never true: {expression}"
            time.sleep(0.1)
        return value

    def open(self, url, width=1280, height=800):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait("location.protocol === 'http:' && document.readyState === 'complete'")

    def press(self, key):
        code = {"Tab": 9, "ArrowLeft": 37, "End": 35}[key]
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
            )

    def screenshot(self):
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    connect = pytest.importorskip("websockets.sync.client").connect
    profile = tmp_path_factory.mktemp("chromium")
    options = [*OPTIONS, f"--user-data-dir={profile}"]
    if os.geteuid() == 0:
        options.append("--no-sandbox")
    with subprocess.Popen(
        [CHROMIUM, *options, "about:blank"], stderr=subprocess.PIPE, text=True
    ) as browser:
        try:
            address = next(line for line in browser.stderr if "DevTools listening on" in line)
            threading.Thread(target=browser.stderr.read, daemon=True).start()  # never blocks it
            port = address.split(":")[-1].split("/")[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                target = next(item for item in json.load(answer) if item["type"] == "page")
            with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Page(socket)
        finally:
            browser.terminate()


@pytest.fixture
def page(tab):
    """Give the tab, and hold that the page raised nothing and asked nobody else for anything."""
    for domain in ("Page", "Runtime", "Log", "Network"):
        tab.call(f"{domain}.enable")
    tab.notices.clear()
    yield tab
    tab.call("Page.navigate", url="about:blank")  # no more questions to a server that ends
    tab.evaluate("1")  # collects what is still under way
    found = [notice for notice in tab.notices if notice.get("method") == "Runtime.exceptionThrown"]
    entries = [n["params"]["entry"] for n in tab.notices if n.get("method") == "Log.entryAdded"]
    assert not found
    assert not [entry for entry in entries if entry["level"] == "error"]
    urls = [
        notice["params"]["request"]["url"]
        for notice in tab.notices
        if notice.get("method") == "Network.requestWillBeSent"
    ]
    assert urls
    own = ("http://127.0.0.1:", "blob:http://127.0.0.1:", "about:")
    assert all(url.startswith(own) for url in urls), urls


@pytest.fixture
def serve():
    """Start the dashboard as a user does; returns its address."""
    servers = []

    def start(*folders):
        arguments = ["-m", "fedpsa_strategy.watch.dashboard", *map(str, folders), "--port", "0"]
        server = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        servers.append(server)
        return next(word for word in server.stdout.readline().split() if word.startswith("http"))

    yield start
    for server in servers:
        server.terminate()
        server.wait(10)
        server.stdout.close()


class Writer:
    """Writes the events of a small run, a version at a time."""

    def __init__(self, path, *, name="fedpsa", task="", append=False):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.toml").write_text(
            f'strategy = "{name}"\ndataset = "digits"\nseed = 3\nclock = "virtual"\n'
            f'virtual-days = 1.0\ntask = "{task}"\n'
        )
        self.log = EventLog(path / "events.jsonl")
        self.uploads = self.version = 0
        if not append:
            for client in range(6):
                self.log(joined(client))
            self.log(started(num_clients=6))

    def write_version(self, accuracy):
        time = 8640.0 * (self.version + 1)
        kappas = [0.25, 0.75]
        for client, kappa in enumerate(kappas):
            task = {"sequence": self.uploads, "version": self.version}
            self.log(dispatched(time - 50, client, num_bytes=1300, **task))
            self.uploads += 1
            report = {"kappa": kappa, "temperature": 1.5}
            self.log(uploaded(time, client, staleness=client, num_bytes=1500, **report, **task))
        self.version += 1
        now = {"version": self.version, "uploads": self.uploads}
        report = {"weights": [0.375, 0.625], "kappas": kappas, "effective_number": 1.88}
        self.log(aggregated(time, **now, **report))
        self.log(evaluated(time, accuracy=accuracy, loss=1 - accuracy, **now))

    def write_trouble(self):
        time = 8640.0 * self.version
        task = {"sequence": self.uploads, "version": self.version}
        self.log(rejected(time, 4, MARKUP, **task))
        self.log(Quarantined(time=time, failures=3, until=time + 600, **node(4)))
        self.log(dispatched(time, 5, num_bytes=0, **task))


def test_the_page_shows_the_numbers_of_the_file(serve, page, tmp_path):
    writer = Writer(tmp_path / "run")
    for accuracy in (0.25, 0.5, 0.875, 0.75):
        writer.write_version(accuracy)
    writer.write_trouble()
    page.open(serve(tmp_path / "run"))
    page.wait("document.getElementById('quality').querySelector('svg')")

    lines = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    kinds = Counter(line["event"] for line in lines)
    accuracies = [line["metrics"]["accuracy"] for line in lines if line["event"] == "evaluate"]
    received = sum(line["num_bytes"] for line in lines if line["event"] == "upload")
    sent = sum(line["num_bytes"] for line in lines if line["event"] == "dispatch")
    tiles = page.text("tiles").split("\n")
    shown = dict(pairwise(tiles))
    assert shown["Test accuracy"] == f"{100 * accuracies[-1]:.1f} %"
    assert f"best {100 * max(accuracies):.1f} %" in tiles
    assert shown["Uploads"] == str(kinds["upload"])
    assert f"in {kinds['aggregate']} versions" in tiles
    assert shown["Rejected"] == str(kinds["reject"])
    assert shown["Received"] == f"{received / 1000:.1f} kB"
    assert shown["Sent"] == f"{sent / 1000:.1f} kB"
    assert shown["Virtual days"] == f"{lines[-1]['time'] / 86_400:.3f}"
    assert shown["Temperature"] == "1.500"
    assert shown["κ"] == "0.500"
    assert shown["Staleness"] == "0.50"
    assert page.label("quality") == "Test accuracy against virtual days: run 75.00 %"
    assert "version 4 has 0.375, 0.625" in page.label("buffers")
    assert "least 0.250 of client 0" in page.label("recent")
    assert "1 busy, 0 overdue, 0 in the buffer, 4 idle, 1 quarantined" in page.label("clients")
    assert "6 clients, 2 kept busy" in page.text("subtitle")

    busy = page.evaluate("document.querySelector('#busy tbody tr').innerText").split("\t")
    assert busy[:2] == ["5", str(LAST_NODE - 5)]
    quarantined = page.evaluate("document.querySelector('#trouble tbody tr').innerText").split("\t")
    assert (quarantined[0], *quarantined[-2:]) == ("4", MARKUP, str(LAST_NODE - 4))  # as text
    assert page.evaluate("document.querySelectorAll('#trouble img').length") == 0


def test_it_follows_a_run_while_it_is_written(serve, page, tmp_path):
    runs = tmp_path / "runs"
    runs.mkdir()
    page.open(serve(runs))
    page.wait("document.getElementById('empty').innerText.includes('No run yet')")
    writer = Writer(runs / "run")
    page.wait("document.getElementById('title').innerText === 'run'")
    page.evaluate("window.loadedOnce = true")
    for percent in (20, 40, 60, 80):  # each is seen before the next is written
        writer.write_version(percent / 100)
        page.wait(f"document.title === '{percent}.0 % · run'")
        assert page.label("quality").endswith(f"run {percent}.00 %")
    assert "live" in page.text("status")
    assert page.text("tiles").split("\n")[1] == "80.0 %"
    assert page.label("quality").endswith("run 80.00 %")

    # Resumed elsewhere and put in place of the old file: everything starts anew.
    again = Writer(tmp_path / "other/run")
    again.write_version(0.125)
    (tmp_path / "other/run/events.jsonl").replace(runs / "run/events.jsonl")
    page.wait("document.title === '12.5 % · run'")
    assert page.label("quality").endswith("run 12.50 %")
    assert page.evaluate("window.loadedOnce")  # all that without a reload


def test_an_incomplete_folder_has_honest_empty_states(serve, page, tmp_path):
    run = tmp_path / "run"
    (run / "engine-logs").mkdir(parents=True)
    page.open(serve(run))
    page.wait("document.getElementById('status').innerText.includes('waiting')")
    assert "Not evaluated yet." in page.text("quality")
    assert "No node has joined yet." in page.text("clients")
    assert "Nothing was rejected" in page.text("trouble")
    assert page.text("tiles").split("\n")[1] == "–"
    with EventLog(run / "events.jsonl") as log:
        log(Waiting(time=0.0, reason="2 of 6 nodes connected"))
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "wait", "ti')
    page.wait("document.getElementById('status').innerText.includes('2 of 6 nodes connected')")
    assert page.text("footer") == ""  # a line that is being written is no damage
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"\nrubbish\n")
    page.wait("document.getElementById('footer').innerText.includes('2 damaged lines')")


def test_a_stopped_run_of_another_app_is_named_and_in_real_time(serve, page, tmp_path):
    with RunLog(tmp_path / "run") as log:
        log(started())
        log(evaluated(90.0, accuracy=0.5))
    page.open(serve(tmp_path / "run"))
    page.wait("document.getElementById('status').innerText.includes('stopped: interrupted')")
    assert "virtual day" not in page.evaluate("document.body.innerText").lower()


def test_runs_are_laid_over_each_other(serve, page, tmp_path):
    for name, accuracy in (("a", 0.5), ("b", 0.625), ("c", 0.75)):
        writer = Writer(tmp_path / "runs" / name, name="fedpsa" if name == "a" else "fedbuff")
        writer.write_version(accuracy / 2)
        writer.write_version(accuracy)
    address = serve(tmp_path / "runs")
    page.open(f"{address}#run=a&run=c&focus=c")
    page.wait("document.querySelectorAll('#quality .line').length === 2")
    assert page.label("quality").endswith("a 50.00 %, c 75.00 %")
    colors = page.evaluate(
        "[...document.querySelectorAll('#quality .line')].map((n) => getComputedStyle(n).stroke)"
    )
    assert len(set(colors)) == 2
    assert page.text("title") == "c"
    page.evaluate("document.getElementById('choose').open = true")
    page.evaluate("document.querySelector('#choices input[data-key=b]').click()")
    page.wait("document.querySelectorAll('#quality .line').length === 3")
    page.evaluate("document.querySelector('#choices input[data-key=a]').click()")
    page.wait("document.querySelectorAll('#quality .line').length === 2")
    assert set(page.label("quality").split(": ")[1].split(", ")) == {"b 62.50 %", "c 75.00 %"}
    page.evaluate("document.querySelector('#chips [data-key=b]').click()")
    page.wait("document.getElementById('title').innerText === 'b'")
    page.evaluate("document.querySelector('#axis input[value=elapsed]').click()")
    page.wait("document.getElementById('quality').ariaLabel.includes('seconds since the start')")
    assert "focus=b" in page.evaluate("location.hash")
    page.open(page.evaluate("location.href"))  # the choice survives a reload
    page.wait("document.getElementById('title').innerText === 'b'")
    assert "seconds since the start" in page.label("quality")


def test_a_task_without_accuracy_shows_its_loss(serve, page, tmp_path):
    writer = Writer(tmp_path / "runs" / "regression", task="my_task")
    for step, loss in enumerate((2.5, 0.125, 0.25)):
        writer.log(evaluated(100.0 * step, version=step, uploads=0, loss=loss))
    Writer(tmp_path / "runs" / "other")
    (tmp_path / "runs" / "begun" / "engine-logs").mkdir(parents=True)
    page.open(f"{serve(tmp_path / 'runs')}#run=regression&focus=regression")
    page.wait("document.querySelector('#quality .line')")
    assert page.label("quality") == "Test loss against virtual days: regression 0.2500"
    assert page.text("tiles").split("\n")[:3] == ["Test loss", "0.25", "best 0.125"]
    assert page.evaluate("document.title") == "loss 0.25 · regression"
    assert "my_task" in page.text("subtitle")
    assert "loss 0.25" in page.text("chips")
    page.evaluate("document.querySelector('#measure input[value=accuracy]').click()")
    page.wait("document.getElementById('quality').innerText.includes('no accuracy')")
    # Settings are compared with those of runs that have some.
    page.evaluate("document.getElementById('choose').open = true")
    for other in ("begun", "other"):
        page.evaluate(f"document.querySelector('#choices input[data-key={other}]').click()")
    page.wait("document.getElementById('settings-title').innerText.endsWith('runs: 1')")


def test_it_works_by_keyboard_on_a_phone_in_both_themes(serve, page, tmp_path):
    writer = Writer(tmp_path / "a-run-with-a-rather-long-name-as-they-are-made-by-default")
    for step in range(10):
        writer.write_version(0.05 * step)
    writer.write_trouble()
    page.open(serve(writer.path), width=390, height=844)
    page.wait("document.getElementById('quality').querySelector('svg')")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    backgrounds = set()
    for _ in range(3):
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.evaluate("document.getElementById('theme').click()")
    assert len(backgrounds) == 2
    for _ in range(20):
        page.press("Tab")
        if page.evaluate("document.activeElement.id") == "quality":
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("End")
    assert "45.00 % at day 1.000" in page.text("tooltip")
    page.press("ArrowLeft")
    assert "40.00 % at day 0.900" in page.text("tooltip")
    page.wait("document.activeElement.id === 'quality'")  # also after the next news
    assert page.screenshot().startswith(b"\x89PNG")


def drag(page, chart, start, end):
    """Drag the pointer over a chart, from one share of its width to another."""
    box = page.evaluate(
        f"(() => {{ const b = document.getElementById('{chart}').getBoundingClientRect();"
        " return [b.left, b.top + b.height / 2, b.width]; })()"
    )
    places = [box[0] + share * box[2] for share in (start, (start + end) / 2, end)]
    for kind, x in zip(("mousePressed", "mouseMoved", "mouseReleased"), places, strict=True):
        page.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=box[1], button="left", buttons=1,
            clickCount=1,
        )  # fmt: skip


def download(page, folder, chart, kind):
    page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    before = set(folder.iterdir())
    buttons = f"document.querySelectorAll('[data-save={chart}]')"
    page.evaluate(f"[...{buttons}].find((item) => item.textContent === '{kind}').click()")
    give_up = time.monotonic() + 20
    while True:
        new = [path for path in set(folder.iterdir()) - before if path.suffix == f".{kind.lower()}"]
        if new:
            return new[0]
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.fixture
def two_runs(tmp_path):
    for name, factor in (("a", 0.04), ("b", 0.08)):
        writer = Writer(tmp_path / "runs" / name)
        for step in range(11):
            writer.write_version(factor * step)
    return tmp_path / "runs"


def test_zoom_and_smoothing_are_in_the_address(serve, page, two_runs):
    page.open(serve(two_runs))
    page.wait("document.querySelectorAll('#quality .line').length === 2")  # both, unasked
    drag(page, "quality", 0.3, 0.6)
    page.wait("location.hash.includes('zoom=') && !document.getElementById('whole').hidden")
    marks = "[...document.querySelectorAll('#quality .axes text')].map((n) => n.textContent)"
    assert float(page.evaluate(marks)[-2]) < 0.9  # the last mark before the axis' name
    page.evaluate(
        "const slider = document.getElementById('smooth'); slider.value = 0.5;"
        " slider.dispatchEvent(new Event('input'))"
    )
    page.wait("document.querySelectorAll('#quality .line.raw').length === 2")
    page.evaluate("document.getElementById('fit').click()")
    page.evaluate("document.querySelector('#measure input[value=loss]').click()")
    page.wait("location.hash.includes('measure=loss')")
    address, shown = page.evaluate("location.href"), page.evaluate(marks)
    page.open(address)
    page.wait("document.querySelectorAll('#quality .line.raw').length === 2")
    assert page.evaluate(marks) == shown
    assert page.evaluate("location.href") == address
    assert page.text("smooth-value") == "0.50"
    assert page.evaluate("document.getElementById('fit').ariaPressed") == "true"
    page.evaluate("document.getElementById('whole').click()")
    page.wait("!location.hash.includes('zoom=')")
    assert page.evaluate(marks)[-2] == "1.0"


def test_a_smoothed_curve_is_the_average_and_tells_the_raw_value(serve, page, two_runs):
    page.open(f"{serve(two_runs)}#run=a&smooth=0.5")
    page.wait("document.querySelector('#quality .line.raw')")
    page.evaluate("document.getElementById('quality').focus()")
    page.press("End")
    values = [0.04 * step for step in range(11)]
    total = mass = 0.0
    for value in values:
        total, mass = 0.5 * total + value, 0.5 * mass + 1
    expected = f"{100 * total / mass:.2f} % at day 1.100 (not smoothed 40.00 %)"
    assert expected in page.text("tooltip")


def test_curves_are_saved_as_csv_and_png(serve, page, two_runs, tmp_path):
    folder = tmp_path / "downloads"
    folder.mkdir()
    page.open(f"{serve(two_runs)}#run=a&run=b&smooth=0.5")
    page.wait("document.querySelectorAll('#quality .line.raw').length === 2")
    path = download(page, folder, "quality", "CSV")
    assert path.name == "test-accuracy.csv"
    with path.open(encoding="utf-8-sig", newline="") as file:
        heads, *rows = csv.reader(file)
    assert heads == ["run", "virtual days", "value", "lowest", "highest", "smoothed"]
    assert [row[0] for row in rows] == ["a"] * 11 + ["b"] * 11
    assert [float(row[2]) for row in rows[:11]] == pytest.approx([0.04 * i for i in range(11)])
    assert float(rows[-1][1]) == pytest.approx(1.1)
    path = download(page, folder, "staleness", "CSV")
    assert path.read_text(encoding="utf-8-sig").splitlines()[1] == "a,0,0,11"

    path = download(page, folder, "quality", "PNG")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    # The curves' colours are in it, and more of the background than of anything else.
    from matplotlib.image import imread

    colours = Counter(map(tuple, (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)))
    theme = "getComputedStyle(document.querySelector('#quality .line:not(.raw)')).stroke"
    first = tuple(int(part) for part in re.findall(r"\d+", page.evaluate(theme))[:3])
    panel = "getComputedStyle(document.querySelector('#quality').closest('.panel')).backgroundColor"
    back = tuple(int(part) for part in re.findall(r"\d+", page.evaluate(panel))[:3])
    assert colours.most_common(1)[0][0] == back
    assert colours[first] > 300


def test_runs_are_sorted_filtered_and_named(serve, page, tmp_path):
    for index in range(9):
        writer = Writer(
            tmp_path / "runs" / f"{index:x}f3a", name="fedbuff" if index % 2 else "ca2fl"
        )
        labels = {"method": f"M{index}", "dataset": "fmnist", "alpha": 0.1, "seed": index}
        (writer.path / "cell.json").write_text(json.dumps({"labels": labels}))
        writer.write_version(0.1 * index)
        summary = {"status": "completed", "accuracy": 0.1 * index}
        (writer.path / "summary.json").write_text(json.dumps(summary))
    page.open(serve(tmp_path / "runs"))
    page.wait("document.querySelectorAll('#quality .line').length === 6")  # as many as fit
    assert "f3a" not in page.text("chips")
    page.evaluate("document.getElementById('choose').open = true")
    names = "[...document.querySelectorAll('#choices .name')].map((n) => n.textContent)"
    page.evaluate(
        "const order = document.getElementById('order'); order.value = 'best';"
        " order.dispatchEvent(new Event('change'))"
    )
    page.wait(f"{names}[0] === 'M8 · fmnist · alpha 0.1 · seed 8'")
    assert [name[:2] for name in page.evaluate(names)] == [f"M{i}" for i in range(8, -1, -1)]
    page.evaluate(
        "const filter = document.getElementById('filter'); filter.value = 'fedbuff completed';"
        " filter.dispatchEvent(new Event('input'))"
    )
    page.wait(f"{names}.length === 4")
    page.evaluate("document.getElementById('show-first').click()")
    page.wait("document.querySelectorAll('#quality .line').length === 4")
    assert "order=best" in page.evaluate("location.hash")
    assert "filter=fedbuff+completed" in page.evaluate("location.hash")
    assert page.label("quality").count("M") == 4


def test_a_finished_run_never_waits_for_more(serve, page, tmp_path):
    for name, full in (("short", True), ("empty", False)):
        with RunLog(tmp_path / name) as log:
            log(started())
            if full:
                log(uploaded(0.5))
    for name in ("short", "empty"):
        page.open(serve(tmp_path / name))
        page.wait("document.getElementById('status').innerText.includes('stopped')")
        text = page.evaluate("document.body.innerText")
        assert "yet" not in text.split(), text
        assert "Not enough" not in text
    assert "No upload was accepted." in page.text("rate")
