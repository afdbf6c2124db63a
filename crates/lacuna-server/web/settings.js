// Settings: how replies are drawn and what the page looks like, kept in this browser. The instructions
// belong to the conversation.

import { element } from "./dom.js";

const STORED = "lacuna-settings";
const NUMBERS = { temperature: "temperature", "top-p": "top_p", "max-tokens": "max_tokens" };

/** What requests say of sampling; what is left empty is the model's own. */
export function sampling() {
  const said = Object.entries(NUMBERS).map(([id, name]) => [name, element(id).valueAsNumber]);
  return Object.fromEntries(said.filter(([, value]) => Number.isFinite(value)));
}

/** @param {(system: string) => void} instructed the instructions have changed */
export function start(instructed) {
  const kept = read();
  for (const id of [...Object.keys(NUMBERS), "appearance"]) {
    if (kept[id]) element(id).value = kept[id];
    element(id).addEventListener("change", () => {
      write();
      appear();
    });
  }
  appear();
  element("system").addEventListener("input", () => instructed(element("system").value));
  element("show-settings").addEventListener("click", () => element("settings").showModal());
}

function appear() {
  document.documentElement.dataset.appearance = element("appearance").value;
}

function read() {
  try {
    return JSON.parse(localStorage.getItem(STORED)) ?? {};
  } catch {
    return {};
  }
}

function write() {
  const ids = [...Object.keys(NUMBERS), "appearance"];
  const values = Object.fromEntries(ids.map((id) => [id, element(id).value]));
  try {
    localStorage.setItem(STORED, JSON.stringify(values));
  } catch {
    // Without room for it, it lasts as long as the page.
  }
}
