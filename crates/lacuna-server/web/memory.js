// The memory map: whose every byte is, beside the budget and what reserving whole contexts would take;
// and the pages of every request, square by square.

import { request } from "./api.js";
import { button, element, make } from "./dom.js";
import { bytes, perSecond, plural } from "./units.js";

const PERIOD_MS = 400;
const CELL = 9;
const GAP = 2;
// Of a page group that has come since the last picture, for this long.
const FRESH_MS = 700;

/** What bytes are: a name, and what frees them. */
const SAID = {
  unique: ["In use by one request", "freed when it ends"],
  shared: ["Shared by several requests", "held once; freed with the last of them"],
  cached: ["Kept for reuse", "prompts that begin alike start from it; given up when room is needed"],
};
const ELSE = {
  slack: ["Mapped ahead", "the unwritten rest of last pages; filled by the next tokens"],
  idle: ["Idle pages", "mapped by nobody; used next, or given back to the system"],
  working: ["Working memory", "for one step and for requests that are read"],
  program: ["Program and vocabulary", "for as long as the server runs"],
  weights: ["Weights in memory", "read, copied or converted; those that are read give way to pages of requests"],
  pooled: ["Models that make embeddings", "unloaded when nobody uses them, or another model needs the room"],
  streaming: ["Ring and rows of weights", "the other weights go through it in each pass"],
  free: ["Free", "for more tokens"],
};
const KINDS = { ...SAID, ...ELSE };
const STATES = { shared: "shared", cached: "kept for reuse", unique: "of this request alone", partial: "filled in part" };
let last = null;
const rows = new Map();

export function start() {
  poll();
}

async function poll() {
  if (!document.hidden) {
    try {
      const map = joined(await (await request("/memory")).json());
      element("lost").hidden = true;
      draw(map);
    } catch {
      element("lost").hidden = false;
    }
  }
  setTimeout(poll, PERIOD_MS);
}

/** What a server of several models says, as if it had one: sums of what is loaded, and every model's requests. */
function joined(map) {
  if (!map.models) return map;
  const loaded = map.models.filter((model) => model.memory).map((model) => model.memory);
  const { limit_bytes: requests } = map.request_memory;
  const pooled = map.models.filter((model) => !model.memory);
  const all = loaded.reduce(sum, EMPTY);
  const sessions = loaded.flatMap(({ model, pages, sessions }) => sessions.map((one) => ({ ...one, model, pages })));
  return {
    ...all,
    budget: {
      ...all.budget,
      budget_bytes: map.budget_bytes,
      beyond_plan_bytes: map.beyond_plan_bytes,
      request_bytes: requests,
      program_bytes: map.base_bytes - requests,
    },
    pooled_bytes: pooled.reduce((bytes, model) => bytes + model.share_bytes, 0),
    pages: loaded[0]?.pages ?? { group_bytes: 0 },
    sessions,
    models: map.models,
  };
}

const EMPTY = {
  waiting: 0,
  ledger: { pinned_bytes: 0, pinned_only_bytes: 0, shared_bytes: 0, unique_bytes: 0, idle_bytes: 0, retiring_bytes: 0, committed_bytes: 0 },
  budget: {
    activation_bytes: 0, vocabulary_bytes: 0, constraint_bytes: 0, thread_bytes: 0, sampling_bytes: 0, copied_weight_bytes: 0,
    converted_weight_bytes: 0, mapped_weight_bytes: 0, kv_bytes_now: 0, dense_bytes: 0,
  },
  weights: { pinned_bytes: 0, expert_bytes: 0, ring_bytes: 0, row_bytes: 0, streamed_bytes_per_pass: 0 },
  cache: { unused_groups: 0 },
  counters: { generated_tokens: 0 },
};

/** The numbers of `one`, each with the same of `other` added. */
function sum(one, other) {
  return Object.fromEntries(Object.entries(one).map(([name, value]) =>
    [name, typeof value === "object" ? sum(value, other[name]) : value + (other[name] ?? 0)]));
}

