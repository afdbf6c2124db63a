// The conversation that is shown: its messages, what can be done with each, and the reply as it comes.

import { chat as ask, ServerError } from "./api.js";
import { Attachments } from "./attachments.js";
import { button, copyButton, element, make } from "./dom.js";
import { Markdown, markdown } from "./markdown.js";
import { perSecond, plural, seconds } from "./units.js";

const EXAMPLES = [
  "Explain ownership in Rust to somebody who knows C.",
  "Write a limerick about memory pages.",
  "What should I ask before I rent a flat?",
];

export class Conversation {
  /**
   * @param {() => object} settings which model is asked, and what the settings say of sampling
   * @param {(chat) => void} changed the conversation is to be kept
   */
  constructor(settings, changed) {
    this.settings = settings;
    this.changed = changed;
    this.chat = null;
    this.underWay = null;
    this.coming = null;
    this.attachments = new Attachments();
    this.list = element("messages");
    this.text = element("text");
    element("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    this.text.addEventListener("input", () => fit(this.text));
    element("stop").addEventListener("click", () => this.stop());
    // A page that is closed keeps what has come of a reply.
    addEventListener("pagehide", () => {
      if (this.underWay) this.changed(this.chat);
    });
  }

  /** Shows a conversation. A reply under way in another one ends there. */
  open(chat) {
    this.stop();
    this.coming = null;
    this.chat = chat;
    this.draw();
    this.toEnd();
  }

  stop() {
    this.underWay?.abort();
  }

  /** Takes what another window has kept of the conversation that is shown. */
  take(other) {
    this.chat.take(other, this.coming);
    const isWritten = this.underWay || this.list.querySelector("textarea");
    if (!isWritten) this.follow(() => this.draw());
  }

  draw() {
    const path = this.chat.path();
    this.list.replaceChildren(...path.map((message) => this.item(message)));
    element("welcome").hidden = path.length > 0;
    if (path.length === 0) this.welcome();
  }

  welcome() {
    const examples = EXAMPLES.map((text) => button(text, () => {
      this.text.value = text;
      this.send();
    }));
    element("examples").replaceChildren(...examples);
  }

  send() {
    const typed = this.text.value.trim();
    const [files, pictures] = [this.attachments.texts(), this.attachments.pictures()];
    if (this.underWay || (!typed && files.length === 0 && pictures.length === 0)) return;
    const refusal = this.attachments.refusal();
    if (refusal) {
      this.attachments.draw(refusal);
      return;
    }
    this.text.value = "";
    fit(this.text);
    this.attachments.clear();
    const content = [...files, typed].filter((part) => part).join("\n\n");
    this.chat.add("user", content, this.chat.leaf, pictures);
    this.draw();
    this.toEnd();
    this.reply(this.chat.leaf);
  }

  /** Asks for a reply to the message `parent`, beside those it has. */
  async reply(parent) {
    const chat = this.chat;
    const underWay = new AbortController();
    this.underWay = underWay;
    busy(true);
    const message = chat.add("assistant", "", parent);
    this.coming = message.id;
    const item = this.item(message, true);
    this.list.append(item);
    this.changed(chat);
    this.toEnd();
    const body = { messages: chat.question(parent), ...this.settings() };
    try {
      await this.receive(item, message, ask(body, underWay.signal));
    } catch (error) {
      // What came before the end stands, and is part of the conversation.
      if (error.name !== "AbortError") {
        message.error = error instanceof ServerError ? error.message : "The server does not answer.";
      } else {
        message.stopped = true;
      }
    }
    this.changed(chat);
    // Another conversation may be shown, with a reply of its own.
    if (this.underWay === underWay) {
      this.underWay = null;
      this.coming = null;
      busy(false);
    }
    if (item.isConnected) {
      this.follow(() => item.replaceWith(this.item(message)));
    }
  }

  async receive(item, message, chunks) {
    const text = new Markdown(item.querySelector(".text"), (change) => this.follow(change));
    const began = performance.now();
    let first = null;
    let thought = null;
    for await (const chunk of chunks) {
      const delta = chunk.choices[0]?.delta;
      if (delta?.reasoning_content || delta?.content) first ??= performance.now();
      if (delta?.reasoning_content) {
        message.thought = (message.thought ?? "") + delta.reasoning_content;
        thought ??= this.thought(item, "Thinking");
        this.follow(() => thought.append(delta.reasoning_content));
      }
      if (delta?.content) {
        if (thought && message.thoughtFor === undefined) {
          message.thoughtFor = performance.now() - first;
        }
        message.content += delta.content;
        text.append(delta.content);
      }
      if (chunk.choices[0]?.finish_reason) message.finish = chunk.choices[0].finish_reason;
      if (chunk.usage) message.figures = figures(chunk.usage, began, first);
    }
  }

  /** A message with what can be done with it. */
  item(message, coming = false) {
    const item = make("li", { class: message.role, dataset: { id: message.id } });
    const text = make("div", { class: "text" });
    if (message.role === "user") {
      if (message.pictures) item.append(this.pictures(message.pictures));
      text.append(message.content);
    } else {
      if (message.thought) this.thought(item, thoughtFor(message)).append(message.thought);
      text.append(...markdown(message.content));
      text.setAttribute("aria-busy", coming);
    }
    if (message.content || message.role !== "user") item.append(text);
    if (coming) return item;
    if (message.error) item.append(make("p", { class: "error", role: "alert" }, message.error));
    const notes = [
      message.stopped && "stopped",
      message.finish === "length" && "ended at the most tokens allowed",
      message.figures,
    ];
    const note = notes.filter((part) => part).join(" · ");
    if (note) item.append(make("p", { class: "figures" }, note));
    item.append(this.actions(message));
    return item;
  }

  /** Pictures of a message, with what `more` makes for each. */
  pictures(pictures, more = () => null) {
    const shown = pictures.map((picture) => make("li", {},
      picture.url
        ? make("img", { src: picture.url, alt: picture.name })
        : make("span", { class: "quiet" }, `${picture.name} (not kept)`),
      more(picture),
    ));
    return make("ul", { class: "pictures", "aria-label": "Pictures" }, ...shown);
  }

  thought(item, title) {
    const content = make("div", { class: "thought-text" });
    item.prepend(make("details", { class: "thought" }, make("summary", {}, title), content));
    return content;
  }

  actions(message) {
    const line = make("div", { class: "actions" });
    const branches = this.chat.branches(message);
    if (branches.length > 1) {
      const at = branches.indexOf(message);
      const to = (other, text, name) => button(text, () => {
        if (this.underWay) return;
        this.chat.show(other);
        this.changed(this.chat);
        this.draw();
      }, { "aria-label": name, disabled: !other });
      line.append(
        to(branches[at - 1], "‹", "Earlier version"),
        make("span", { class: "branch" }, `${at + 1}/${branches.length}`),
        to(branches[at + 1], "›", "Later version"),
      );
    }
    line.append(copyButton(() => message.content));
    if (message.role === "user") {
      line.append(button("Edit", () => this.edit(message)));
    } else {
      const name = message.error ? "Try again" : "Regenerate";
      line.append(button(name, () => this.again(message)));
    }
    return line;
  }

  /** Another reply beside this one. */
  again(message) {
    if (this.underWay) return;
    this.chat.leaf = message.parent;
    this.draw();
    this.reply(message.parent);
  }

  /** The message as a field; sent, it is a branch beside the message. */
  edit(message) {
    if (this.underWay) return;
    const item = this.list.querySelector(`[data-id="${message.id}"]`);
    const field = make("textarea", { value: message.content, "aria-label": "Edited message" });
    let pictures = message.pictures ?? [];
    const left = make("div");
    const draw = () => left.replaceChildren(this.pictures(pictures, (picture) => button("×", () => {
      pictures = pictures.filter((other) => other !== picture);
      draw();
      field.focus();
    }, { "aria-label": `Remove ${picture.name}` })));
    if (pictures.length > 0) draw();
    const send = button("Send", () => {
      if ((!field.value.trim() && pictures.length === 0) || this.underWay) return;
      const edited = this.chat.add("user", field.value.trim(), message.parent, pictures);
      this.draw();
      this.reply(edited.id);
    }, { class: "primary" });
    const cancel = button("Cancel", () => item.replaceWith(this.item(message)));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel.click();
    });
    field.addEventListener("input", () => fit(field));
    item.replaceChildren(left, field, make("div", { class: "actions" }, cancel, send));
    fit(field);
    field.focus();
  }

  /** Makes a change and stays at the end if the end was in sight. */
  follow(change) {
    const list = this.list.parentElement;
    const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    change();
    if (atEnd) list.scrollTop = list.scrollHeight;
  }

  toEnd() {
    const list = this.list.parentElement;
    list.scrollTop = list.scrollHeight;
  }
}

function thoughtFor(message) {
  return message.thoughtFor === undefined ? "Thoughts" : `Thought for ${seconds(message.thoughtFor)}`;
}

function figures(usage, began, first) {
  const parts = [plural(usage.completion_tokens, "token")];
  if (first !== null) {
    parts.push(`first after ${seconds(first - began)}`);
    const took = (performance.now() - first) / 1000;
    // What came all at once says nothing of speed.
    if (usage.completion_tokens > 1 && took > 0.1) parts.push(perSecond((usage.completion_tokens - 1) / took));
  }
  const cached = usage.prompt_tokens_details.cached_tokens;
  parts.push(`${cached.toLocaleString("en")} of ${usage.prompt_tokens.toLocaleString("en")} prompt tokens reused`);
  const difference = usage.prompt_tokens_details.cache_difference;
  // Counted from one, as people do; of what is written, a line.
  if (difference) {
    const written = difference.text.replace(/\s+/g, " ").trim();
    parts.push(`differs at token ${(difference.at + 1).toLocaleString("en")}${written && `, “${written}”`}`);
  }
  return parts.join(" · ");
}

function busy(is) {
  element("send").hidden = is;
  element("stop").hidden = !is;
}

/** A field grows with its text. */
function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
