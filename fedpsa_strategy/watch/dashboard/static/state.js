// What is shown, and the address that leads to it again.

import { percent, short } from "./charts.js";

export const DAY = 86400;
export const MOST_SHOWN = 6;
const DASHES = [null, "7 4", "2 3", "9 3 2 3", "14 4", "4 2"];
const AXIS_NAMES = ["time", "elapsed", "uploads"];
const MEASURE_NAMES = ["accuracy", "loss", "client_accuracy"];
export const ORDERS = {
  newest: { name: "newest first", by: (a, b) => b.changed - a.changed },
  name: { name: "name", by: (a, b) => titleOf(a).localeCompare(titleOf(b), undefined, { numeric: true }) },
  method: { name: "method and data", by: (a, b) => method(a).localeCompare(method(b), undefined, { numeric: true }) },
  best: { name: "best result first", by: (a, b) => rank(b) - rank(a) },
  status: { name: "state", by: (a, b) => a.status.localeCompare(b.status) },
};
export const $ = (id) => document.getElementById(id);

export const state = {
  listing: null, // what /api/runs said
  shown: [], // names of runs laid over each other
  focus: null, // the one shown in detail
  data: new Map(), // name -> the last snapshot and when it came
  slots: new Map(), // name -> its colour, kept while it is shown
  axis: null,
  measure: null, // accuracy, if nothing else was chosen and the runs have one
  fit: false,
  smooth: 0, // weight of the past in an average, from 0 to below 1
  zoom: null, // [from, to] on the horizontal axis, in its own units
  order: "newest",
  filter: "",
};

// --- The address --------------------------------------------------------------------------------

export function readHash() {
  const hash = new URLSearchParams(location.hash.slice(1));
  state.shown = [...new Set(hash.getAll("run"))].slice(0, MOST_SHOWN);
  state.focus = hash.get("focus");
  state.axis = known(hash.get("axis"), AXIS_NAMES);
  state.measure = known(hash.get("measure"), MEASURE_NAMES);
  state.fit = hash.get("fit") === "1";
  state.smooth = Math.min(Math.max(Number(hash.get("smooth")) || 0, 0), 0.99);
  const zoom = (hash.get("zoom") ?? "").split("~").map(Number);
  state.zoom = zoom.length === 2 && zoom.every(Number.isFinite) && zoom[0] < zoom[1] ? zoom : null;
  state.order = known(hash.get("order"), Object.keys(ORDERS)) ?? "newest";
  state.filter = hash.get("filter") ?? "";
}

const known = (value, allowed) => (allowed.includes(value) ? value : null);

export function writeHash() {
  const hash = new URLSearchParams(state.shown.map((name) => ["run", name]));
  if (state.focus) hash.set("focus", state.focus);
  if (state.axis) hash.set("axis", state.axis);
  if (state.measure) hash.set("measure", state.measure);
  if (state.fit) hash.set("fit", "1");
  if (state.smooth) hash.set("smooth", state.smooth);
  if (state.zoom) hash.set("zoom", state.zoom.map((value) => Number(value.toPrecision(8))).join("~"));
  if (state.order !== "newest") hash.set("order", state.order);
  if (state.filter) hash.set("filter", state.filter);
  history.replaceState(null, "", `#${hash}`);
}

// --- Which runs ---------------------------------------------------------------------------------

// Keeps the choice valid: runs come and go, and the first visit has not chosen anything.
export function settle() {
  const runs = state.listing.runs;
  const names = runs.map((run) => run.name);
  state.shown = state.shown.filter((name) => names.includes(name));
  if (!state.shown.length) {
    const live = (run) => (run.status === "running" ? 0 : 1);
    state.shown = [...runs].sort((a, b) => live(a) - live(b)).slice(0, MOST_SHOWN).map((run) => run.name);
  }
  if (!state.shown.includes(state.focus)) {
    const live = runs.find((run) => run.status === "running" && state.shown.includes(run.name));
    state.focus = live?.name ?? state.shown[0] ?? null;
  }
  for (const name of state.slots.keys()) if (!state.shown.includes(name)) state.slots.delete(name);
  for (const name of state.shown) {
    if (state.slots.has(name)) continue;
    const taken = new Set(state.slots.values());
    state.slots.set(name, [...Array(MOST_SHOWN).keys()].find((slot) => !taken.has(slot)));
  }
}

export const color = (name) => `var(--run-${state.slots.get(name)})`;
export const dash = (name) => DASHES[state.slots.get(name)];
export const loaded = () => state.shown.filter((name) => state.data.has(name)).map((name) => ({ name, ...state.data.get(name) }));

// --- Runs in words ------------------------------------------------------------------------------

// Folders of experiments are named by a hash; they carry a title.
export const titleOf = (run) => run.title ?? run.name;

export const method = (run) => [run.label, run.data, run.seed === null || run.seed === undefined ? null : `seed ${run.seed}`]
  .filter(Boolean).join(" · ");

// Accuracy, or the loss of a task that has none.
export function resultOf({ accuracy = null, loss = null }) {
  return accuracy === null && loss !== null ? `loss ${short(loss)}` : percent(accuracy);
}

// Accuracies by size, then losses, then runs that have neither.
const rank = ({ accuracy = null, loss = null }) => accuracy ?? (loss === null ? -Infinity : -1 - loss);

export const hasEnded = (run) => ["completed", "failed", "stopped"].includes(run.status);

export const virtual = (run) => run.clock === "virtual";

// --- The page -----------------------------------------------------------------------------------

const drawn = new Map();

// Rebuilds an element's children if what they show changed, and keeps the keyboard's place.
export function put(id, value, build) {
  const key = JSON.stringify(value);
  if (drawn.get(id) === key) return;
  drawn.set(id, key);
  const node = $(id);
  const held = node.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const children = build();
  node.replaceChildren(...(Array.isArray(children) ? children : [children]));
  if (held) [...node.querySelectorAll("[data-key]")].find((item) => item.dataset.key === held)?.focus();
}
