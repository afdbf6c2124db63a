// The page: conversations at the left, the one that is shown, and the memory map.

import { models } from "./api.js";
import { Chat, forget, keep, load, watch } from "./chats.js";
import { Conversation } from "./conversation.js";
import { button, element, make } from "./dom.js";
import * as memory from "./memory.js";
import * as settings from "./settings.js";

const NOT_KEPT = {
  pictures: "This browser has no room left to keep this chat’s pictures: they will be gone when the page is. Delete a chat to make some.",
  chat: "This browser has no room left to keep this chat. Delete one to make some.",
};

let chats = load();
let served = [];
const conversation = new Conversation(asked, changed);
// Those whose reply may still be ending.
const deleted = new WeakSet();

/** What requests say beside the messages. The model is the one that is shown. */
function asked() {
  const model = element("models").value;
  return { ...(model && { model }), ...settings.sampling() };
}

function changed(chat) {
  if (deleted.has(chat)) return;
  if (!chats.includes(chat)) chats.unshift(chat);
  const left = keep(chat);
  element("not-kept").hidden = !left;
  element("not-kept").textContent = NOT_KEPT[left] ?? "";
  list();
}

/** Shows a conversation, or a new one. */
function open(chat) {
  conversation.open(chat);
  element("system").value = chat.system;
  // The one that was asked may be served no longer.
  const model = served.find(({ id }) => id === chat.model) ?? served[0];
  element("models").value = model?.id ?? "";
  offer();
  list();
  see("chat");
  element("text").focus();
}

function list() {
  const sorted = [...chats].sort((a, b) => b.changed - a.changed);
  const items = sorted.map((chat) => {
    const shown = chat === conversation.chat;
    const title = button(chat.title || "Untitled", () => open(chat), { class: "title" });
    if (shown) title.setAttribute("aria-current", "true");
    const gone = button("×", () => remove(chat), { "aria-label": `Delete “${chat.title || "Untitled"}”` });
    return make("li", {}, title, gone);
  });
  element("chats").replaceChildren(...items);
}

function remove(chat) {
  if (!confirm(`Delete “${chat.title}”? It is kept nowhere else.`)) return;
  deleted.add(chat);
  forget(chat);
  chats = chats.filter((other) => other !== chat);
  if (chat === conversation.chat) open(new Chat());
  else list();
}

/** What another window has done to a conversation. */
function changedElsewhere(id, other) {
  const shown = conversation.chat.id === id;
  const here = shown ? conversation.chat : chats.find((chat) => chat.id === id);
  if (!other) chats = chats.filter((chat) => chat !== here);
  else if (shown) conversation.take(other);
  else here?.take(other);
  if (other && !chats.includes(here)) chats.push(here ?? other);
  if (shown) element("system").value = conversation.chat.system;
  list();
}

/** On a narrow screen one part is seen at a time. */
function see(part) {
  document.body.dataset.seen = part;
  for (const name of ["history", "memory"]) {
    element(`show-${name}`).setAttribute("aria-expanded", part === name);
  }
}

async function pickModels() {
  try {
    served = await models();
  } catch {
    // The map says that the server does not answer; requests go to the model it has.
  }
  const options = served.map(({ id }) => make("option", { value: id }, id));
  element("models").replaceChildren(...options);
  element("models").disabled = options.length < 2;
  element("models").title = served[0]?.id ?? "";
}

/** Offers what the model of the conversation takes. */
function offer() {
  const model = served.find(({ id }) => id === element("models").value);
  conversation.attachments.offer(model?.architecture?.input_modalities?.includes("image") ?? false);
}

element("models").addEventListener("change", () => {
  conversation.chat.model = element("models").value;
  offer();
});
for (const id of ["new-chat", "new-chat-narrow"]) {
  element(id).addEventListener("click", () => open(new Chat()));
}
for (const name of ["history", "memory"]) {
  element(`show-${name}`).addEventListener("click", () => {
    see(document.body.dataset.seen === name ? "chat" : name);
  });
}
element("key-cancel").addEventListener("click", () => element("key-dialog").close());
settings.start((system) => {
  conversation.chat.system = system;
  if (chats.includes(conversation.chat)) changed(conversation.chat);
});
await pickModels();
open(chats[0] ?? new Chat());
watch(changedElsewhere);
memory.start();
