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

  /** Adds a message after `parent`, and shows it. */
  add(role, content, parent = this.leaf) {
    const message = { id: identity(), parent, role, content, made: Date.now() };
    this.messages[message.id] = message;
    this.leaf = message.id;
    this.changed = Date.now();
    if (!this.title && role === "user") this.title = content.trim().split("\n")[0].slice(0, 80);
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

  /** What a model is asked with: the path up to `leaf`, without what failed. */
  question(leaf) {
    const path = [];
    for (let id = leaf; id !== null; id = this.messages[id].parent) path.unshift(this.messages[id]);
    const said = path.filter((message) => message.role === "user" || message.content);
    const messages = said.map(({ role, content }) => ({ role, content }));
    return this.system.trim() ? [{ role: "system", content: this.system.trim() }, ...messages] : messages;
  }
}

/** The conversations that are kept, the one changed last first. */
export function load() {
  const chats = [];
  for (let index = 0; index < localStorage.length; index += 1) {
    const key = localStorage.key(index);
    if (!key.startsWith(PREFIX)) continue;
    try {
      const chat = new Chat(JSON.parse(localStorage.getItem(key)));
      // Throws where a kept one is not whole.
      chat.path();
      chats.push(chat);
    } catch {
      // Of another version, or damaged: it stays where it is.
    }
  }
  return chats.sort((a, b) => b.changed - a.changed);
}

/** Keeps a conversation; whether there was room. */
export function keep(chat) {
  try {
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
    return true;
  } catch {
    return false;
  }
}

export function forget(chat) {
  localStorage.removeItem(PREFIX + chat.id);
}
