// Curves of several runs over each other, and the staleness of their uploads.

import { duration, fixed, rate, html, integer, percent } from "./charts.js";
import { $, color, dash, DAY, hasEnded, put, state, titleOf, virtual } from "./state.js";

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

let unit = 1; // of the horizontal axis as it is drawn, per unit of its own

// What a chart was zoomed to, in units that stay when minutes become hours.
export const zoomed = (from, to) => (from === null ? null : [from / unit, to / unit]);

function drawControls() {
  $("fit").setAttribute("aria-pressed", String(state.fit));
  $("whole").hidden = state.zoom === null;
  if (document.activeElement !== $("smooth")) $("smooth").value = state.smooth;
  $("smooth-value").textContent = state.smooth ? state.smooth.toFixed(2) : "off";
}

// The exponential average of a curve; its start is not drawn towards 0.
function smoothed(points, weight) {
  let [sum, mass] = [0, 0];
  return points.map(([x, y]) => {
    [sum, mass] = [weight * sum + y, weight * mass + 1];
    return [x, sum / mass, sum / mass, sum / mass];
  });
}

const othersMethod = (run) => run.uploads.length > 0 && !(run.series.kappa ?? []).length;

export function drawCurves(runs, charts, changed) {
  const { axis, usable } = axisOf(runs);
  const column = { time: 0, elapsed: 1, uploads: 2 }[axis];
  const shown = runs.filter((run) => onAxis(run, axis));
  const x = xOf(axis, shown);
  const extent = (run) => [run.time, run.elapsed, run.totals.uploads][column] * x.factor;
  x.high = Math.max(...shown.map(extent)) || 1; // the same for all curves
  segments("axis", AXES, axis, (name) => usable[name], (name) => {
    Object.assign(state, { axis: name, zoom: null });
    changed();
  });
  unit = x.factor;
  if (state.zoom) [x.low, x.high] = state.zoom.map((value) => value * x.factor);
  drawControls();
  const measures = Object.fromEntries(Object.entries(MEASURES).filter(([name]) =>
    name !== "client_accuracy" || runs.some((run) => run.series.client_accuracy)));
  const known = (name) => runs.some((run) => run.series[name]);
  const measure = state.measure in measures ? state.measure : !known("accuracy") && known("loss") ? "loss" : "accuracy";
  segments("measure", Object.fromEntries(Object.entries(measures).map(([name, item]) => [name, item.name])), measure,
    () => true, (name) => { state.measure = name; changed(); });
  put("h-quality", measure, () => MEASURES[measure].title);

  const model = (name, y, rows, more = {}) => ({
    id: name, x, y, zoomed: state.zoom !== null, ...more,
    lines: shown.map((run) => {
      const points = rows(run).map((row) => [row[column] * x.factor, row[3], row[4], row[5]]);
      return {
        name: titleOf(run), color: color(run.name), dash: dash(run.name),
        points: state.smooth ? smoothed(points, state.smooth) : points,
        raw: state.smooth ? points : null,
      };
    }).filter((line) => line.points.length),
  });
  const update = (chart, title, curve, why) => {
    const ends = curve.lines.map((line) => `${line.name} ${curve.y.show((line.raw ?? line.points).at(-1)[1])}`).join(", ");
    charts[chart].update(curve.lines.length ? curve : { empty: why }, `${title} against ${x.label}: ${ends}`);
  };
  const ended = runs.every(hasEnded);
  const left = runs.filter((run) => !onAxis(run, axis)).map(titleOf);
  const missing = left.length ? `${left.join(", ")}: no ${AXES[axis].toLowerCase()}` : "";
  put("axis-note", missing, () => missing);
  update("quality", MEASURES[measure].title, model("quality", MEASURES[measure].y, (run) => run.series[measure] ?? [], { fit: state.fit }),
    known("loss") && measure !== "loss" ? "This task has no accuracy: see the loss." : ended ? "Not evaluated." : "Not evaluated yet.");
  const others = runs.every(othersMethod);
  const none = runs.every((run) => !run.uploads.length);
  update("temperature", "Temperature", model("temperature", { low: 0, show: fixed(3) }, (run) => run.series.temperature ?? []),
    others ? "These methods have no temperature."
      : `No temperature${ended ? "" : " yet"}: it needs a full queue of update norms.`);
  update("kappa", "Mean κ", model("kappa", { high: 1, show: fixed(3) }, (run) => run.series.kappa ?? []),
    others ? "These methods report no κ." : ended ? "No upload had a κ." : "No upload with κ yet.");
  update("rate", "Uploads per second", model("rate", { low: 0, show: rate }, rates),
    runs.every((run) => run.start && run.elapsed === null) ? "The events of these runs carry no wall time."
      : !ended ? "Not enough uploads yet." : none ? "No upload was accepted." : "The run was too short to measure its speed.");
  drawStaleness(runs, charts);
}

// Uploads per real second, from how many there were at which moment; rows as those of a series.
function rates(run) {
  const seen = run.series.staleness ?? [];
  if (!run.elapsed || !seen.length || (run.elapsed < 2 && !hasEnded(run))) return [];
  const count = Math.min(40, Math.max(1, Math.floor(run.elapsed)));
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

function drawStaleness(runs, charts) {
  const filled = runs.filter((run) => run.staleness.counts.length);
  if (!filled.length) return charts.staleness.update({ empty: runs.every(hasEnded) ? "No upload was accepted." : "No upload yet." }, "Staleness");
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
    return { name: titleOf(run), color: color(run.name), counts };
  });
  const words = filled.map((run) => `${titleOf(run)} mean of recent uploads ${fixed(2)(run.totals.staleness)}`).join(", ");
  charts.staleness.update({ groups, width }, `Histogram of staleness: ${words}`);
}

function segments(id, options, current, allowed, choose) {
  const items = Object.entries(options).map(([name, text]) => [name, text, name === current, allowed(name)]);
  put(id, items, () => items.map(([name, text, on, free]) => html("label", {},
    html("input", { type: "radio", name: id, value: name, checked: on, disabled: !free, "data-key": name, onchange: () => choose(name) }),
    html("span", {}, text))));
}