/** Which models there are, and what each of them has. */
function models(map) {
  const shown = (map.models ?? []).map(({ name, state, share_bytes: share, error }) => make("div", { class: `model ${state}` },
    make("dt", {}, name), make("dd", {}, share > 0 ? bytes(share) : ""),
    make("dd", { class: "quiet" }, error ? `could not be loaded: ${error}` : SAID_OF_MODELS[state])));
  element("shares").replaceChildren(...shown);
  element("shares-title").hidden = shown.length === 0;
}

const SAID_OF_MODELS = {
  loaded: "loaded; gives way when another model needs the room",
  loading: "being loaded",
  unloading: "being unloaded",
  unloaded: "not loaded; loaded when it is asked for",
};

function draw(map) {
  speed(map.counters.generated_tokens);
  const parts = split(map);
  summary(map, parts);
  bars(map, parts);
  legend("said", SAID, parts);
  legend("else", ELSE, parts);
  models(map);
  sessions(map);
}

/**
 * The bytes of the process, each counted once. What the prefix cache keeps is kept even while one
 * request uses it; what several use is shared.
 */
function split({ ledger, budget, weights, sessions, pooled_bytes: pooled = 0 }) {
  const used = Math.max(0, ledger.pinned_bytes - ledger.pinned_only_bytes - ledger.shared_bytes);
  const unique = Math.max(0, ledger.unique_bytes - used);
  const slack = Math.min(unique, sessions.reduce((sum, session) => sum + session.slack_bytes, 0));
  const parts = {
    unique: unique - slack,
    shared: ledger.shared_bytes,
    cached: ledger.pinned_only_bytes + used,
    slack,
    idle: ledger.idle_bytes + ledger.retiring_bytes,
    working: budget.activation_bytes + budget.request_bytes,
    program: budget.program_bytes + budget.vocabulary_bytes + budget.constraint_bytes + budget.thread_bytes
      + budget.sampling_bytes + budget.beyond_plan_bytes,
    weights: budget.copied_weight_bytes + budget.converted_weight_bytes + weights.pinned_bytes
      + weights.expert_bytes,
    streaming: weights.ring_bytes + weights.row_bytes,
    pooled,
  };
  const taken = Object.values(parts).reduce((sum, part) => sum + part, 0);
  const limit = budget.budget_bytes ?? taken - ledger.committed_bytes + budget.kv_bytes_now;
  return { ...parts, free: Math.max(0, limit - taken) };
}

function speed(tokens) {
  const now = performance.now();
  if (last) {
    // A model that is unloaded takes what it has counted with it.
    const rate = (Math.max(0, tokens - last.tokens) * 1000) / (now - last.now);
    last.rate = last.rate * 0.6 + rate * 0.4;
    element("speed").textContent = last.rate < 0.05 ? "" : perSecond(last.rate);
  }
  last = { tokens, now, rate: last?.rate ?? 0 };
}

function summary({ sessions, budget }, parts) {
  const held = parts.unique + parts.shared + parts.slack;
  const requests = new Set(sessions.map((session) => `${session.model ?? ""} ${session.request}`)).size;
  element("summary").textContent = requests > 0
    ? `${plural(requests, "request")} ${requests === 1 ? "holds" : "hold"} ${bytes(held)} for what was said. `
      + `Whole contexts, reserved from the start, would take ${bytes(budget.dense_bytes)}.`
    : `Nothing is running. ${parts.cached > 0 ? `${bytes(parts.cached)} are kept for prompts that begin alike.` : ""}`;
}

function bars({ ledger, budget, weights, folder, swap }, parts) {
  const total = Object.values(parts).reduce((sum, part) => sum + part, 0);
  const scale = Math.max(total, budget.dense_bytes, 1);
  const made = [
    bar(budget.budget_bytes ? "Budget" : "Available", total, Object.entries(parts), scale),
    budget.dense_bytes > 0
      ? bar("Whole contexts would take", budget.dense_bytes, [["dense", budget.dense_bytes]], scale)
      : null,
  ];
  element("mapped").textContent = budget.mapped_weight_bytes > 0
    ? `Besides, ${bytes(budget.mapped_weight_bytes)} of weights are read from the model's file in place. `
      + "The system keeps and drops them like any file."
    : weights.streamed_bytes_per_pass > 0
      ? `Each pass reads ${bytes(weights.streamed_bytes_per_pass)} of weights from the model's file.`
      : "";
  element("folder").textContent = folder
    ? `${bytes(folder.bytes)} of ${bytes(folder.limit_bytes)} are kept in files for later. `
      + (folder.restored_tokens > 0 ? `${plural(folder.restored_tokens, "token")} came back from there. ` : "")
      + (folder.paused ? `Nothing is written for now: ${folder.paused}.` : "")
    : "";
  element("swap").textContent = swap && swap.left + swap.requests > 0
    ? `${bytes(swap.held_bytes)} of ${plural(swap.requests, "waiting request")} are in the swap file. `
      + `${plural(swap.left, "request")} went there, ${swap.returned} came back. `
      + (swap.failure ? `It failed last with: ${swap.failure}.` : "")
    : "";
  element("bars").replaceChildren(...made.filter((part) => part));
  element("bars").dataset.committedBytes = ledger.committed_bytes;
}

