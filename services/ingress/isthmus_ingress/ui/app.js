// Asks the ingress for its state once a second and draws it; the chat box is an ordinary client of the API.
import { bytes, nodesOf, picture } from "./picture.js";
import { plot, quantile } from "./plots.js";

const PERIOD_MS = 1000, SPAN_S = 120, WINDOW = 10;
const $ = (id) => document.getElementById(id);
const history = { ttft50: [], ttft99: [], predicted: [], itl50: [], itl99: [], tokens: [], kv: [] };
const snapshots = [];
let key = sessionStorage.getItem("isthmus-key") ?? "";

const seconds = (value) => (value < 0.1 ? `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);
const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

async function refresh() {
  let response;
  try {
    response = await fetch("/ui/state", { headers: headers() });
  } catch {
    return say("The ingress does not answer.", true);
  }
  $("key-form").hidden = response.status !== 401;
  if (!response.ok) {
    const body = await response.json().catch(() => ({}));
    return say(body.error?.message ?? `HTTP ${response.status}`, true);
  }
  take({ ...(await response.json()), at: performance.now() / 1000 });
}

function take(state) {
  const before = snapshots[snapshots.length - 1], window = snapshots[Math.max(0, snapshots.length - WINDOW)];
  snapshots.push(state);
  if (snapshots.length > WINDOW + 1) snapshots.shift();
  const rates = relayRates(before, state);
  record(window, before, state, rates);
  summary(state);
  if (state.cluster) $("cluster").replaceChildren(picture(nodesOf(state.cluster, rates)));
  draw();
  requests(state);
}

function record(window, before, state, rates) {
  const add = (name, value) => {
    history[name].push([state.at, value]);
    if (history[name].length > SPAN_S + 5) history[name].shift();
  };
  const { ttft, itl, predicted_ttft: predicted } = state.latency, old = window?.latency;
  add("ttft50", quantile(0.5, old?.ttft, ttft));
  add("ttft99", quantile(0.99, old?.ttft, ttft));
  add("predicted", quantile(0.5, old?.predicted_ttft, predicted));
  add("itl50", quantile(0.5, old?.itl, itl));
  add("itl99", quantile(0.99, old?.itl, itl));
  const passed = before ? state.at - before.at : 0;
  add("tokens", passed ? Math.max(0, state.tokens_out - before.tokens_out) / passed : null);
  add("kv", passed ? [...rates.values()].reduce((sum, rate) => sum + rate.received, 0) : null);
}

function relayRates(before, state) {
  const rates = new Map();
  for (const relay of state.cluster?.relays ?? []) {
    const old = before?.cluster?.relays.find((one) => one.incarnation === relay.incarnation);
    const passed = before ? state.at - before.at : 0;
    const per = (name) => (old && passed ? Math.max(0, relay[name] - old[name]) / passed : 0);
    rates.set(relay.incarnation, { sent: per("sent_bytes"), received: per("received_bytes") });
  }
  return rates;
}

function draw() {
  const series = (name, label, color, dashed = false) => ({ name: label, color: `var(--${color})`, points: history[name], dashed });
  plot($("ttft"), "Time to first token", [series("ttft50", "p50", "p50"), series("ttft99", "p99", "p99"), series("predicted", "predicted p50", "third", true)], SPAN_S, seconds);
  plot($("itl"), "Inter-token latency", [series("itl50", "p50", "p50"), series("itl99", "p99", "p99")], SPAN_S, seconds);
  plot($("tokens"), "Output tokens per second", [series("tokens", "tokens/s", "p50")], SPAN_S, (value) => value.toFixed(0));
  plot($("kv"), "KV between nodes", [series("kv", "bytes/s", "p50")], SPAN_S, (value) => `${bytes(value)}/s`, 1024);
}

function summary(state) {
  if (!state.cluster) return say(state.problem ?? "Nothing is known yet.", true);
  const ready = state.cluster.workers.filter((worker) => worker.state === "ready").length;
  const models = [...new Set(state.cluster.workers.map((worker) => worker.model))].join(", ");
  const text = `${models || "no model"} · ${ready} of ${state.cluster.workers.length} workers ready · ${state.requests_running} requests running`;
  const stale = state.problem ? ` · ${state.problem} (shown: ${state.cluster_age_s.toFixed(0)} s old)` : "";
  say(text + stale, Boolean(state.problem));
}

function say(text, problem) {
  if ($("summary").textContent !== text) $("summary").textContent = text;
  $("summary").classList.toggle("problem", problem);
}

const COLUMNS = [
  ["request", (r) => r.id], ["state", (r) => r.state], ["mode", (r) => r.mode ?? ""],
  ["prefill", (r) => r.prefill ?? ""], ["decode", (r) => r.decode ?? ""],
  ["prompt", (r) => r.isl_tokens, true], ["output", (r) => r.osl_tokens, true],
  ["age", (r) => seconds(r.age_s), true], ["attempts", (r) => r.attempts, true],
];

function requests(state) {
  if (!state.requests.length) return void $("requests").replaceChildren("None.");
  const cell = (tag, value, number) => Object.assign(document.createElement(tag), { textContent: value, className: number ? "number" : "" });
  const row = (tag, values) => { const tr = document.createElement("tr"); tr.append(...values.map(([value, number]) => cell(tag, value, number))); return tr; };
  const table = document.createElement("table"), head = document.createElement("thead"), body = document.createElement("tbody");
  head.append(row("th", COLUMNS.map(([name, , number]) => [name, number])));
  body.append(...state.requests.map((one) => row("td", COLUMNS.map(([, value, number]) => [value(one), number]))));
  table.append(head, body);
  $("requests").replaceChildren(table);
}

let running = null;

async function chat(event) {
  event.preventDefault();
  const words = $("chat-input").value.trim();
  if (!words || running) return;
  running = new AbortController();
  $("chat-stop").disabled = false;
  $("chat-input").value = "";
  line("you", words);
  const answer = line("answer", "");
  try {
    await answerInto(answer, words, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") line("error", error.message);
  } finally {
    running = null;
    $("chat-stop").disabled = true;
    $("chat-input").focus();
  }
}

async function answerInto(answer, words, signal) {
  const model = snapshots[snapshots.length - 1]?.cluster?.workers[0]?.model;
  const body = JSON.stringify({ model, messages: [{ role: "user", content: words }], max_tokens: 200, stream: true });
  const response = await fetch("/v1/chat/completions", { method: "POST", signal, headers: { "content-type": "application/json", ...headers() }, body });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const data of lines.filter((one) => one.startsWith("data: ")).map((one) => one.slice(6))) {
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      answer.textContent += event.choices[0]?.delta.content ?? "";
      $("chat-log").scrollTop = $("chat-log").scrollHeight;
    }
  }
}

function line(kind, words) {
  const paragraph = Object.assign(document.createElement("p"), { className: kind, textContent: words });
  $("chat-log").append(paragraph);
  return paragraph;
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("isthmus-theme", name);
}

theme(localStorage.getItem("isthmus-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("isthmus-key", key);
  refresh();
});
$("chat-form").addEventListener("submit", chat);
$("chat-stop").addEventListener("click", () => running?.abort());

for (;;) {
  if (!document.hidden) await refresh();
  await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
}
