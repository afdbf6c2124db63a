// The memory map: what is committed, beside the budget and what dense would take, and every
// session's page groups.

import { request } from "./api.js";
import { bytes, perSecond, plural } from "./units.js";

const PERIOD = 400;
const CELL = 9;
const GAP = 2;
const element = (id) => document.getElementById(id);
let last = null;

export function start() {
  poll();
}

async function poll() {
  if (!document.hidden) {
    try {
      const map = await (await request("/memory")).json();
      element("lost").hidden = true;
      draw(map);
    } catch {
      element("lost").hidden = false;
    }
  }
  setTimeout(poll, PERIOD);
}

function draw(map) {
  element("model").textContent = map.model;
  speed(map.counters.generated_tokens);
  const parts = split(map);
  bars(map, parts);
  legend(parts);
  sessions(map);
}

/**
 * The committed bytes, each counted once. What the prefix cache keeps is cached even while one
 * session uses it; what several use is shared.
 */
function split({ ledger, sessions }) {
  const used = Math.max(0, ledger.pinned_bytes - ledger.pinned_only_bytes - ledger.shared_bytes);
  const unique = Math.max(0, ledger.unique_bytes - used);
  const slack = Math.min(unique, sessions.reduce((sum, session) => sum + session.slack_bytes, 0));
  return {
    shared: ledger.shared_bytes,
    unique: unique - slack,
    cached: ledger.pinned_only_bytes + used,
    slack,
    idle: ledger.idle_bytes + ledger.retiring_bytes,
  };
}

function speed(tokens) {
  const now = performance.now();
  if (last) {
    const rate = ((tokens - last.tokens) * 1000) / (now - last.now);
    last.rate = last.rate * 0.6 + rate * 0.4;
    element("speed").textContent = last.rate < 0.05 ? "" : perSecond(last.rate);
  }
  last = { tokens, now, rate: last?.rate ?? 0 };
}

function bars({ ledger, budget }, parts) {
  const limit = budget.budget_bytes ?? budget.kv_bytes_now;
  const besides = budget.budget_bytes - budget.kv_bytes + budget.beyond_plan_bytes;
  const scale = Math.max(limit, budget.dense_bytes, ledger.committed_bytes, 1);
  const rows = [
    ["KV committed", ledger.committed_bytes, Object.entries(parts)],
    [budget.budget_bytes ? `Budget, ${bytes(besides)} of it besides KV` : "Available to KV", limit, [["limit", limit]]],
    ["Dense would take", budget.dense_bytes, [["dense", budget.dense_bytes]]],
  ];
  element("bars").replaceChildren(...rows.map(([name, total, segments]) => bar(name, total, segments, scale)));
  element("bars").dataset.committedBytes = ledger.committed_bytes;
}

function bar(name, total, segments, scale) {
  const row = make("div", "bar");
  row.append(named(name, bytes(total)));
  const track = make("div", "track");
  for (const [kind, count] of segments) {
    const segment = make("div", kind);
    segment.style.width = `${(100 * count) / scale}%`;
    track.append(segment);
  }
  row.append(track);
  return row;
}

function legend(parts) {
  const entries = Object.entries(parts).map(([kind, count]) => {
    const entry = make("div", kind);
    entry.append(make("dt", "", kind), make("dd", "", bytes(count)));
    return entry;
  });
  element("legend").replaceChildren(...entries);
}

function sessions(map) {
  const rows = map.sessions.map((session) => {
    const name = `Request ${session.request}${session.choice ? `, choice ${session.choice + 1}` : ""}`;
    const tokens = `${session.phase} · ${plural(session.tokens, "token")}`;
    return row(name, tokens, session.groups, map.pages);
  });
  if (map.cache.unused_groups > 0) {
    const runs = [{ state: "cached", count: map.cache.unused_groups }];
    const size = bytes(map.cache.unused_groups * map.pages.group_bytes);
    rows.push(row("Prefix cache, unused", size, runs, map.pages));
  }
  if (map.waiting > 0) {
    rows.push(make("p", "", `${plural(map.waiting, "request")} waiting`));
  }
  element("sessions").replaceChildren(...rows);
}

function row(name, detail, runs, pages) {
  const groups = runs.reduce((sum, run) => sum + run.count, 0);
  const item = make("div", "session");
  item.dataset.groups = groups;
  const canvas = document.createElement("canvas");
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", runs.map((run) => `${run.count} ${run.state}`).join(", "));
  canvas.title = `A square is ${plural(pages.group_tokens, "token")}, ${bytes(pages.group_bytes)}`;
  item.append(named(name, detail), canvas);
  requestAnimationFrame(() => cells(canvas, runs, groups));
  return item;
}

/** One square per page group. */
function cells(canvas, runs, groups) {
  const width = canvas.clientWidth;
  const across = Math.max(1, Math.floor((width + GAP) / (CELL + GAP)));
  const height = Math.max(1, Math.ceil(groups / across)) * (CELL + GAP);
  const density = window.devicePixelRatio || 1;
  canvas.width = width * density;
  canvas.height = height * density;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(density, density);
  const style = getComputedStyle(document.documentElement);
  let at = 0;
  for (const { state, count } of runs) {
    context.fillStyle = style.getPropertyValue(`--${state}`);
    for (const end = at + count; at < end; at += 1) {
      const x = (at % across) * (CELL + GAP);
      const y = Math.floor(at / across) * (CELL + GAP);
      context.fillRect(x, y, CELL, CELL);
    }
  }
}

function named(name, value) {
  const line = make("div", "name");
  line.append(make("span", "", name), make("span", "", value));
  return line;
}

function make(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}
