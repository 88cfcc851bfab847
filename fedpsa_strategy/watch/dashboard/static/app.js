// What is shown: asks the server for news once a second and draws what changed.

import {
  Chart, bars, bytes, cells, dots, duration, fixed, html, integer, lines, percent, short, square, stacks, svg, swatch,
} from "./charts.js";

const DAY = 86400;
const MOST_SHOWN = 6;
const DASHES = [null, "7 4", "2 3", "9 3 2 3", "14 4", "4 2"];
const $ = (id) => document.getElementById(id);

const state = {
  listing: null, // what /api/runs said
  shown: [], // names of runs laid over each other
  focus: null, // the one shown in detail
  data: new Map(), // name -> the last snapshot and when it came
  slots: new Map(), // name -> its colour, kept while it is shown
  axis: null,
  measure: null, // accuracy, if nothing else was chosen and the runs have one
  fit: false,
};

const charts = {
  quality: new Chart($("quality"), lines),
  staleness: new Chart($("staleness"), bars),
  temperature: new Chart($("temperature"), lines),
  kappa: new Chart($("kappa"), lines),
  rate: new Chart($("rate"), lines),
  recent: new Chart($("recent"), dots),
  buffers: new Chart($("buffers"), stacks),
  clients: new Chart($("clients"), cells),
};

// --- Which runs ---------------------------------------------------------------------------------

function readHash() {
  const hash = new URLSearchParams(location.hash.slice(1));
  state.shown = hash.getAll("run").slice(0, MOST_SHOWN);
  state.focus = hash.get("focus");
  state.axis = hash.get("axis");
}

function writeHash() {
  const hash = new URLSearchParams(state.shown.map((name) => ["run", name]));
  hash.set("focus", state.focus);
  if (state.axis) hash.set("axis", state.axis);
  history.replaceState(null, "", `#${hash}`);
}

// Keeps the choice valid: runs come and go, and the first visit has not chosen anything.
function settle() {
  const names = state.listing.runs.map((run) => run.name);
  state.shown = state.shown.filter((name) => names.includes(name));
  if (!state.shown.length) {
    const live = state.listing.runs.filter((run) => run.status === "running").map((run) => run.name);
    const few = names.length <= MOST_SHOWN ? names : live.length ? live : names.slice(0, 1);
    state.shown = few.slice(0, MOST_SHOWN);
  }
  if (!state.shown.includes(state.focus)) {
    const live = state.listing.runs.find((run) => run.status === "running" && state.shown.includes(run.name));
    state.focus = live?.name ?? state.shown[0] ?? null;
  }
  for (const name of state.slots.keys()) if (!state.shown.includes(name)) state.slots.delete(name);
  for (const name of state.shown) {
    if (state.slots.has(name)) continue;
    const taken = new Set(state.slots.values());
    state.slots.set(name, [...Array(MOST_SHOWN).keys()].find((slot) => !taken.has(slot)));
  }
}

function toggle(name, on) {
  state.shown = on ? [...state.shown, name] : state.shown.filter((other) => other !== name);
  changed();
}

function changed() {
  settle();
  writeHash();
  poll(true);
  draw();
}

const color = (name) => `var(--run-${state.slots.get(name)})`;
const dash = (name) => DASHES[state.slots.get(name)];
const loaded = () => state.shown.filter((name) => state.data.has(name)).map((name) => ({ name, ...state.data.get(name) }));

// --- News from the server -----------------------------------------------------------------------

let timer = null;
let busy = false;
let listedAt = -Infinity;

async function get(address) {
  const response = await fetch(address, { signal: AbortSignal.timeout(15000) });
  if (response.status === 204) return null;
  if (response.status !== 404 && !response.ok) throw new Error(`the server answered ${response.status}`);
  return response.json();
}

async function poll(soon = false) {
  clearTimeout(timer);
  if (busy) return void (timer = setTimeout(poll, 100, soon));
  busy = true;
  let pause = 1000;
  try {
    if (!document.hidden || soon) {
      if (performance.now() - listedAt > 4000) {
        state.listing = await get("api/runs");
        listedAt = performance.now();
        settle();
      }
      const news = await Promise.all(state.shown.map(fetchRun));
      if (news.includes("more")) pause = 0;
    }
    report(null);
  } catch (error) {
    pause = 3000;
    report(`No connection to the dashboard's server (${error.message}). What is shown may be old; trying again.`);
  }
  busy = false;
  draw();
  timer = setTimeout(poll, pause);
}

