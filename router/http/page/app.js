// The page fetches one JSON object a second and shows it. The history of the charts is kept here.
"use strict";

const PERIOD = 1000, POINTS = 120;
const byId = (id) => document.getElementById(id);
const history = new Map();
let previous = null, answeredAt = 0;

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const whole = new Intl.NumberFormat("en");
const milliseconds = (s) => (s >= 10 ? `${s.toFixed(1)} s` : s >= 1 ? `${s.toFixed(2)} s` : `${(s * 1000).toFixed(s < 0.1 ? 1 : 0)} ms`);
// One unit, rounded down: 42 s, 7 min, 3 h, 12 d.
const duration = (s) => (s < 60 ? `${Math.floor(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min` : s < 86400 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 86400)} d`);
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const bytes = (n) => (n >= 2 ** 30 ? `${(n / 2 ** 30).toFixed(1)} GiB` : `${(n / 2 ** 20).toFixed(0)} MiB`);
const badgeClass = (state) => (state === "serving" ? "badge good" : ["lost", "unavailable", "unreachable"].includes(state) ? "badge bad" : "badge");

function remember(name, value) {
  const points = history.get(name) ?? [];
  points.push(value);
  if (points.length > POINTS) points.shift();
  history.set(name, points);
  return points;
}

// Returns the child of `parent` with this key; `build` makes it the first time. Nodes are reused, so that the page does
// not jump and keeps its scroll position and focus.
function keyed(parent, key, build) {
  let node = parent.querySelector(`:scope > [data-key="${CSS.escape(key)}"]`);
  if (!node) {
    node = build();
    node.dataset.key = key;
    parent.append(node);
  }
  return node;
}

function keepOnly(parent, keys) {
  for (const node of [...parent.children]) if (!keys.has(node.dataset.key)) node.remove();
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function chart() {
  const name = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(name, "svg");
  svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 36`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  for (const kind of ["area", "line"]) {
    const path = document.createElementNS(name, "path");
    path.setAttribute("class", kind);
    svg.append(path);
  }
  return svg;
}

function draw(svg, points, label) {
  const top = Math.max(...points, 1e-9), left = POINTS - points.length;
  const at = points.map((value, i) => `${left + i},${(34 - (32 * value) / top).toFixed(1)}`);
  svg.children[1].setAttribute("d", `M${at.join("L")}`);
  svg.children[0].setAttribute("d", `M${left},36L${at.join("L")}L${POINTS - 1},36Z`);
  svg.setAttribute("aria-label", label);
}

function showTile(name, value, unit, number) {
  const tile = keyed(byId("tiles"), name, () => {
    const figures = make("dl", {}, make("dt", {}, name), make("dd", {}, make("span"), make("small")));
    return make("div", { class: "tile" }, figures, chart());
  });
  setText(tile.querySelector("span"), value);
  setText(tile.querySelector("small"), unit);
  const points = remember(name, number);
  draw(tile.querySelector("svg"), points, `${name}: now ${value} ${unit}, at most ${whole.format(Math.round(100 * Math.max(...points)) / 100)} since the page was opened`);
}

function showLatency(name, words, latency) {
  const row = keyed(byId("latencies"), name, () => make("tr", {}, make("th", { scope: "row" }, words), make("td"), make("td"), make("td"), make("td")));
  const cells = latency.count ? [latency.p50, latency.p90, latency.p99].map(milliseconds) : ["–", "–", "–"];
  [...cells, whole.format(latency.count)].forEach((text, i) => setText(row.children[i + 1], text));
}

function showTier(card, tier, parts, total) {
  const row = keyed(card, `tier-${tier}`, () => {
    const bar = make("div", { class: "bar", role: "img" });
    for (const kind of Object.keys(parts)) bar.append(make("i", { class: kind }));
    return make("div", { class: "tier" }, make("span", {}, tier), bar, make("span", { class: "share" }));
  });
  const bar = row.children[1], taken = Object.values(parts).reduce((sum, count) => sum + count, 0);
  Object.entries(parts).forEach(([kind, count]) => { bar.querySelector(`.${kind}`).style.width = `${(100 * count) / Math.max(total, 1)}%`; });
  const counts = Object.entries(parts).map(([kind, count]) => `${whole.format(count)} ${kind === "used" ? "in use" : kind}`);
  bar.setAttribute("aria-label", `${tier} blocks: ${counts.join(", ")}, of ${whole.format(total)}`);
  bar.title = bar.getAttribute("aria-label");
  setText(row.children[2], total ? `${whole.format(taken)} / ${whole.format(total)}` : "off");
}

