// Conversations as trees of messages, and where they are kept: in this browser, nowhere else.

const PREFIX = "lacuna-chat-";
let made = 0;

/** Not `crypto.randomUUID`, which pages that are served without encryption do not have. */
function identity() {
  made += 1;
  return `${Date.now().toString(36)}-${made}-${Math.random().toString(36).slice(2, 8)}`;
}

/**
 * A conversation. An edited message or another reply is a branch: a message beside the first, under the
 * same parent. `leaf` is the last message of the branch that is shown.
 */
export class Chat {
  constructor(kept) {
    this.id = identity();
    this.title = "";
    this.changed = Date.now();
    this.system = "";
    this.model = null;
    this.messages = {};
    this.leaf = null;
    Object.assign(this, kept);
  }

  /** The messages shown, from the first on. */
  path() {
    const path = [];
    for (let id = this.leaf; id !== null; id = this.messages[id].parent) path.unshift(this.messages[id]);
    return path;
  }

  /** Adds a message after `parent`, and shows it. `pictures` have a name, and a URL as long as they are kept. */
  add(role, content, parent = this.leaf, pictures = []) {
    const message = { id: identity(), parent, role, content, made: Date.now() };
    if (pictures.length > 0) message.pictures = pictures;
    this.messages[message.id] = message;
    this.leaf = message.id;
    this.changed = Date.now();
    if (!this.title && role === "user") {
      this.title = (content.trim() || pictures[0]?.name || "").split("\n")[0].slice(0, 80);
    }
    return message;
  }

  /** The messages that stand where this one does, itself among them, oldest first. */
  branches(message) {
    const beside = Object.values(this.messages).filter((other) => other.parent === message.parent);
    return beside.sort((a, b) => a.made - b.made);
  }

  /** Shows the branch of `message` that was made last. */
  show(message) {
    let leaf = message;
    for (;;) {
      const after = Object.values(this.messages).filter((other) => other.parent === leaf.id);
      if (after.length === 0) break;
      leaf = after.reduce((last, other) => (other.made > last.made ? other : last));
    }
    this.leaf = leaf.id;
  }

  /**
   * Takes what another window has kept of this conversation: its messages, but for the one that is `coming` here. What
   * goes on from what is shown is shown.
   */
  take(other, coming) {
    const { messages, leaf, title, changed, system, model } = other;
    const mine = coming && { [coming]: this.messages[coming] };
    const goesOn = this.leaf === null || other.path().some(({ id }) => id === this.leaf);
    Object.assign(this, { title, changed, system, model, messages: { ...this.messages, ...messages, ...mine } });
    if (goesOn && !coming) this.leaf = leaf;
  }

  /** What a model is asked with: the path up to `leaf`, without what failed. */
  question(leaf) {
    const path = [];
    for (let id = leaf; id !== null; id = this.messages[id].parent) path.unshift(this.messages[id]);
    const said = path.filter((message) => message.role === "user" || message.content);
    const messages = said.map((message) => ({ role: message.role, content: parts(message) }));
    return this.system.trim() ? [{ role: "system", content: this.system.trim() }, ...messages] : messages;
  }
}

/** A message's text, or its pictures and its text. */
function parts({ content, pictures = [] }) {
  const kept = pictures.filter((picture) => picture.url);
  if (kept.length === 0) return content;
  const shown = kept.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return content ? [...shown, { type: "text", text: content }] : shown;
}

/** The conversation that was kept as `text`; nothing of one that is damaged or of another version, which stays where it is. */
function read(text) {
  try {
    const chat = new Chat(JSON.parse(text));
    // Throws where a kept one is not whole.
    chat.path();
    return chat;
  } catch {
    return null;
  }
}

/** The conversations that are kept, the one changed last first. */
export function load() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const chats = keys.map((key) => read(localStorage.getItem(key))).filter((chat) => chat);
  return chats.sort((a, b) => b.changed - a.changed);
}

/** Calls `changed` with the identity of each conversation that another window keeps, and with it; without when it is deleted there. */
export function watch(changed) {
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    const chat = newValue === null ? null : read(newValue);
    if (chat || newValue === null) changed(key.slice(PREFIX.length), chat);
  });
}

/** Keeps a conversation. Says what there was no room for: nothing, its pictures, or all of it. */
export function keep(chat) {
  const withoutUrl = (key, value) => (key === "pictures" ? value.map(({ name }) => ({ name })) : value);
  for (const [left, replacer] of [["", undefined], ["pictures", withoutUrl]]) {
    try {
      localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat, replacer));
      return left;
    } catch {
      // Once more with less.
    }
  }
  return "chat";
}

export function forget(chat) {
  localStorage.removeItem(PREFIX + chat.id);
}