async function fetchRun(name) {
  const cursor = state.data.get(name)?.cursor ?? "";
  const run = await get(`api/runs/${encodeURIComponent(name)}?cursor=${encodeURIComponent(cursor)}`);
  if (run === null) return "same";
  if (!run.cursor) return void state.data.delete(name); // the folder is gone
  state.data.set(name, { ...run, received: performance.now() });
  return run.unread > 0 ? "more" : "new";
}

function report(problem) {
  $("alert").hidden = problem === null;
  if (problem !== null && $("alert").textContent !== problem) $("alert").textContent = problem;
}

// --- Drawing ------------------------------------------------------------------------------------

const drawn = new Map();

// Rebuilds an element's children if what they show changed, and keeps the keyboard's place.
function put(id, value, build) {
  const key = JSON.stringify(value);
  if (drawn.get(id) === key) return;
  drawn.set(id, key);
  const node = $(id);
  const held = node.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const children = build();
  node.replaceChildren(...(Array.isArray(children) ? children : [children]));
  if (held) [...node.querySelectorAll("[data-key]")].find((item) => item.dataset.key === held)?.focus();
}

function draw() {
  if (state.listing === null) return;
  drawPicker();
  const runs = loaded();
  const run = runs.find((item) => item.name === state.focus);
  $("empty").hidden = state.listing.runs.length > 0;
  put("empty", state.listing.folders, () => [
    html("h2", {}, "No run yet"),
    html("p", {}, `Runs that start in ${state.listing.folders.join(", ")} appear here by themselves.`),
  ]);
  $("content").hidden = !run;
  if (!run) {
    put("title", null, () => "FedPSA runs");
    put("subtitle", null, () => "");
    put("status", null, () => "");
    return;
  }
  drawHeader(run);
  drawTiles(run);
  drawCurves(runs);
  drawDetail(run);
  drawSettings(runs, run);
}

function drawPicker() {
  const all = state.listing.runs;
  $("picker").hidden = all.length < 2;
  const chips = state.shown.map((name) => {
    const head = all.find((run) => run.name === name) ?? {};
    const totals = state.data.get(name)?.totals;
    const result = resultOf(totals && resultOf(totals) !== "–" ? totals : head);
    return { name, slot: state.slots.get(name), result, pressed: name === state.focus, what: method(head) };
  });
  put("chips", chips, () => chips.map((chip) => html("button", {
    type: "button", class: "chip", "aria-pressed": String(chip.pressed), "data-key": chip.name,
    title: `Show ${chip.name} in detail`, onclick: () => { state.focus = chip.name; changed(); },
  }, swatch(color(chip.name), dash(chip.name)), html("span", { class: "name" }, chip.name),
  html("span", { class: "what" }, chip.what), html("b", {}, chip.result))));
  const wanted = $("filter").value.trim().toLowerCase();
  const rows = all.filter((run) => `${run.name} ${method(run)} ${run.status}`.toLowerCase().includes(wanted));
  const full = state.shown.length >= MOST_SHOWN;
  put("choices", [rows.map((run) => [run.name, run.status, resultOf(run)]), state.shown], () =>
    rows.length ? rows.map((run) => {
      const on = state.shown.includes(run.name);
      return html("label", {}, html("input", {
        type: "checkbox", checked: on, disabled: (!on && full) || (on && state.shown.length === 1), "data-key": run.name,
        onchange: (event) => toggle(run.name, event.target.checked),
      }), html("span", { class: "name" }, run.name), html("span", { class: "what" }, method(run)),
      html("span", { class: "what" }, run.status), html("b", {}, resultOf(run)));
    }) : html("p", { class: "nothing" }, "No run has this in its name, method or data set."));
  put("choose-title", [state.shown.length, all.length], () =>
    `Choose runs: ${state.shown.length} of ${all.length} shown${full ? `, ${MOST_SHOWN} at most` : ""}`);
}

const method = (run) => [run.strategy, run.data, run.seed === null || run.seed === undefined ? null : `seed ${run.seed}`]
  .filter(Boolean).join(" · ");

// Accuracy, or the loss of a task that has none.
function resultOf({ accuracy = null, loss = null }) {
  return accuracy === null && loss !== null ? `loss ${short(loss)}` : percent(accuracy);
}

