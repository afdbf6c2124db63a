// Requests to the server this page came from.

import { element } from "./dom.js";

const STORED_KEY = "lacuna-key";

/** An answer that is not a success, in the server's own words. */
export class ServerError extends Error {}

/** Sends a request; asks for a key when the server wants another one, and tries again. */
export async function request(path, options = {}) {
  const key = sessionStorage.getItem(STORED_KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401 && (await askForKey(key))) {
    return request(path, options);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ServerError(body?.error?.message ?? `The server answered ${response.status}.`);
  }
  return response;
}

let asking = null;
// Somebody closed the dialog: it does not open again before they send something.
let declined = false;

/** Resolves to whether there is another key than the refused one. Requests that fail together ask once. */
function askForKey(refused) {
  if (sessionStorage.getItem(STORED_KEY) !== refused) return Promise.resolve(true);
  if (declined) return Promise.resolve(false);
  asking ??= new Promise((resolve) => {
    const dialog = element("key-dialog");
    const field = element("key");
    field.value = refused ?? "";
    element("key-refused").hidden = !refused;
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "use" && field.value !== "";
      declined = !given;
      if (given) sessionStorage.setItem(STORED_KEY, field.value);
      resolve(given);
    }, { once: true });
    dialog.showModal();
    field.select();
  });
  return asking;
}

/** The models that are served. */
export async function models() {
  return (await (await request("/v1/models")).json()).data;
}

/** The chunks of a streamed chat, as objects. */
export async function* chat(body, signal) {
  declined = false;
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      yield chunk;
    }
  }
}
