// The conversation: what was said, and the reply as it comes.

import { chat, ServerError } from "./api.js";
import { perSecond, plural } from "./units.js";

const element = (id) => document.getElementById(id);
const messages = [];
let underWay = null;

export function start() {
  element("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  element("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  element("text").addEventListener("input", fit);
  element("stop").addEventListener("click", () => underWay?.abort());
  element("clear").addEventListener("click", () => {
    underWay?.abort();
    messages.length = 0;
    element("messages").replaceChildren();
    element("text").focus();
  });
}

async function send() {
  const text = element("text").value.trim();
  if (!text || underWay) return;
  element("text").value = "";
  fit();
  messages.push({ role: "user", content: text });
  show("user", text);
  const reply = show("assistant", "");
  underWay = new AbortController();
  busy(true);
  try {
    await receive(reply, underWay.signal);
  } catch (error) {
    // What came before the end stands, and is part of the conversation.
    if (error.name !== "AbortError") fail(reply, error);
  }
  const content = reply.querySelector(".text").textContent;
  if (content && !reply.classList.contains("failed")) {
    messages.push({ role: "assistant", content });
  } else {
    messages.pop();
  }
  underWay = null;
  busy(false);
}

async function receive(reply, signal) {
  const text = reply.querySelector(".text");
  const began = performance.now();
  let first = null;
  for await (const chunk of chat(question(), signal)) {
    const delta = chunk.choices[0]?.delta;
    if (delta?.reasoning_content) {
      first ??= performance.now();
      follow(() => thought(reply).append(delta.reasoning_content));
    }
    if (delta?.content) {
      first ??= performance.now();
      follow(() => text.append(delta.content));
    }
    if (chunk.usage) {
      follow(() => figures(reply, chunk.usage, began, first));
    }
  }
}

/** Where what the model thinks is shown, which is no part of the conversation. */
function thought(reply) {
  const found = reply.querySelector(".thought");
  if (found) return found;
  const made = document.createElement("span");
  made.className = "thought";
  reply.prepend(made);
  return made;
}

function question() {
  const system = element("system").value.trim();
  const maxTokens = Number.parseInt(element("max-tokens").value, 10);
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: Number.parseFloat(element("temperature").value) || 0,
    ...(maxTokens > 0 && { max_tokens: maxTokens }),
  };
}

function figures(reply, usage, began, first) {
  const parts = [plural(usage.completion_tokens, "token")];
  if (first !== null) {
    parts.push(`first after ${Math.round(first - began)} ms`);
    const seconds = (performance.now() - first) / 1000;
    if (usage.completion_tokens > 1 && seconds > 0) {
      parts.push(perSecond((usage.completion_tokens - 1) / seconds));
    }
  }
  const cached = usage.prompt_tokens_details.cached_tokens;
  parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens reused`);
  const line = document.createElement("span");
  line.className = "figures";
  line.textContent = parts.join(" · ");
  reply.append(line);
}

function show(role, content) {
  const item = document.createElement("li");
  item.className = role;
  const text = document.createElement("span");
  text.className = "text";
  text.textContent = content;
  item.append(text);
  element("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function fail(reply, error) {
  reply.classList.add("failed");
  const said = error instanceof ServerError ? error.message : "the server does not answer";
  reply.querySelector(".text").append(`\n${said}`);
}

/** Makes a change and stays at the end if the end was in sight. */
function follow(change) {
  const list = element("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
  change();
  if (atEnd) list.scrollTop = list.scrollHeight;
}

function busy(is) {
  element("send").hidden = is;
  element("stop").hidden = !is;
}

/** The field grows with its text. */
function fit() {
  const text = element("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}