function drawHeader(run) {
  const clients = run.start ? `${integer(run.start.num_clients)} clients, ${run.start.max_in_flight} kept busy` : null;
  const size = run.start ? `${integer(run.start.num_parameters)} parameters` : null;
  document.title = `${resultOf(run.totals)} · ${run.name}`;
  put("title", run.name, () => run.name);
  const subtitle = [method(run), clients, size].filter(Boolean).join(" · ");
  put("subtitle", subtitle, () => subtitle);
  const age = run.age + (performance.now() - run.received) / 1000;
  const [kind, words] = status(run, age);
  put("status", [kind, words], () => [html("i", { class: kind, "aria-hidden": "true" }), words]);
  const notes = [
    run.problem,
    run.damaged ? `${integer(run.damaged)} damaged ${run.damaged === 1 ? "line" : "lines"} of events.jsonl skipped.` : null,
    run.elapsed === null && run.start ? "The events of this run carry no wall time, so there is no speed." : null,
  ].filter(Boolean).join(" ");
  put("footer", notes, () => notes);
}

function status(run, age) {
  const ago = age < 2 ? "just now" : `${duration(Math.round(age))} ago`;
  if (run.unread > 0) return ["running", `reading events: ${percent(1 - run.unread, 0)}`];
  if (run.status === "failed") return ["failed", `failed: ${run.error ?? "no reason given"}`];
  if (run.status === "completed") return ["completed", `completed: ${run.end_reason ?? "no end event"}`];
  if (run.status === "stopped") return ["silent", `stopped: ${run.end_reason ?? "interrupted"}`];
  if (run.status === "running" && !run.start) return ["waiting", `waiting: ${run.waiting ?? "for the start"}`];
  if (run.status === "running") return ["running", run.end_reason ?? `live, last event ${ago}${run.waiting ? ` (${run.waiting})` : ""}`];
  if (run.status === "silent") return ["silent", `no event for ${duration(Math.round(age))}: it may have been stopped`];
  return ["waiting", "waiting for the first event"];
}

const virtual = (run) => run.clock === "virtual";
const moment = (run, time) => (virtual(run) ? `day ${(time / DAY).toFixed(3)}` : duration(time));

// How much of the run is done, by the limit that is nearest; null if it has none.
function shareDone(run) {
  const limits = [
    [run.totals.version, run.config["num-server-rounds"]],
    [virtual(run) ? run.time / DAY : 0, run.config["virtual-days"]],
    [run.elapsed ?? 0, run.config["time-limit"]],
  ];
  const shares = limits.filter(([, limit]) => limit > 0).map(([done, limit]) => Math.min(done / limit, 1));
  return shares.length ? Math.max(...shares) : null;
}

function drawTiles(run) {
  const { totals } = run;
  const days = run.config["virtual-days"];
  const limitless = days === undefined ? "limit unknown" : "no limit";
  const perUpload = totals.uploads ? `${bytes(totals.bytes_up / totals.uploads)} each` : "no upload yet";
  const share = shareDone(run);
  const done = share === null ? null : html("progress", {
    max: 1, value: share, "aria-label": `${percent(share, 0)} of the run is done`,
  });
  const tiles = [
    resultTile(run),
    virtual(run)
      ? ["Virtual days", (run.time / DAY).toFixed(3), Number(days) ? `of ${days}` : limitless, done]
      : ["Time", duration(run.time, true), share === null ? "no limit in time" : `${percent(share, 0)} done`, done],
    ["Uploads", integer(totals.uploads), `in ${integer(totals.version)} versions`],
    ["Rejected", integer(totals.rejected), `${integer(run.clients.counts.paused ?? 0)} quarantined`],
    ["Speed", totals.uploads_per_second === null ? "–" : `${totals.uploads_per_second.toFixed(1)} /s`,
      !run.start ? "not started" : run.elapsed === null ? "no wall times" : `in ${duration(run.elapsed)}`],
    ["Received", bytes(totals.bytes_up), perUpload],
    ["Sent", bytes(totals.bytes_down), totals.tasks ? `${bytes(totals.bytes_down / totals.tasks)} each` : "no task yet"],
    ["Temperature", fixed(3)(totals.temperature), totals.temperature === null ? "none" : "last upload"],
    ["κ", fixed(3)(totals.kappa), totals.kappa === null ? "none reported" : "mean of last 50"],
    ["Staleness", fixed(2)(totals.staleness), totals.staleness === null ? "no upload yet" : "mean of last 50"],
    ...privacyTile(totals.privacy),
  ];
  put("tiles", tiles.map((tile) => [...tile.slice(0, 3), share]), () => tiles.map(([name, value, note, extra]) =>
    html("div", { class: "tile" }, html("span", { class: "label" }, name), html("span", { class: "value" }, value),
      html("span", { class: "note" }, note), extra ?? null)));
}

