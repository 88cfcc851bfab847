// One run in detail: its uploads, buffers, clients, troubles and settings.

import { duration, fixed, html, integer, square, svg } from "./charts.js";
import { $, color, DAY, hasEnded, put, titleOf, virtual } from "./state.js";

const moment = (run, time) => (virtual(run) ? `day ${(time / DAY).toFixed(3)}` : duration(time));

export function drawDetail(run, charts) {
  put("detail-name", titleOf(run), () => titleOf(run));
  drawRecent(run, charts);
  drawBuffers(run, charts);
  drawClients(run, charts);
  drawTrouble(run);
}

function drawRecent(run, charts) {
  const uploads = run.uploads.filter((upload) => upload.kappa !== null);
  put("n-recent", uploads.length, () => (uploads.length ? `last ${integer(uploads.length)} uploads; newest of each client bold` : ""));
  if (!uploads.length) {
    const why = run.uploads.length ? `${run.label || "This method"} reports no κ.` : (hasEnded(run) ? "No upload was accepted." : "No upload yet.");
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

function drawBuffers(run, charts) {
  const last = run.buffers.at(-1);
  put("n-buffers", last ?? null, () => (last?.effective_number ? `last one counts like ${last.effective_number.toFixed(2)} of ${last.size} uploads` : ""));
  if (!last) return charts.buffers.update({ empty: hasEnded(run) ? "No buffer was aggregated." : "No buffer has been aggregated yet." }, "Weights inside the last buffers");
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

function drawClients(run, charts) {
  const { counts, rows } = run.clients;
  const total = Object.values(counts).reduce((a, b) => a + b, 0);
  const ended = hasEnded(run) || run.end_reason !== null;
  const hidden = total - rows.length;
  const note = [ended && counts.busy ? "when the run ended" : null, hidden > 0 ? `${integer(hidden)} more not drawn` : null].filter(Boolean).join("; ");
  put("n-clients", note, () => note);
  $("legend").hidden = !rows.length;
  if (!rows.length) {
    put("busy", null, () => []);
    return charts.clients.update({ empty: hasEnded(run) ? "No node joined." : "No node has joined yet." }, "Clients right now");
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

export function drawSettings(shown, run) {
  const keys = Object.keys(run.config).filter((key) => key !== "run-dir");
  const runs = shown.filter((other) => other === run || Object.keys(other.config).length); // others have just begun
  const several = runs.length > 1;
  const differing = keys.filter((key) => runs.some((other) => other.config[key] !== run.config[key]));
  put("settings-title", [several, differing.length], () => (several ? `Settings that differ between the shown runs: ${differing.length}` : "Settings"));
  put("settings", [several, runs.map((item) => [item.name, item.config])], () => {
    if (!keys.length) return html("p", { class: "nothing" }, "There are no readable settings in this folder.");
    if (several && !differing.length) return html("p", { class: "nothing" }, "The shown runs have the same settings.");
    return table(["Setting", ...runs.map(titleOf)],
      (several ? differing : keys).map((key) => [key, ...runs.map((item) => String(item.config[key] ?? "–"))]));
  });
}
