// Which runs are laid over each other: chips of the chosen ones, and a list to choose from.

import { html, swatch } from "./charts.js";
import { $, color, dash, method, MOST_SHOWN, ORDERS, put, resultOf, state, titleOf } from "./state.js";

export function drawPicker(changed) {
  const all = state.listing.runs;
  $("picker").hidden = all.length < 2;
  const chips = state.shown.map((name) => {
    const head = all.find((run) => run.name === name) ?? { name };
    const totals = state.data.get(name)?.totals;
    const result = resultOf(totals && resultOf(totals) !== "–" ? totals : head);
    return { name, title: titleOf(head), slot: state.slots.get(name), result, pressed: name === state.focus, what: method(head) };
  });
  put("chips", chips, () => chips.map((chip) => html("button", {
    type: "button", class: "chip", "aria-pressed": String(chip.pressed), "data-key": chip.name,
    title: `Show ${chip.title} in detail`, onclick: () => { state.focus = chip.name; changed(); },
  }, swatch(color(chip.name), dash(chip.name)), html("span", { class: "name" }, chip.title),
  html("span", { class: "what" }, chip.title === chip.name ? chip.what : ""), html("b", {}, chip.result))));

  const words = state.filter.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const text = (run) => `${titleOf(run)} ${run.name} ${run.strategy} ${method(run)} ${run.status}`.toLowerCase();
  const rows = all.filter((run) => words.every((word) => text(run).includes(word))).sort(ORDERS[state.order].by);
  const full = state.shown.length >= MOST_SHOWN;
  put("choices", [rows.map((run) => [run.name, titleOf(run), run.status, resultOf(run)]), state.shown], () =>
    rows.length ? rows.map((run) => {
      const on = state.shown.includes(run.name);
      return html("label", { title: run.name }, html("input", {
        type: "checkbox", checked: on, disabled: (!on && full) || (on && state.shown.length === 1), "data-key": run.name,
        onchange: (event) => toggle(run.name, event.target.checked, changed),
      }), html("span", { class: "name" }, titleOf(run)), html("span", { class: "what" }, method(run)),
      html("span", { class: "what" }, run.status), html("b", {}, resultOf(run)));
    }) : html("p", { class: "nothing" }, "No run has all of these words in its name, method, data or state."));
  put("choose-title", [state.shown.length, all.length], () =>
    `Choose runs: ${state.shown.length} of ${all.length} shown${full ? `, ${MOST_SHOWN} at most` : ""}`);
  const first = rows.slice(0, MOST_SHOWN).map((run) => run.name);
  $("show-first").disabled = !first.length;
  $("show-first").textContent = rows.length > first.length ? `Show the first ${first.length}` : "Show all of these";
  $("show-first").onclick = () => { state.shown = first; changed(); };
  if (document.activeElement !== $("filter")) $("filter").value = state.filter;
  put("order", [state.order], () => Object.entries(ORDERS).map(([name, order]) =>
    html("option", { value: name, selected: name === state.order }, order.name)));
}

function toggle(name, on, changed) {
  state.shown = on ? [...state.shown, name] : state.shown.filter((other) => other !== name);
  changed();
}

export function listenToPicker(changed) {
  $("filter").addEventListener("input", () => { state.filter = $("filter").value; changed(); });
  $("order").addEventListener("change", () => { state.order = $("order").value; changed(); });
}
