// Files that go along with a message: texts, each as a block of code under its name, and pictures, where the model
// sees. They are chosen, dropped or pasted.

import { button, element, make } from "./dom.js";
import { isPicture, FileError, read as readPicture } from "./pictures.js";
import { bytes, plural } from "./units.js";

// More than any context holds; a text of this size is a mistake.
const MOST_BYTES = 2 << 20;

export class Attachments {
  constructor() {
    this.files = [];
    this.sees = false;
    element("attach").addEventListener("click", () => element("files").click());
    element("files").addEventListener("change", async (event) => {
      await this.add([...event.target.files]);
      // The same file can be chosen again.
      event.target.value = "";
    });
    const chat = element("chat");
    const brings = (event) => event.dataTransfer.types.includes("Files");
    const dropping = (is) => chat.classList.toggle("dropping", is);
    chat.addEventListener("dragover", (event) => {
      if (!brings(event)) return;
      event.preventDefault();
      dropping(true);
    });
    chat.addEventListener("dragleave", () => dropping(false));
    chat.addEventListener("drop", (event) => {
      dropping(false);
      if (!brings(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    element("text").addEventListener("paste", (event) => {
      // What is copied from a page of text comes as a picture too.
      const { files, types } = event.clipboardData;
      if (files.length === 0 || types.includes("text/plain")) return;
      event.preventDefault();
      this.add([...files]);
    });
  }

  /** Whether the model that is asked sees: pictures are offered then. */
  offer(sees) {
    this.sees = sees;
    const name = sees ? "Attach pictures or text files" : "Attach text files";
    element("attach").setAttribute("aria-label", name);
    element("attach").title = name;
  }

  async add(files) {
    const refused = [];
    for (const file of files) {
      try {
        this.files.push(await this.read(file));
      } catch (error) {
        if (!(error instanceof FileError)) throw error;
        refused.push(error.message);
      }
    }
    this.draw(refused.join(" "));
  }

  async read(file) {
    if (isPicture(file)) {
      if (!this.sees) throw new FileError(`${file.name} is a picture, and this model reads text alone.`);
      return { name: file.name, picture: await readPicture(file) };
    }
    if (file.size > MOST_BYTES) throw new FileError(`${file.name} is larger than ${bytes(MOST_BYTES)}.`);
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (!text.includes("\0")) return { name: file.name, text };
    } catch {
      // Said below, as of a text that no text has.
    }
    throw new FileError(`${file.name} is not text.`);
  }

  /** Why the files cannot be sent, or nothing. */
  refusal() {
    const blind = !this.sees && this.files.some((file) => file.picture);
    return blind ? "This model reads text alone. Take the pictures out, or choose a model that sees." : "";
  }

  /** What is to be said of the texts. */
  texts() {
    return this.files.filter((file) => file.text !== undefined).map(({ name, text }) => {
      // Longer than any fence within.
      const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
      const fence = "`".repeat(longest + 1);
      return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
    });
  }

  pictures() {
    return this.files.filter((file) => file.picture).map((file) => file.picture);
  }

  clear() {
    this.files = [];
    this.draw("");
  }

  draw(refused) {
    const chips = this.files.map((file) => make("li", {},
      file.picture ? make("img", { src: file.picture.url, alt: "" }) : null,
      make("span", {}, file.name),
      file.text !== undefined ? make("span", { class: "quiet" }, plural(file.text.length, "character")) : null,
      button("×", () => {
        this.files = this.files.filter((other) => other !== file);
        this.draw("");
        element("text").focus();
      }, { "aria-label": `Remove ${file.name}` }),
    ));
    element("attachments").replaceChildren(...chips);
    element("refused").textContent = refused;
  }
}