function showGroup(group) {
  const card = keyed(byId("cards"), group.name, () => {
    const facts = make("dl", { class: "facts" });
    for (const fact of ["running", "waiting", "hits", "step", "up for", "restarts"]) facts.append(make("div", {}, make("dt", {}, fact), make("dd")));
    return make("article", { class: "card", "aria-label": group.name },
      make("h3", {}, make("span", {}, group.name), make("span", { class: "badge" })),
      make("p", { class: "reason", hidden: "" }), facts, make("ul", { class: "ranks", "aria-label": "ranks" }));
  });
  const badge = card.querySelector("h3 .badge");
  setText(badge, group.state);
  badge.className = badgeClass(group.state);
  const reason = card.querySelector(".reason");
  setText(reason, group.reason);
  reason.hidden = !group.reason;
  const facts = [whole.format(group.running), whole.format(group.waiting), percent(group.hit_ratio), group.step_seconds ? milliseconds(group.step_seconds) : "–", group.uptime_seconds ? duration(group.uptime_seconds) : "–", whole.format(group.restarts)];
  card.querySelectorAll("dd").forEach((node, i) => setText(node, facts[i]));
  showTier(card, "device", { used: group.device.used, cached: group.device.cached }, group.device.total);
  showTier(card, "host", { cached: group.host.used }, group.host.total);
  const list = card.querySelector(".ranks");
  for (const rank of group.ranks) {
    const item = keyed(list, String(rank.rank), () => make("li"));
    setText(item, `rank ${rank.rank}`);
    item.className = rank.healthy ? "" : "ill";
    item.title = `${rank.healthy ? "healthy" : "not healthy"}, on ${rank.node}, pid ${rank.pid}, ${whole.format(rank.steps)} steps, at most ${bytes(rank.peak_memory_bytes)}`;
    item.setAttribute("aria-label", `rank ${rank.rank}: ${item.title}`);
  }
  keepOnly(list, new Set(group.ranks.map((rank) => String(rank.rank))));
}

function show(state) {
  const seconds = previous ? state.time - previous.time : 0;
  const rate = previous && seconds > 0 ? Math.max(state.generated_tokens - previous.generated_tokens, 0) / seconds : 0;
  setText(byId("router"), state.router);
  setText(byId("model"), state.model.name ? `${state.model.name} · ${state.model.dtype}, KV in ${state.model.kv_dtype} · blocks of ${state.model.block_size} tokens` : "no group has registered yet");
  setText(byId("state"), state.state);
  byId("state").className = badgeClass(state.state);
  document.title = `Coatcheck · ${state.state}`;
  setText(byId("settings"), state.configuration ? `Settings: ${state.configuration}` : "");
  byId("settings").hidden = !state.configuration;
  const ended = state.outcomes.map((one) => `${whole.format(one.count)} ${one.outcome}`);
  const serving = state.groups.filter((group) => group.state === "serving").length;
  setText(byId("outcomes"), `${serving} of ${state.groups.length} groups serve. Requests of the last five minutes: ${ended.join(", ") || "none"}.`);
  showTile("Tokens a second", whole.format(Math.round(rate)), "", rate);
  showTile("Running", whole.format(state.running), "sequences", state.running);
  const waiting = state.waiting + state.queued;
  showTile("Queue", whole.format(waiting), waiting && state.queue_seconds ? `waiting, for up to ${milliseconds(state.queue_seconds)}` : "waiting", waiting);
  showTile("Hit ratio", percent(state.hit_ratio), "of prompts", state.hit_ratio);
  showTile("TTFT", state.latencies.ttft.count ? milliseconds(state.latencies.ttft.p50) : "–", "p50", state.latencies.ttft.p50);
  showTile("ITL", state.latencies.itl.count ? milliseconds(state.latencies.itl.p50) : "–", "p50", state.latencies.itl.p50);
  showLatency("ttft", "Time to first token", state.latencies.ttft);
  showLatency("tpot", "Time per output token", state.latencies.tpot);
  showLatency("itl", "Between deltas (ITL)", state.latencies.itl);
  showLatency("queue", "Queue", state.latencies.queue);
  state.groups.forEach(showGroup);
  keepOnly(byId("cards"), new Set(state.groups.map((group) => group.name)));
  previous = state;
}

// An absolute URL without credentials: fetch() refuses a relative one if the page's own URL has a name and a key. The
// page's path may have the prefix of a proxy.
async function fetchState() {
  const answer = await fetch(new URL("dashboard/state", location.origin + location.pathname), { cache: "no-store", signal: AbortSignal.timeout(10 * PERIOD) });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

async function refresh() {
  try {
    if (!document.hidden) {
      show(await fetchState());
      answeredAt = Date.now();
      setText(byId("age"), "");
    }
  } catch (error) {
    setText(byId("state"), "unreachable");
    byId("state").className = badgeClass("unreachable");
    setText(byId("age"), answeredAt ? `No answer for ${Math.round((Date.now() - answeredAt) / 1000)} s: ${error.message}.` : `No answer yet: ${error.message}.`);
  }
  setTimeout(refresh, PERIOD);
}

const THEMES = ["system", "light", "dark"];
function applyTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
  localStorage.setItem("theme", theme);
}
byId("theme").addEventListener("click", () => {
  const now = localStorage.getItem("theme") ?? "system";
  applyTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
applyTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "system");
refresh();
