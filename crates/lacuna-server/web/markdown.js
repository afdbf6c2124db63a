// Markdown as elements. The parser only finds structure; text stays text, so that nothing a model writes
// becomes markup: raw HTML is shown as it is written, and images are links to what they would load.

import { lexer } from "/page/vendor/marked.js";
import { copyButton, make } from "./dom.js";

/** Blocks of a text that grows. Finished ones are made once: only the last is made again as it grows. */
export class Markdown {
  /** @param {(change: () => void) => void} around makes a change, and keeps in sight what was */
  constructor(into, around) {
    this.into = into;
    this.around = around;
    this.text = "";
    this.finished = 0;
    this.tail = [];
    this.asked = false;
  }

  /** Takes more text; it is shown with the next frame. */
  append(text) {
    this.text += text;
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => this.around(() => this.show()));
  }

  /** Shows all there is, now. */
  show() {
    this.asked = false;
    const tokens = lexer(this.text.slice(this.finished));
    for (const element of this.tail) element.remove();
    const last = tokens.findLastIndex((token) => token.type !== "space");
    for (const token of tokens.slice(0, Math.max(last, 0))) {
      this.into.append(...block(token));
      this.finished += token.raw.length;
    }
    this.tail = tokens.slice(Math.max(last, 0)).flatMap(block);
    this.into.append(...this.tail);
  }
}

/** Elements of a whole text. */
export function markdown(text) {
  return lexer(text).flatMap(block);
}

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return [];
    case "heading":
      // The page has a heading of its own.
      return [make(`h${Math.min(token.depth + 2, 6)}`, {}, ...inline(token.tokens))];
    case "code":
      return [code(token)];
    case "hr":
      return [make("hr")];
    case "blockquote":
      return [make("blockquote", {}, ...token.tokens.flatMap(block))];
    case "list":
      return [list(token)];
    case "table":
      return [table(token)];
    case "paragraph":
      return [make("p", {}, ...inline(token.tokens))];
    case "text":
      return token.tokens ? inline(token.tokens) : [decoded(token.text)];
    case "checkbox":
      return [make("input", { type: "checkbox", checked: token.checked, disabled: true })];
    default:
      return [make("p", {}, token.raw)];
  }
}

function code(token) {
  const language = (token.lang ?? "").match(/^\S*/)[0];
  const head = make("div", { class: "code-head" }, make("span", {}, language), copyButton(() => token.text));
  // What scrolls can be reached by keyboard.
  const text = make("pre", { tabIndex: 0 }, make("code", {}, token.text));
  return make("div", { class: "code" }, head, text);
}

function list(token) {
  const items = token.items.map((item) => {
    const made = make("li", {}, ...item.tokens.flatMap(block));
    if (item.task && !made.querySelector("input")) {
      made.prepend(make("input", { type: "checkbox", checked: item.checked, disabled: true }), " ");
    }
    return made;
  });
  const start = token.ordered && token.start > 1 ? { start: token.start } : {};
  return make(token.ordered ? "ol" : "ul", start, ...items);
}

function table(token) {
  const row = (tag) => (cells) => make("tr", {}, ...cells.map((cell) => {
    const made = make(tag, {}, ...inline(cell.tokens));
    if (cell.align) made.style.textAlign = cell.align;
    return made;
  }));
  const head = make("thead", {}, row("th")(token.header));
  const body = make("tbody", {}, ...token.rows.map(row("td")));
  return make("div", { class: "table", tabIndex: 0 }, make("table", {}, head, body));
}

function inline(tokens) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong":
        return make("strong", {}, ...inline(token.tokens));
      case "em":
        return make("em", {}, ...inline(token.tokens));
      case "del":
        return make("del", {}, ...inline(token.tokens));
      case "codespan":
        return make("code", {}, token.text);
      case "br":
        return make("br");
      case "link":
        return link(token.href, inline(token.tokens));
      case "image":
        return link(token.href, [token.text || token.href]);
      case "escape":
      case "text":
        return token.tokens ? make("span", {}, ...inline(token.tokens)) : decoded(token.text);
      default:
        return document.createTextNode(token.raw);
    }
  });
}

/** A link that opens beside the page; only to what a browser shows. */
function link(href, content) {
  let address;
  try {
    address = new URL(href, location.href);
  } catch {
    return make("span", {}, ...content);
  }
  if (!["http:", "https:", "mailto:"].includes(address.protocol)) return make("span", {}, ...content);
  return make("a", { href: address.href, target: "_blank", rel: "noopener noreferrer" }, ...content);
}

/** Text with its character references (`&amp;`) resolved. */
function decoded(text) {
  const resolved = text.replace(/&(#\d+|#x[0-9a-f]+|[a-z][a-z0-9]*);/gi, (reference) => {
    return new DOMParser().parseFromString(reference, "text/html").documentElement.textContent;
  });
  return document.createTextNode(resolved);
}
