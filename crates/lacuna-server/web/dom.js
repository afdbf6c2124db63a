// Elements, made in one line.

export const element = (id) => document.getElementById(id);

/** An element with properties; `class` and `dataset` as in HTML, children in order. */
export function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name === "dataset") Object.assign(made.dataset, value);
    else if (name.startsWith("aria-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A button that does something. */
export function button(text, action, properties = {}) {
  const made = make("button", { type: "button", ...properties }, text);
  made.addEventListener("click", action);
  return made;
}

/** Puts text on the clipboard, also where the page is not served securely. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { value: text, class: "hidden" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** A button that copies what `text` gives, and says so. */
export function copyButton(text, properties = {}) {
  const made = button("Copy", async () => {
    await copy(text());
    made.textContent = "Copied";
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, properties);
  return made;
}