function privacyTile(privacy) {
  if (privacy?.epsilon === undefined) return [];
  return [["Privacy", `ε ${privacy.epsilon.toFixed(2)}`, `δ ${privacy.delta}, at most ε ${privacy.epsilon_bound.toFixed(2)}`]];
}

function resultTile({ totals, series }) {
  if (totals.accuracy !== null) return ["Test accuracy", percent(totals.accuracy), `best ${percent(totals.best_accuracy)}`];
  if (totals.loss === null) return ["Test accuracy", "–", "not evaluated"];
  return ["Test loss", short(totals.loss), `best ${short(Math.min(...series.loss.map((row) => row[4])))}`];
}

// --- Curves -------------------------------------------------------------------------------------

const AXES = { time: "Virtual time", elapsed: "Wall time", uploads: "Uploads" };
const MEASURES = {
  accuracy: { name: "Accuracy", title: "Test accuracy", y: { low: 0, high: 1, format: percentTick, show: (value) => percent(value, 2) } },
  loss: { name: "Loss", title: "Test loss", y: { low: 0, show: fixed(4) } },
  client_accuracy: { name: "Clients", title: "Accuracy on clients", y: { low: 0, high: 1, format: percentTick, show: (value) => percent(value, 2) } },
};

function percentTick(value, digits) {
  return `${(100 * value).toFixed(Math.max(0, digits - 2))} %`;
}

function axisOf(runs) {
  const usable = {
    time: runs.some(virtual),
    elapsed: runs.some((run) => run.elapsed !== null),
    uploads: true,
  };
  const best = Object.keys(AXES).find((axis) => runs.every((run) => onAxis(run, axis)));
  return { usable, axis: usable[state.axis] ? state.axis : best };
}

// A run is on an axis only if it has that kind of time.
const onAxis = (run, axis) => (axis === "time" ? virtual(run) : axis === "elapsed" ? run.elapsed !== null : true);

function xOf(axis, runs) {
  if (axis === "time") return { factor: 1 / DAY, label: "virtual days", show: (value) => `day ${value.toFixed(3)}` };
  if (axis === "uploads") return { factor: 1, label: "uploads", whole: true, format: integer, show: (value) => `${integer(value)} uploads` };
  const longest = Math.max(...runs.map((run) => run.elapsed ?? 0));
  const [unit, label] = longest < 180 ? [1, "seconds"] : longest < 7200 ? [60, "minutes"] : [3600, "hours"];
  return { factor: 1 / unit, label: `${label} since the start`, show: (value) => duration(value * unit) };
}

const othersMethod = (run) => run.uploads.length > 0 && !(run.series.kappa ?? []).length;

