// Drawings as plain SVG: functions of a model and a size. Texts enter the page only as text nodes.

const SVG = "http://www.w3.org/2000/svg";

export function html(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// --- Numbers ------------------------------------------------------------------------------------

const plain = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const integer = (value) => (value === null ? "–" : plain.format(value));
export const fixed = (digits) => (value) =>
  value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−");
export const short = (value) => String(Number(value.toPrecision(3))).replace("-", "−");
export const percent = (value, digits = 1) =>
  value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;

// A rate in the unit in which a person can read it; as fedpsa_strategy/watch/rate.py has it.
export function rate(perSecond) {
  if (!perSecond || perSecond >= 0.1) return `${perSecond.toFixed(1)} /s`;
  if (perSecond * 60 >= 1) return `${(perSecond * 60).toFixed(1)} /min`;
  return `${(perSecond * 3600).toFixed(1)} /h`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit && value < 100 ? value.toFixed(1) : value.toFixed(0)} ${units[unit]}`;
}

export function duration(seconds, brief = false) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600 && brief) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

function ticks(low, high, wanted, whole = false, given = null) {
  const raw = (high - low) / Math.max(wanted, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = given ?? [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.75);
  if (whole) step = Math.max(1, Math.round(step));
  const values = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++) values.push(i * step + 0); // not −0
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return { values, step, digits: step / 10 ** -digits % 1 > 1e-6 ? digits + 1 : digits };
}

// --- The frame of a chart with axes -------------------------------------------------------------

// Returns the plot area with its scales and axes. `y` and `x` have low, high, label and format.
function frame(width, height, x, y) {
  const yTicks = ticks(y.low, y.high, 5, false, y.step);
  const yText = (value) => (y.format ? y.format(value, yTicks.digits) : value.toFixed(yTicks.digits).replace("-", "−"));
  const left = 10 + 6.4 * Math.max(...yTicks.values.map((value) => yText(value).length), 2);
  const area = { left, right: width - 12, top: 12, bottom: height - 36 };
  const px = (value) => area.left + ((value - x.low) / (x.high - x.low || 1)) * (area.right - area.left);
  const py = (value) => area.bottom - ((value - y.low) / (y.high - y.low || 1)) * (area.bottom - area.top);
  const axes = svg("g", { class: "axes" });
  for (const value of yTicks.values) {
    const at = py(value);
    axes.append(
      svg("line", { x1: area.left, x2: area.right, y1: at, y2: at, class: value === 0 ? "zero" : "" }),
      svg("text", { x: area.left - 6, y: at + 4, "text-anchor": "end" }, yText(value)),
    );
  }
  for (const [value, text] of xMarks(x, width)) {
    // A text at the right edge would be cut off in its middle.
    const anchor = px(value) > area.right - 8 ? "end" : "middle";
    axes.append(svg("text", { x: px(value) + (anchor === "end" ? 10 : 0), y: area.bottom + 17, "text-anchor": anchor }, text));
  }
  axes.append(
    svg("text", { x: (area.left + area.right) / 2, y: height - 4, "text-anchor": "middle", class: "name" }, x.label),
  );
  return { area, px, py, axes };
}

function xMarks(x, width) {
  if (x.marks) return x.marks;
  const { values, digits } = ticks(x.low, x.high, Math.max(2, Math.floor(width / 90)), x.whole);
  return values.map((value) => [value, x.format ? x.format(value) : value.toFixed(digits)]);
}

const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// --- Drawings: (model, width, height) -> { nodes, targets, height? } -----------------------------
// A target is what the tooltip can point at: { x, y?, lines, marks }.

// Lines over time. model.lines: [{ name, color, dash, points: [[x, y, low, high]] }].
export function lines(model, width, height) {
  const x = { low: 0, ...model.x };
  const all = model.lines.flatMap((line) => visible(line, x));
  const y = range(model, all.length ? all : [[0, 0, 0, 1]], height);
  const { area, px, py, axes } = frame(width, height, x, { ...model.y, ...y });
  const clip = `clip-${model.id}`;
  const curves = svg("g", { "clip-path": `url(#${clip})` });
  for (const line of model.lines) {
    const place = ([x, y]) => [px(x), py(y)];
    const points = line.points.map(place);
    if (line.raw) {
      const d = path(line.raw.map(place));
      curves.append(svg("path", { d, stroke: line.color, "stroke-dasharray": line.dash, class: "line raw" }));
    }
    if (line.points.some(([, , a, b]) => a !== b)) {
      const upper = line.points.map(([x, , , b]) => [px(x), py(b)]);
      const lower = line.points.map(([x, , a]) => [px(x), py(a)]).reverse();
      curves.append(svg("path", { d: `${path([...upper, ...lower])}Z`, fill: line.color, class: "band" }));
    }
    curves.append(
      svg("path", { d: path(points), stroke: line.color, "stroke-dasharray": line.dash, class: "line" }),
    );
    if (points.length) {
      const [x, y] = points.at(-1);
      curves.append(svg("circle", { cx: x, cy: y, r: 3.5, fill: line.color, class: "end" }));
    }
  }
  const box = svg("clipPath", { id: clip }, svg("rect", {
    x: area.left - 5, y: area.top - 6, width: area.right - area.left + 13, height: area.bottom - area.top + 8,
  }));
  const places = [...new Set(all.map((point) => Math.round(px(point[0]))))].sort((a, b) => a - b);
  const targets = places.map((place) => ({
    x: place,
    get lines() {
      return near(model, place, px).map(({ line, point }) => ({
        color: line.color, dash: line.dash, name: line.name,
        text: `${model.y.show(point[1])} at ${model.x.show(point[0])}${rawText(model, line, point)}`,
      }));
    },
    get marks() {
      return near(model, place, px).map(({ line, point }) => [px(point[0]), py(point[1]), line.color]);
    },
  }));
  const value = (place) => x.low + ((place - area.left) / (area.right - area.left)) * (x.high - x.low);
  return { nodes: [box, axes, curves], targets, area, value, x };
}

// The points between the ends of the axis.
const visible = (line, x) => line.points.filter(([at]) => at >= x.low && at <= x.high);

function rawText(model, line, point) {
  return line.raw ? ` (not smoothed ${model.y.show(line.raw[line.points.indexOf(point)][1])})` : "";
}

function near(model, place, px) {
  const found = [];
  for (const line of model.lines) {
    let best = null;
    for (const point of visible(line, { low: 0, ...model.x })) {
      const distance = Math.abs(px(point[0]) - place);
      if (best === null || distance <= best.distance) best = { line, point, distance };
    }
    if (best !== null && best.distance < 40) found.push(best);
  }
  return found;
}

// What the vertical axis spans: round numbers around the values, or close around the late ones.
function range(model, all, height) {
  let low = Math.min(...all.map((point) => point[2]));
  let high = Math.max(...all.map((point) => point[3]));
  if (model.fit) {
    const late = all.filter((point) => model.zoomed || point[0] >= model.x.high / 3).map((point) => point[1]);
    low = Math.min(...late);
    high = Math.max(...late);
    const margin = Math.max((high - low) * 0.06, 1e-3);
    return { low: low - margin, high: high + margin, step: null };
  }
  if (model.y.low !== undefined) low = Math.min(low, model.y.low);
  if (model.y.high !== undefined) high = Math.max(high, model.y.high);
  if (high - low < 1e-9) high = low + 1;
  const { step } = ticks(low, high, height < 220 ? 4 : 5);
  return { low: Math.floor(low / step + 1e-3) * step, high: Math.ceil(high / step - 1e-3) * step, step };
}

// Shares by value. model.groups: [{ name, color, counts }]; model.width: values per bar.
export function bars(model, width, height) {
  const count = Math.max(...model.groups.map((group) => group.counts.length));
  const totals = model.groups.map((group) => group.counts.reduce((a, b) => a + b, 0));
  const share = (group, i) => (model.groups[group].counts[i] ?? 0) / (totals[group] || 1);
  const top = Math.max(...model.groups.flatMap((group, g) => group.counts.map((_, i) => share(g, i))));
  const every = Math.ceil(count / Math.max(1, Math.floor(width / 44)));
  const title = (i) => (model.width === 1 ? `${i}` : `${i * model.width}–${(i + 1) * model.width - 1}`);
  const marks = [...Array(count).keys()].filter((i) => i % every === 0).map((i) => [i + 0.5, title(i)]);
  const y = range({ y: { low: 0 } }, [[0, top, 0, top]], height);
  const { area, px, py, axes } = frame(
    width, height, { low: 0, high: count, marks, label: "staleness in versions" },
    { ...y, format: (value) => `${Math.round(100 * value)} %` },
  );
  const nodes = [];
  const slot = (px(1) - px(0)) * 0.8;
  model.groups.forEach((group, g) => {
    for (let i = 0; i < count; i++) {
      const each = slot / model.groups.length;
      const x = px(i + 0.5) - slot / 2 + g * each;
      nodes.push(svg("rect", {
        x, y: py(share(g, i)), width: Math.max(each - 1, 1), height: area.bottom - py(share(g, i)),
        fill: group.color, rx: Math.min(2, each / 4),
      }));
    }
  });
  const targets = [...Array(count).keys()].map((i) => ({
    x: px(i + 0.5),
    title: `${title(i)} ${i === 1 && model.width === 1 ? "version" : "versions"} behind`,
    lines: model.groups.map((group, g) => ({
      color: group.color, name: group.name,
      text: `${percent(share(g, i))} (${integer(group.counts[i] ?? 0)} of ${integer(totals[g])})`,
    })),
  }));
  return { nodes: [axes, ...nodes], targets, area };
}

// Values of clients. model.points: [{ x, y, fresh, lines, title }], oldest first.
export function dots(model, width, height) {
  const values = model.points.map((point) => point.y);
  const y = range({ y: { high: 1 } }, values.map((value) => [0, value, value, value]), height);
  const { area, px, py, axes } = frame(
    width, height, { low: -0.5, high: model.count - 0.5, whole: true, label: "client" }, y,
  );
  const nodes = model.points.map((point) => svg("circle", {
    cx: px(point.x), cy: py(point.y), r: point.fresh ? 3.6 : 2.4, fill: model.color,
    class: point.fresh ? "dot fresh" : "dot",
  }));
  const targets = model.points
    .map((point) => ({ ...point, x: px(point.x), y: py(point.y), marks: [[px(point.x), py(point.y), model.color]] }))
    .sort((a, b) => a.x - b.x || a.y - b.y);
  return { nodes: [axes, ...nodes], targets, area };
}

// Weights of buffers. model.bars: [{ mark, parts: [{ size, title }], title, lines }].
export function stacks(model, width, height) {
  const sums = model.bars.map((bar) => bar.parts.reduce((a, b) => a + b, 0));
  const y = range({ y: { low: 0, high: 1 } }, sums.map((sum) => [0, sum, 0, sum]), height);
  const room = Math.max(1, Math.floor((width - 60) / 20));
  const shown = model.bars.slice(-room);
  const every = Math.ceil(shown.length / Math.max(1, Math.floor(width / 52)));
  const marks = shown.map((bar, i) => [i + 0.5, bar.mark]).filter((_, i) => (shown.length - 1 - i) % every === 0);
  const { area, px, py, axes } = frame(
    width, height, { low: 0, high: Math.max(shown.length, 8), marks, label: "version made of the buffer" }, y,
  );
  const nodes = [];
  const targets = shown.map((bar, i) => {
    const slot = (px(1) - px(0)) * 0.78;
    const mean = bar.parts.reduce((a, b) => a + b, 0) / bar.parts.length;
    let base = 0;
    for (const part of bar.parts) {
      const [from, to] = [py(base), py(base + part)];
      const place = { x: px(i + 0.5) - slot / 2, y: to + 0.75, width: slot, height: Math.max(from - to - 1.5, 0.5), rx: 1.5 };
      const opacity = Math.min(1, Math.max(0.12, 0.55 * (part / mean) ** 1.5)).toFixed(2);
      nodes.push(
        svg("rect", { ...place, class: "under" }), // no line of the axes shines through
        svg("rect", { ...place, fill: model.color, "fill-opacity": opacity }),
      );
      base += part;
    }
    return { x: px(i + 0.5), title: bar.title, lines: bar.lines };
  });
  return { nodes: [axes, ...nodes], targets, area };
}

// One small square per client. model.cells: [{ state, title, lines }].
export function cells(model, width) {
  const size = model.cells.length > 250 ? 12 : 20;
  const columns = Math.max(1, Math.floor((width - 4) / size));
  const nodes = [];
  const targets = model.cells.map((cell, i) => {
    const x = 2 + (i % columns) * size;
    const y = 2 + Math.floor(i / columns) * size;
    nodes.push(square(cell.state, x, y, size - 4));
    return { ...cell, x: x + size / 2 - 2, y: y + size / 2 - 2, marks: [] };
  });
  return { nodes, targets, height: 4 + Math.ceil(model.cells.length / columns) * size };
}

// States differ by shape as well as by colour.
export function square(state, x, y, size) {
  const group = svg("g", { class: `cell ${state}` }, svg("rect", { x, y, width: size, height: size, rx: size / 5 }));
  if (state === "buffered") group.append(svg("rect", { x, y: y + size / 2, width: size, height: size / 2, rx: size / 5, class: "half" }));
  if (state === "overdue") group.append(svg("path", { d: `M${x + size / 2} ${y + size * 0.2}V${y + size * 0.6}M${x + size / 2} ${y + size * 0.72}V${y + size * 0.84}` }));
  if (state === "paused") {
    const [a, b] = [size * 0.28, size * 0.72];
    group.append(svg("path", { d: `M${x + a} ${y + a}L${x + b} ${y + b}M${x + b} ${y + a}L${x + a} ${y + b}` }));
  }
  return group;
}

export function swatch(color, dash) {
  return svg("svg", { class: "swatch", width: 20, height: 8, "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 19, y1: 4, y2: 4, stroke: color, "stroke-dasharray": dash }));
}
