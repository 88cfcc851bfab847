// A chart as a file: its numbers as CSV, or the drawing as PNG.

import { svg } from "./charts.js";

const SCALE = 2; // pixels of the picture per pixel of the page
const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "opacity",
  "font-family", "font-size", "font-weight", "text-anchor", "visibility",
];

export function saveCsv(chart, title) {
  const rows = chart.model?.empty ? [] : chart.rows();
  if (!rows.length) return;
  const text = rows.map((row) => row.map(field).join(",")).join("\r\n");
  download(new Blob(["\ufeff", text, "\r\n"], { type: "text/csv" }), `${fileName(title)}.csv`);
}

function field(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export async function savePng(chart, title) {
  const drawing = chart.host.querySelector("svg");
  if (!drawing) return;
  const [width, height] = [drawing.clientWidth, drawing.clientHeight];
  const page = getComputedStyle(document.documentElement);
  const panel = getComputedStyle(chart.host.closest(".panel"));
  const text = { "font-family": page.fontFamily, fill: page.color };
  const names = chart.legend();
  const [top, line] = [34, 20];
  const tall = height + top + names.length * line + 12;
  const picture = svg("svg", { width: width + 24, height: tall, viewBox: `0 0 ${width + 24} ${tall}` },
    svg("rect", { width: "100%", height: "100%", fill: panel.backgroundColor }),
    svg("text", { x: 14, y: 23, "font-size": 15, "font-weight": 600, ...text }, title));
  const copy = plain(drawing);
  copy.setAttribute("x", 12);
  copy.setAttribute("y", top);
  picture.append(copy);
  names.forEach(({ name, color, dash }, i) => {
    const y = top + height + i * line + 10;
    const stroke = resolved(color, chart.host);
    picture.append(
      svg("line", { x1: 14, x2: 38, y1: y, y2: y, stroke, "stroke-width": 2.5, "stroke-dasharray": dash }),
      svg("text", { x: 46, y: y + 4, "font-size": 12.5, ...text }, name),
    );
  });
  const markup = new XMLSerializer().serializeToString(picture);
  const address = URL.createObjectURL(new Blob([markup], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [(width + 24) * SCALE, tall * SCALE];
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => download(blob, `${fileName(title)}.png`), "image/png");
  } finally {
    URL.revokeObjectURL(address);
  }
}

// A copy that looks the same without the page's style sheet.
function plain(node) {
  const copy = node.cloneNode(false);
  const style = node instanceof Element ? getComputedStyle(node) : null;
  if (style && !["clipPath", "rect"].includes(node.parentNode?.tagName) && node.tagName !== "clipPath") {
    for (const name of STYLES) copy.setAttribute(name, style.getPropertyValue(name));
  }
  for (const child of node.childNodes) {
    if (child.nodeType !== Node.ELEMENT_NODE || !child.classList.contains("cursor")) copy.append(plain(child));
  }
  return copy;
}

function resolved(color, host) {
  const probe = svg("line", { stroke: color });
  const drawing = host.querySelector("svg");
  drawing.append(probe);
  const stroke = getComputedStyle(probe).stroke;
  probe.remove();
  return stroke;
}

const fileName = (title) => title.toLowerCase().replaceAll(/[^\p{L}\p{N}]+/gu, "-").replaceAll(/^-|-$/g, "");

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
