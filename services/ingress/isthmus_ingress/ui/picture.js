// The cluster as a picture: nodes with their workers, left those that prefill, right those that decode, lanes between.
const SVG = "http://www.w3.org/2000/svg";
const VENDORS = ["nvidia", "amd", "cpu"];
const NODE_W = 330, ROW_H = 46, HEAD_H = 52, GAP = 22, WIDTH = 1060;

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") element.style.cssText = value; // as an attribute the page's policy would refuse it
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (count >= 1024 && step < units.length - 1) { count /= 1024; step += 1; }
  return `${count.toFixed(count < 10 && step > 0 ? 1 : 0)} ${units[step]}`;
}

// Nodes with their workers and relay; `rates` gives each relay's bytes per second, by incarnation.
export function nodesOf(cluster, rates) {
  const nodes = new Map();
  const node = (id) => {
    if (!nodes.has(id)) nodes.set(id, { id, workers: [], relay: null, sent: 0, received: 0 });
    return nodes.get(id);
  };
  for (const worker of cluster.workers) node(worker.node_id).workers.push(worker);
  for (const relay of cluster.relays) {
    const rate = rates.get(relay.incarnation) ?? { sent: 0, received: 0 };
    Object.assign(node(relay.relay.node_id), { relay, ...rate });
  }
  return [...nodes.values()].sort((a, b) => a.id.localeCompare(b.id));
}

export function picture(nodes) {
  const decodes = (node) => node.workers.some((worker) => worker.roles.includes("decode"));
  const left = nodes.filter((node) => !decodes(node)), right = nodes.filter(decodes);
  const height = Math.max(columnHeight(left), columnHeight(right), 80);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": inWords(nodes) });
  const places = new Map();
  place(left, 0, height, places);
  place(right, WIDTH - NODE_W, height, places);
  for (const from of nodes) {
    for (const to of nodes) {
      if (from.relay && to.relay && left.includes(from) && right.includes(to)) drawing.append(lane(places.get(from), places.get(to)));
    }
  }
  for (const one of nodes) drawing.append(box(one, places.get(one)));
  return drawing;
}

function size(node) { return HEAD_H + Math.max(1, node.workers.length) * ROW_H; }
function columnHeight(column) { return column.reduce((sum, node) => sum + size(node) + GAP, -GAP) + 4; }

function place(column, x, height, places) {
  let y = (height - columnHeight(column)) / 2 + 2;
  for (const node of column) {
    places.set(node, { x, y, h: size(node), node });
    y += size(node) + GAP;
  }
}

function lane(from, to) {
  const live = from.node.sent > 0 && to.node.received > 0;
  const y1 = from.y + from.h / 2, y2 = to.y + to.h / 2, x1 = NODE_W, x2 = WIDTH - NODE_W, middle = (x1 + x2) / 2;
  return svg("path", { class: live ? "lane live" : "lane", d: `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` });
}

function box(node, { x, y, h }) {
  const vendor = node.workers[0]?.vendor ?? "cpu";
  const color = `var(--${VENDORS.includes(vendor) ? vendor : "other"})`;
  const group = svg("g", { transform: `translate(${x} ${y})` });
  group.append(svg("rect", { class: "box", width: NODE_W, height: h, rx: 8 }));
  group.append(svg("rect", { width: 5, height: h, rx: 2, style: `fill: ${color}` }));
  group.append(text(16, 20, `${node.id} · ${vendor}`));
  group.append(text(16, 40, relayLine(node), "soft"));
  node.workers.forEach((worker, row) => group.append(workerRow(worker, HEAD_H + row * ROW_H, color)));
  return group;
}

function relayLine(node) {
  if (!node.relay) return "no relay: serves alone";
  const used = node.relay.pool_bytes - node.relay.pool_free_bytes;
  return `relay: ↑ ${bytes(node.sent)}/s  ↓ ${bytes(node.received)}/s  staging ${bytes(used)} of ${bytes(node.relay.pool_bytes)}`;
}

function workerRow(worker, y, color) {
  const load = worker.load, total = load.kv_blocks_total || 1;
  const used = (load.kv_blocks_total - load.kv_blocks_free) / total, width = NODE_W - 32;
  const queue = load.waiting + load.loading;
  const group = svg("g", {});
  group.append(text(16, y + 14, `${worker.worker_id} (${worker.roles.join(", ") || "no role"}) ${worker.state === "ready" ? "" : worker.state}`));
  group.append(text(NODE_W - 16, y + 14, `${load.running} running, ${queue} queued`, "soft", "end"));
  group.append(svg("rect", { class: "bar", x: 16, y: y + 20, width, height: 6, rx: 3 }));
  group.append(svg("rect", { x: 16, y: y + 20, width: Math.max(0, used * width), height: 6, rx: 3, style: `fill: ${color}` }));
  group.append(text(16, y + 38, `${worker.kv_layout} · KV ${Math.round(used * 100)} %`, "soft"));
  return group;
}

function text(x, y, words, style = "", anchor = "start") {
  return svg("text", { x, y, class: style, "text-anchor": anchor }, words);
}

function inWords(nodes) {
  const parts = nodes.map((node) => {
    const workers = node.workers.map((w) => `${w.worker_id}, ${w.roles.join(" and ")}, ${w.load.running} running`).join("; ");
    return `node ${node.id}: ${workers || "no worker"}`;
  });
  return `${nodes.length} nodes. ${parts.join(". ")}`;
}