function drawCurves(runs) {
  const { axis, usable } = axisOf(runs);
  const column = { time: 0, elapsed: 1, uploads: 2 }[axis];
  const shown = runs.filter((run) => onAxis(run, axis));
  const x = xOf(axis, shown);
  const extent = (run) => [run.time, run.elapsed, run.totals.uploads][column] * x.factor;
  x.high = Math.max(...shown.map(extent)) || 1; // the same for all curves
  segments("axis", AXES, axis, (name) => usable[name], (name) => { state.axis = name; changed(); });
  const measures = Object.fromEntries(Object.entries(MEASURES).filter(([name]) =>
    name !== "client_accuracy" || runs.some((run) => run.series.client_accuracy)));
  const known = (name) => runs.some((run) => run.series[name]);
  const measure = state.measure in measures ? state.measure : !known("accuracy") && known("loss") ? "loss" : "accuracy";
  segments("measure", Object.fromEntries(Object.entries(measures).map(([name, item]) => [name, item.name])), measure,
    () => true, (name) => { state.measure = name; draw(); });
  put("h-quality", measure, () => MEASURES[measure].title);

  const model = (name, y, rows, more = {}) => ({
    id: name, x, y, ...more,
    lines: shown.map((run) => ({
      name: run.name, color: color(run.name), dash: dash(run.name),
      points: rows(run).map((row) => [row[column] * x.factor, row[3], row[4], row[5]]),
    })).filter((line) => line.points.length),
  });
  const update = (chart, title, curve, why) => {
    const ends = curve.lines.map((line) => `${line.name} ${curve.y.show(line.points.at(-1)[1])}`).join(", ");
    charts[chart].update(curve.lines.length ? curve : { empty: why }, `${title} against ${x.label}: ${ends}`);
  };
  const left = runs.filter((run) => !onAxis(run, axis)).map((run) => run.name);
  const missing = left.length ? `${left.join(", ")}: no ${AXES[axis].toLowerCase()}` : "";
  put("axis-note", missing, () => missing);
  update("quality", MEASURES[measure].title, model("quality", MEASURES[measure].y, (run) => run.series[measure] ?? [], { fit: state.fit }),
    known("loss") && measure !== "loss" ? "This task has no accuracy: see the loss." : "Not evaluated yet.");
  update("temperature", "Temperature", model("temperature", { low: 0, show: fixed(3) }, (run) => run.series.temperature ?? []),
    runs.every(othersMethod) ? "These methods have no temperature." : "No temperature yet: it needs a full queue of update norms.");
  update("kappa", "Mean κ", model("kappa", { high: 1, show: fixed(3) }, (run) => run.series.kappa ?? []),
    runs.every(othersMethod) ? "These methods report no κ." : "No upload with κ yet.");
  update("rate", "Uploads per second", model("rate", { low: 0, show: (value) => `${value.toFixed(1)} /s` }, rates),
    runs.every((run) => run.start && run.elapsed === null) ? "The events of these runs carry no wall time." : "Not enough uploads yet.");
  drawStaleness(runs);
}

// Uploads per real second, from how many there were at which moment; rows as those of a series.
function rates(run) {
  const seen = run.series.staleness ?? [];
  if (run.elapsed === null || !seen.length || run.elapsed < 2) return [];
  const count = Math.min(40, Math.floor(run.elapsed));
  const width = run.elapsed / count;
  const known = [[0, 0, run.start?.version ? seen[0][2] : 0], ...seen.map((row) => row.slice(0, 3))];
  const rows = [];
  let before = known[0][2];
  let place = 0;
  for (let i = 1; i <= count; i++) {
    const moment = i * width;
    while (place < known.length - 1 && known[place + 1][1] <= moment) place++;
    const [a, b] = [known[place], known[place + 1] ?? known[place]];
    const part = b[1] > a[1] ? (moment - a[1]) / (b[1] - a[1]) : 0;
    const uploads = a[2] + part * (b[2] - a[2]);
    const rate = Math.max(0, uploads - before) / width;
    rows.push([a[0] + part * (b[0] - a[0]), moment, uploads, rate, rate, rate]);
    before = uploads;
  }
  return rows;
}

function drawStaleness(runs) {
  const filled = runs.filter((run) => run.staleness.counts.length);
  if (!filled.length) return charts.staleness.update({ empty: "No upload yet." }, "Staleness");
  let width = Math.max(...filled.map((run) => run.staleness.width));
  const greatest = Math.max(...filled.map((run) => run.staleness.counts.length * run.staleness.width));
  while (greatest / width > 24) width *= 2;
  const groups = filled.map((run) => {
    const counts = [];
    run.staleness.counts.forEach((count, i) => {
      const bar = Math.floor((i * run.staleness.width) / width);
      while (counts.length <= bar) counts.push(0);
      counts[bar] += count;
    });
    return { name: run.name, color: color(run.name), counts };
  });
  const words = filled.map((run) => `${run.name} mean of recent uploads ${fixed(2)(run.totals.staleness)}`).join(", ");
  charts.staleness.update({ groups, width }, `Histogram of staleness: ${words}`);
}

function segments(id, options, current, allowed, choose) {
  const items = Object.entries(options).map(([name, text]) => [name, text, name === current, allowed(name)]);
  put(id, items, () => items.map(([name, text, on, free]) => html("label", {},
    html("input", { type: "radio", name: id, value: name, checked: on, disabled: !free, "data-key": name, onchange: () => choose(name) }),
    html("span", {}, text))));
}

// --- One run in detail --------------------------------------------------------------------------

function drawDetail(run) {
  put("detail-name", run.name, () => run.name);
  drawRecent(run);
  drawBuffers(run);
  drawClients(run);
  drawTrouble(run);
}