function bar(name, total, segments, scale) {
  const track = make("div", { class: "track", role: "img", "aria-label": spoken(segments) });
  track.style.width = `${(100 * total) / scale}%`;
  for (const [kind, count] of segments) {
    if (count === 0) continue;
    const segment = make("div", { class: kind, title: `${KINDS[kind]?.[0] ?? name}: ${bytes(count)}` });
    segment.style.flexGrow = count;
    track.append(segment);
  }
  return make("div", { class: "bar" }, named(name, bytes(total)), track);
}

function spoken(segments) {
  const words = segments.filter(([, count]) => count > 0);
  return words.map(([kind, count]) => `${KINDS[kind]?.[0] ?? kind}: ${bytes(count)}`).join("; ");
}

function legend(id, kinds, parts) {
  const there = Object.entries(kinds).filter(([kind]) => parts[kind] > 0);
  const made = there.map(([kind, [name, frees]]) => make("div", { class: kind },
    make("dt", {}, name), make("dd", {}, bytes(parts[kind])), make("dd", { class: "quiet" }, frees)));
  element(id).replaceChildren(...made);
}

function sessions(map) {
  const { pages } = map;
  element("square").textContent = pages.group_bytes > 0
    ? `Each square is ${plural(pages.group_tokens, "token")}: ${bytes(pages.group_bytes)}.`
    : "";
  const shown = map.sessions.map((session) => ({
    key: `${session.model ?? ""}.${session.request}.${session.choice}`,
    name: `${session.model ? `${session.model}: request` : "Request"} ${session.request}${session.choice ? `, choice ${session.choice + 1}` : ""}`,
    detail: `${session.phase} · ${plural(session.tokens, "token")}`,
    runs: session.groups,
    session,
  }));
  if (map.cache.unused_groups > 0) {
    shown.push({
      key: "cache",
      name: "Kept for reuse",
      detail: bytes(map.ledger.pinned_only_bytes),
      runs: [{ state: "cached", count: map.cache.unused_groups }],
    });
  }
  for (const key of rows.keys()) {
    if (shown.some((row) => row.key === key)) continue;
    rows.get(key).element.remove();
    rows.delete(key);
  }
  for (const data of shown) {
    let row = rows.get(data.key);
    if (!row) {
      row = new Row(data.key);
      rows.set(data.key, row);
    }
    // Also puts them into order.
    element("sessions").append(row.element);
    row.update(data, data.session?.pages ?? pages);
  }
  const waiting = element("sessions").querySelector(".waiting");
  waiting?.remove();
  if (map.waiting > 0) {
    element("sessions").append(make("li", { class: "waiting" }, `${plural(map.waiting, "request")} waiting`));
  }
}

/** A request's page groups; opened, what each run of them is. It stays the same element as it changes. */
class Row {
  constructor(key) {
    this.groups = 0;
    this.fresh = [];
    this.name = make("span");
    this.detail = make("span", { class: "quiet" });
    this.button = button("", () => this.toggle(), { class: "name", "aria-expanded": "false" });
    this.button.append(this.name, this.detail);
    this.canvas = make("canvas", { role: "img" });
    this.about = make("div", { class: "about", hidden: true });
    this.element = make("li", { class: "session", dataset: { key } }, this.button, this.canvas, this.about);
  }

