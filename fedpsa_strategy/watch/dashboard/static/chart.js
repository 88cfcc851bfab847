// A chart that lives: it follows its model and its size, and answers pointer and keyboard.

import { html, svg, swatch } from "./charts.js";

const tooltip = () => document.getElementById("tooltip");

export class Chart {
  constructor(host, draw) {
    this.host = host;
    this.draw = draw;
    this.model = null;
    this.at = null; // where the pointer or the keyboard is, in pixels
    this.onZoom = null; // what is told the ends of a chosen part of the axis, or null for all of it
    this.from = null; // where a pointer that is held down began
    host.setAttribute("role", "img");
    host.addEventListener("pointermove", (event) => this.point(event));
    host.addEventListener("pointerdown", (event) => this.press(event));
    host.addEventListener("pointerup", (event) => this.release(event));
    host.addEventListener("pointercancel", () => { this.from = null; this.leave(); });
    host.addEventListener("dblclick", () => this.onZoom?.(null, null));
    host.addEventListener("pointerleave", () => this.leave());
    host.addEventListener("blur", () => this.leave());
    host.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.render()).observe(host);
  }

  // model: what the drawing takes, or { empty: "why there is nothing" }; label: the chart in words.
  update(model, label) {
    this.model = model;
    this.host.setAttribute("aria-label", model.empty ? `${label}: ${model.empty}` : label);
    if (model.empty) this.host.removeAttribute("tabindex");
    else this.host.tabIndex = 0;
    this.render();
  }

  render() {
    const [width, height] = [this.host.clientWidth, this.host.clientHeight];
    if (this.model === null || width < 40) return;
    if (this.model.empty) {
      this.targets = [];
      this.host.replaceChildren(html("p", { class: "nothing" }, this.model.empty));
      return;
    }
    const drawing = this.draw(this.model, width, height);
    this.targets = drawing.targets;
    this.area = drawing.area;
    this.value = drawing.value; // pixel -> value on the horizontal axis
    this.x = drawing.x;
    this.cursor = svg("g", { class: "cursor" });
    const tall = drawing.height ?? height;
    this.host.replaceChildren(
      svg("svg", { width, height: tall, viewBox: `0 0 ${width} ${tall}`, "aria-hidden": "true" }, ...drawing.nodes, this.cursor),
    );
    if (this.at !== null) this.show(this.nearest(...this.at));
  }

  nearest(x, y) {
    let best = -1;
    let least = Infinity;
    this.targets.forEach((target, i) => {
      const distance = Math.hypot(target.x - x, target.y === undefined ? 0 : target.y - y);
      if (distance < least) [best, least] = [i, distance];
    });
    return best;
  }

  point(event) {
    const box = this.host.getBoundingClientRect();
    this.at = [event.clientX - box.left, event.clientY - box.top];
    this.show(this.nearest(...this.at));
    if (this.from !== null) this.cursor.append(this.selection());
  }

  press(event) {
    this.point(event);
    if (!this.onZoom || !this.value || event.button) return;
    this.from = this.at[0];
    this.host.setPointerCapture(event.pointerId);
  }

  release(event) {
    if (this.from === null) return;
    this.point(event);
    const ends = [this.from, this.at[0]].map((place) => this.inside(place)).sort((a, b) => a - b);
    this.from = null;
    if (ends[1] - ends[0] > 6) this.onZoom(...ends.map(this.value));
  }

  inside(place) {
    return Math.min(Math.max(place, this.area.left), this.area.right);
  }

  selection() {
    const [from, to] = [this.from, this.at[0]].map((place) => this.inside(place)).sort((a, b) => a - b);
    return svg("rect", { x: from, width: to - from, y: this.area.top, height: this.area.bottom - this.area.top, class: "selection" });
  }

  // By keyboard: closer to where the cursor is, farther, or all.
  zoom(key) {
    const { low, high } = this.x;
    const centre = this.at === null ? (low + high) / 2 : this.value(this.inside(this.at[0]));
    const half = ((high - low) / 2) * (key === "-" ? 2 : 0.5);
    if (key === "0" || (key === "-" && centre - half <= 0)) return this.onZoom(null, null);
    return this.onZoom(Math.max(centre - half, 0), centre + half);
  }

  key(event) {
    const zooms = { "+": "+", "=": "+", "-": "-", 0: "0" };
    if (this.onZoom && this.value && event.key in zooms && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      return void this.zoom(zooms[event.key]);
    }
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const last = this.targets.length - 1;
    if (event.key === "Escape") return this.leave();
    if (last < 0 || !(event.key in steps || event.key === "Home" || event.key === "End")) return;
    event.preventDefault();
    const current = this.at === null ? last + 1 : this.nearest(...this.at);
    let next = event.key === "Home" ? 0 : event.key === "End" ? last : current + steps[event.key];
    next = Math.min(Math.max(next, 0), last);
    this.at = [this.targets[next].x, this.targets[next].y ?? 0];
    this.show(next);
  }

  // The numbers of the drawing as a table, its heads first.
  rows() {
    if (this.model.lines) {
      const smooth = this.model.lines.some((line) => line.raw);
      const heads = ["run", this.model.x.label, "value", "lowest", "highest", ...(smooth ? ["smoothed"] : [])];
      const x = { low: 0, ...this.model.x };
      return [heads, ...this.model.lines.flatMap((line) => (line.raw ?? line.points)
        .map((point, i) => [line.name, ...point, ...(smooth ? [line.points[i][1]] : [])])
        .filter((row) => row[1] >= x.low && row[1] <= x.high))];
    }
    const { groups, width } = this.model;
    return [["run", "staleness from", "to", "uploads"], ...groups.flatMap((group) =>
      group.counts.map((count, i) => [group.name, i * width, (i + 1) * width - 1, count]))];
  }

  legend() {
    return this.model.lines ?? this.model.groups ?? [];
  }

  leave() {
    if (this.from !== null) return;
    this.at = null;
    this.cursor?.replaceChildren();
    tooltip().hidden = true;
  }

  show(index) {
    const target = this.targets[index];
    if (!target) return this.leave();
    const nodes = [];
    if (target.y === undefined && this.area) {
      nodes.push(svg("line", { x1: target.x, x2: target.x, y1: this.area.top, y2: this.area.bottom }));
    } else if (target.y !== undefined && !target.marks?.length) {
      nodes.push(svg("circle", { cx: target.x, cy: target.y, r: 10 }));
    }
    for (const [x, y, color] of target.marks ?? []) nodes.push(svg("circle", { cx: x, cy: y, r: 5, fill: color }));
    this.cursor.replaceChildren(...nodes);
    const tip = tooltip();
    tip.replaceChildren(
      ...(target.title ? [html("strong", {}, target.title)] : []),
      ...target.lines.map((line) => html("div", {},
        line.color ? swatch(line.color, line.dash) : null,
        line.name ? html("span", { class: "who" }, line.name) : null,
        html("span", { class: "what" }, line.text),
      )),
    );
    tip.hidden = false;
    const box = this.host.getBoundingClientRect();
    const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
    const x = box.left + target.x + 14;
    const left = x + wide > innerWidth - 8 ? box.left + target.x - wide - 14 : x;
    const top = target.y === undefined ? Math.max(8, box.top + 8) : box.top + target.y - high - 12;
    tip.style.left = `${Math.max(8, Math.min(left, innerWidth - wide - 8))}px`;
    tip.style.top = `${top < 8 ? box.top + target.y + 16 : top}px`;
  }
}
