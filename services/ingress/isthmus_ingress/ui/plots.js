// Small live line plots, and quantiles out of the counts of a histogram's buckets.
import { svg } from "./picture.js";

const WIDTH = 420, HEIGHT = 150, LEFT = 68, BOTTOM = 20, TOP = 8;

// The value below which `share` of what was counted between two snapshots lies; null if nothing was counted.
export function quantile(share, older, newer) {
  const counts = newer.count.map((count, at) => count - (older ? older.count[at] : 0));
  const all = counts[counts.length - 1];
  if (!(all > 0)) return null;
  const wanted = share * all;
  const at = counts.findIndex((count) => count >= wanted);
  const upper = newer.le[at];
  if (upper === null) return newer.le[at - 1];
  const lower = at ? newer.le[at - 1] : 0, below = at ? counts[at - 1] : 0;
  return lower + (upper - lower) * (wanted - below) / Math.max(counts[at] - below, 1e-9);
}

// `series`: [{name, color, points: [[t_s, value or null], ...]}]; `format` writes a value; `base`: of its units.
export function plot(holder, title, series, spanS, format, base = 10) {
  const now = Math.max(...series.flatMap((one) => one.points.map(([t]) => t)), 0);
  const values = series.flatMap((one) => one.points.map(([, value]) => value)).filter((value) => value !== null);
  const top = nice(Math.max(...values, 0), base);
  const x = (t) => LEFT + (WIDTH - LEFT - 4) * (1 - (now - t) / spanS);
  const y = (value) => TOP + (HEIGHT - BOTTOM - TOP) * (1 - value / top);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": inWords(title, series, format) });
  for (const value of [0, top / 2, top]) {
    drawing.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - 4, y1: y(value), y2: y(value) }));
    drawing.append(svg("text", { class: "soft", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  drawing.append(svg("text", { class: "soft", x: LEFT, y: HEIGHT - 4 }, `${spanS} s ago`));
  drawing.append(svg("text", { class: "soft", x: WIDTH - 4, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  for (const one of series) drawing.append(line(one, x, y, now - spanS));
  const legend = document.createElement("p");
  legend.className = "legend";
  for (const one of series) {
    const mark = document.createElement("b");
    mark.style.color = one.color;
    mark.textContent = `— ${one.name} `;
    legend.append(mark, `${lastOf(one) === null ? "none yet" : format(lastOf(one))}   `);
  }
  holder.replaceChildren(drawing, legend);
}

function line(one, x, y, sinceS) {
  let path = "", pen = "M";
  for (const [t, value] of one.points) {
    if (value === null || t < sinceS) { pen = "M"; continue; }
    path += `${pen}${x(t).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  }
  const dash = one.dashed ? { "stroke-dasharray": "5 4" } : {};
  return svg("path", { d: path, fill: "none", style: `stroke: ${one.color}`, "stroke-width": 2, "stroke-linecap": "round", ...dash });
}

function lastOf(one) {
  for (let at = one.points.length - 1; at >= 0; at -= 1) if (one.points[at][1] !== null) return one.points[at][1];
  return null;
}

function inWords(title, series, format) {
  return `${title}. ${series.map((one) => `${one.name}: ${lastOf(one) === null ? "none yet" : format(lastOf(one))}`).join("; ")}`;
}

function nice(value, base) {
  if (!(value > 0)) return 1;
  const unit = base ** Math.floor(Math.log(value) / Math.log(base));
  const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000];
  return unit * (steps.find((step) => step * unit >= value * 1.05) ?? steps.at(-1));
}