function drawRecent(run) {
  const uploads = run.uploads.filter((upload) => upload.kappa !== null);
  put("n-recent", uploads.length, () => (uploads.length ? `last ${integer(uploads.length)} uploads; newest of each client bold` : ""));
  if (!uploads.length) {
    const why = run.uploads.length ? `${run.strategy ?? "This method"} reports no κ.` : "No upload yet.";
    return charts.recent.update({ empty: why }, "κ by client");
  }
  const newest = new Map(uploads.map((upload) => [upload.client, upload]));
  const points = uploads.map((upload) => ({
    x: upload.client, y: upload.kappa, fresh: newest.get(upload.client) === upload,
    title: `Client ${upload.client}`,
    lines: [
      { text: `κ ${fixed(4)(upload.kappa)}` },
      { text: `staleness ${upload.staleness}, from version ${integer(upload.version)}` },
      { text: `${moment(run, upload.time)}, node ${upload.node_id}` },
    ],
  }));
  const count = Math.max(run.start?.num_clients ?? 0, ...uploads.map((upload) => upload.client + 1));
  const least = uploads.reduce((a, b) => (a.kappa < b.kappa ? a : b));
  charts.recent.update({ points, count, color: color(run.name) },
    `κ of the last ${uploads.length} uploads by client: mean ${fixed(3)(run.totals.kappa)}, least ${fixed(3)(least.kappa)} of client ${least.client}`);
}

function drawBuffers(run) {
  const last = run.buffers.at(-1);
  put("n-buffers", last ?? null, () => (last?.effective_number ? `last one counts like ${last.effective_number.toFixed(2)} of ${last.size} uploads` : ""));
  if (!last) return charts.buffers.update({ empty: "No buffer has been aggregated yet." }, "Weights inside the last buffers");
  const list = run.buffers.map((buffer) => ({
    mark: integer(buffer.version),
    parts: buffer.weights,
    title: `Version ${integer(buffer.version)}, ${moment(run, buffer.time)}`,
    lines: [
      ...buffer.weights.slice(0, 12).map((weight, i) => ({
        name: buffer.clients[i] === null ? "" : `client ${buffer.clients[i]}`,
        text: buffer.kappas[i] === null ? fixed(4)(weight) : `${fixed(4)(weight)} (κ ${fixed(3)(buffer.kappas[i])})`,
      })).reverse(),
      ...(buffer.size > 12 ? [{ text: `and ${buffer.size - 12} more` }] : []),
    ],
  }));
  charts.buffers.update({ bars: list, color: color(run.name) },
    `Weights inside the last ${list.length} buffers: version ${last.version} has ${last.weights.map((weight) => weight.toFixed(3)).join(", ")}`);
}

const place = ({ node_id: id, host }) => (host ? `${id} on ${host}` : id);

const STATES = { busy: "busy", overdue: "overdue", buffered: "in the buffer", idle: "idle", paused: "quarantined", offline: "offline" };

function drawClients(run) {
  const { counts, rows } = run.clients;
  const total = Object.values(counts).reduce((a, b) => a + b, 0);
  const ended = run.status === "completed" || run.status === "failed" || run.end_reason !== null;
  const hidden = total - rows.length;
  const note = [ended && counts.busy ? "when the run ended" : null, hidden > 0 ? `${integer(hidden)} more not drawn` : null].filter(Boolean).join("; ");
  put("n-clients", note, () => note);
  $("legend").hidden = !rows.length;
  if (!rows.length) {
    put("busy", null, () => []);
    return charts.clients.update({ empty: "No node has joined yet." }, "Clients right now");
  }
  charts.clients.update({
    cells: rows.map((row) => ({
      state: row.state,
      title: `Client ${row.client}: ${STATES[row.state]}`,
      lines: [
        ...(row.since === undefined ? [] : [{ text: `works on version ${integer(row.version)} since ${moment(run, row.since)}` }]),
        ...(row.until === undefined ? [] : [{ text: `${row.failures} failures in a row, out until ${moment(run, row.until)}` }]),
        { text: `node ${place(row)}` },
      ],
    })),
  }, `Clients right now: ${Object.entries(STATES).map(([name, words]) => `${counts[name] ?? 0} ${words}`).join(", ")}`);
  put("legend", counts, () => Object.entries(STATES).filter(([name]) => counts[name] || !["offline", "overdue"].includes(name)).map(([name, words]) =>
    html("span", {}, svg("svg", { width: 14, height: 14, "aria-hidden": "true" }, square(name, 1, 1, 12)), `${integer(counts[name] ?? 0)} ${words}`)));
  const working = rows.filter((row) => row.since !== undefined).sort((a, b) => a.since - b.since).slice(0, 100);
  put("busy", [working, run.time], () => (working.length ? table(
    ["Client", "Node", "Version", "Since", "For"],
    working.map((row) => [row.client, place(row), integer(row.version), moment(run, row.since), spent(run, row.since) + (row.state === "overdue" ? ", overdue" : "")]),
  ) : html("p", { class: "nothing" }, "Nobody is at work.")));
}