  toggle() {
    this.about.hidden = !this.about.hidden;
    this.button.setAttribute("aria-expanded", !this.about.hidden);
    this.tell();
  }

  update(data, pages) {
    const groups = data.runs.reduce((sum, run) => sum + run.count, 0);
    const now = performance.now();
    this.fresh = this.fresh.filter(({ at }) => now - at < FRESH_MS);
    if (this.data && groups > this.groups) this.fresh.push({ from: this.groups, to: groups, at: now });
    this.groups = groups;
    this.data = data;
    this.pages = pages;
    this.name.textContent = data.name;
    this.detail.textContent = data.detail;
    this.element.dataset.groups = groups;
    this.canvas.setAttribute("aria-label", data.runs.map(({ state, count }) => `${count} ${STATES[state]}`).join(", "));
    this.tell();
    requestAnimationFrame(() => this.paint());
  }

  /** What the squares are, in words. */
  tell() {
    if (this.about.hidden) return;
    const { session, runs } = this.data;
    const { group_tokens: tokens, group_bytes: size } = this.pages;
    let at = 0;
    const lines = runs.map(({ state, count }) => {
      const [from, to] = [at * tokens, (at + count) * tokens - 1];
      at += count;
      // Of groups that no request uses the order says nothing.
      const where = session ? `Tokens ${from.toLocaleString("en")} to ${to.toLocaleString("en")}: ` : "";
      return make("li", { class: state }, `${where}${plural(count, "square")}, ${STATES[state]}, ${bytes(count * size)}`);
    });
    const rest = session
      ? `${bytes(session.rows_bytes)} of rows are of use to it; ${bytes(session.slack_bytes)} are mapped ahead of them. `
        + `${plural(session.cached_tokens ?? 0, "token")} of ${session.tokens.toLocaleString("en")} are computed. `
        + `${plural(session.reused_tokens, "token")} of its prompt's ${session.prompt_tokens.toLocaleString("en")} were found`
        + (session.differs_at === null ? "." : `; what is kept differs at token ${(session.differs_at + 1).toLocaleString("en")}.`)
      : "Whoever asks next with the same beginning goes on from here.";
    this.about.replaceChildren(make("ul", {}, ...lines), make("p", { class: "quiet" }, rest));
  }

  /** One square per page group. */
  paint() {
    const width = this.canvas.clientWidth;
    const across = Math.max(1, Math.floor((width + GAP) / (CELL + GAP)));
    const height = Math.max(1, Math.ceil(this.groups / across)) * (CELL + GAP);
    const density = window.devicePixelRatio || 1;
    this.canvas.width = width * density;
    this.canvas.height = height * density;
    this.canvas.style.height = `${height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(density, density);
    const square = (at, paint) => paint((at % across) * (CELL + GAP), Math.floor(at / across) * (CELL + GAP));
    let at = 0;
    for (const { state, count } of this.data.runs) {
      context.fillStyle = colour(state);
      context.strokeStyle = context.fillStyle;
      for (const end = at + count; at < end; at += 1) {
        square(at, (x, y) => {
          // Not by colour alone: shared ones have a hole, kept ones a line around them, the last one is half full.
          if (state === "cached") context.strokeRect(x + 1, y + 1, CELL - 2, CELL - 2);
          else if (state === "partial") {
            context.strokeRect(x + 0.5, y + 0.5, CELL - 1, CELL - 1);
            context.fillRect(x, y + CELL / 2, CELL, CELL / 2);
          } else context.fillRect(x, y, CELL, CELL);
          if (state === "shared") context.clearRect(x + 3, y + 3, CELL - 6, CELL - 6);
        });
      }
    }
    context.strokeStyle = colour("text");
    for (const { from, to } of this.fresh) {
      for (let group = from; group < Math.min(to, this.groups); group += 1) {
        square(group, (x, y) => context.strokeRect(x - 0.5, y - 0.5, CELL + 1, CELL + 1));
      }
    }
  }
}

/** A colour of the style sheet as it is now, for what style sheets do not reach. */
function colour(name) {
  element("square").style.setProperty("outline-color", `var(--${name})`);
  return getComputedStyle(element("square")).outlineColor;
}

function named(name, value) {
  return make("div", { class: "name" }, make("span", {}, name), make("span", {}, value));
}
