// Text files that go along with a message, each as a block of code under its name.

import { button, element, make } from "./dom.js";
import { bytes, plural } from "./units.js";

// More than any context holds; a file of this size is a mistake.
const MOST_BYTES = 2 << 20;

export class Attachments {
  constructor() {
    this.files = [];
    element("attach").addEventListener("click", () => element("files").click());
    element("files").addEventListener("change", async (event) => {
      await this.add([...event.target.files]);
      // The same file can be chosen again.
      event.target.value = "";
    });
    const composer = element("composer");
    composer.addEventListener("dragover", (event) => event.preventDefault());
    composer.addEventListener("drop", (event) => {
      if (event.dataTransfer.files.length === 0) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
  }

  async add(files) {
    const refused = [];
    for (const file of files) {
      if (file.size > MOST_BYTES) {
        refused.push(`${file.name} is larger than ${bytes(MOST_BYTES)}.`);
        continue;
      }
      try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
        if (text.includes("\0")) throw new TypeError("not text");
        this.files.push({ name: file.name, text });
      } catch {
        refused.push(`${file.name} is not text.`);
      }
    }
    this.draw(refused.join(" "));
  }

  /** What is to be said of the files. */
  take() {
    return this.files.map(({ name, text }) => {
      // Longer than any fence within.
      const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
      const fence = "`".repeat(longest + 1);
      return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
    });
  }

  clear() {
    this.files = [];
    this.draw("");
  }

  draw(refused) {
    const chips = this.files.map((file) => make("li", {},
      make("span", {}, file.name),
      make("span", { class: "quiet" }, plural(file.text.length, "character")),
      button("×", () => {
        this.files = this.files.filter((other) => other !== file);
        this.draw("");
      }, { "aria-label": `Remove ${file.name}` }),
    ));
    element("attachments").replaceChildren(...chips);
    element("refused").textContent = refused;
  }
}
