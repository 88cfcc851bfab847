// What is shown: asks the server for news once a second and draws what changed.

import { Chart } from "./chart.js";
import {
  bars, bytes, cells, dots, duration, fixed, html, integer, lines, percent, rate, short, stacks,
} from "./charts.js";
import { drawCurves, zoomed } from "./curves.js";
import { drawDetail, drawSettings } from "./detail.js";
import { drawPicker, listenToPicker } from "./picker.js";
import { saveCsv, savePng } from "./save.js";
import {
  $, DAY, hasEnded, loaded, method, put, readHash, resultOf, settle, state, titleOf, virtual, writeHash,
} from "./state.js";

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

function changed() {
  settle();
  writeHash();
  poll(true);
  draw();
}

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

function draw() {
  if (state.listing === null) return;
  drawPicker(changed);
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
  drawCurves(runs, charts, changed);
  drawDetail(run, charts);
  drawSettings(runs, run);
}

function drawHeader(run) {
  const clients = run.start ? `${integer(run.start.num_clients)} clients, ${run.start.max_in_flight} kept busy` : null;
  const size = run.start ? `${integer(run.start.num_parameters)} parameters` : null;
  document.title = `${resultOf(run.totals)} · ${titleOf(run)}`;
  put("title", titleOf(run), () => titleOf(run));
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
  const perUpload = totals.uploads ? `${bytes(totals.bytes_up / totals.uploads)} each` : hasEnded(run) ? "no upload" : "no upload yet";
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
    ["Speed", totals.uploads_per_second === null ? "–" : rate(totals.uploads_per_second),
      !run.start ? "not started" : run.elapsed === null ? "no wall times" : `in ${duration(run.elapsed)}`],
    ["Received", bytes(totals.bytes_up), perUpload],
    ["Sent", bytes(totals.bytes_down), totals.tasks ? `${bytes(totals.bytes_down / totals.tasks)} each` : hasEnded(run) ? "no task" : "no task yet"],
    ["Temperature", fixed(3)(totals.temperature), totals.temperature === null ? "none" : "last upload"],
    ["κ", fixed(3)(totals.kappa), totals.kappa === null ? "none reported" : "mean of last 50"],
    ["Staleness", fixed(2)(totals.staleness), totals.staleness === null ? (hasEnded(run) ? "no upload" : "no upload yet") : "mean of last 50"],
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
$("fit").addEventListener("click", () => { state.fit = !state.fit; changed(); });
$("smooth").addEventListener("input", () => { state.smooth = Number($("smooth").value); changed(); });
$("whole").addEventListener("click", () => { state.zoom = null; changed(); });
$("link").addEventListener("click", copyLink);
for (const button of document.querySelectorAll("[data-save]")) {
  const chart = charts[button.dataset.save];
  const save = button.textContent === "CSV" ? saveCsv : savePng;
  button.addEventListener("click", () => save(chart, button.closest(".panel").querySelector("h3").textContent));
}
for (const name of ["quality", "temperature", "kappa", "rate"]) {
  charts[name].onZoom = (from, to) => { state.zoom = zoomed(from, to); changed(); };
}
listenToPicker(changed);

async function copyLink() {
  writeHash();
  try { // needs a page that came from this machine, or over TLS
    await navigator.clipboard.writeText(location.href);
    $("link").textContent = "Copied";
  } catch {
    $("link").textContent = "It is the page's address";
  }
  setTimeout(() => { $("link").textContent = "Copy link"; }, 2000);
}

addEventListener("hashchange", () => { readHash(); changed(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });

theme(store());
readHash();
poll(true);