function spent(run, since) {
  const units = Math.max(0, run.time - since);
  return virtual(run) ? `${integer(units)} units` : duration(units);
}

function drawTrouble(run) {
  const paused = run.clients.rows.filter((row) => row.until !== undefined);
  const { rejected, quarantines } = run.totals;
  const note = `${integer(rejected)} rejected, ${integer(quarantines)} ${quarantines === 1 ? "quarantine" : "quarantines"}, ${integer(paused.length)} in force`;
  put("n-trouble", note, () => note);
  put("trouble", [run.rejections, run.reasons, paused], () => {
    if (!rejected && !quarantines) return html("p", { class: "nothing" }, "Nothing was rejected, and nobody is quarantined.");
    return [
      ...(paused.length ? [html("h4", {}, "Quarantined"), table(["Client", "Failures", "Out until", "Last reason", "Node"],
        paused.map((row) => [row.client, row.failures, moment(run, row.until), row.reason || "–", place(row)]))] : []),
      ...(run.reasons.length ? [html("h4", {}, "Reasons"), html("ul", { class: "reasons" }, ...run.reasons.map(([reason, count]) =>
        html("li", {}, html("b", {}, `${integer(count)}×`), reason)))] : []),
      ...(run.rejections.length ? [html("h4", {}, `Last ${run.rejections.length === 1 ? "rejection" : `${run.rejections.length} rejections`}`),
        table(["When", "Client", "Reason", "Node"],
          run.rejections.map((item) => [moment(run, item.time), item.client < 0 ? "–" : item.client, item.reason, place(item)]))] : []),
    ];
  });
}

function table(heads, rows) {
  const cell = (tag, value) => html(tag, { scope: tag === "th" ? "col" : null, class: String(value).length > 24 ? "long" : null }, String(value));
  return html("table", {}, html("thead", {}, html("tr", {}, ...heads.map((head) => cell("th", head)))),
    html("tbody", {}, ...rows.map((row) => html("tr", {}, ...row.map((value) => cell("td", value))))));
}

function drawSettings(shown, run) {
  const keys = Object.keys(run.config).filter((key) => key !== "run-dir");
  const runs = shown.filter((other) => other === run || Object.keys(other.config).length); // others have just begun
  const several = runs.length > 1;
  const differing = keys.filter((key) => runs.some((other) => other.config[key] !== run.config[key]));
  put("settings-title", [several, differing.length], () => (several ? `Settings that differ between the shown runs: ${differing.length}` : "Settings"));
  put("settings", [several, runs.map((item) => [item.name, item.config])], () => {
    if (!keys.length) return html("p", { class: "nothing" }, "There are no readable settings in this folder.");
    if (several && !differing.length) return html("p", { class: "nothing" }, "The shown runs have the same settings.");
    return table(["Setting", ...runs.map((item) => item.name)],
      (several ? differing : keys).map((key) => [key, ...runs.map((item) => String(item.config[key] ?? "–"))]));
  });
}

// --- Theme --------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function store(value) {
  try { // storage can be forbidden
    if (value) localStorage.setItem("theme", value);
    return localStorage.getItem("theme");
  } catch {
    return value;
  }
}

function theme(name) {
  const chosen = THEMES.includes(name) ? name : "auto";
  document.documentElement.dataset.theme = chosen;
  $("theme").textContent = `Theme: ${chosen}`;
  $("theme").setAttribute("aria-label", `Colour theme: ${chosen}. Press to change.`);
}

$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  store(next);
  theme(next);
});
$("fit").addEventListener("click", () => {
  state.fit = !state.fit;
  $("fit").setAttribute("aria-pressed", String(state.fit));
  draw();
});
$("filter").addEventListener("input", draw);
addEventListener("hashchange", () => { readHash(); changed(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

theme(store());
readHash();
poll(true);
