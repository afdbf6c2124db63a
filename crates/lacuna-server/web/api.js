// Requests to the server this page came from.

const STORED_KEY = "lacuna-key";

/** An answer that is not a success, in the server's own words. */
export class ServerError extends Error {}

/** Sends a request; asks for a key when the server wants one, and tries again. */
export async function request(path, options = {}) {
  const key = sessionStorage.getItem(STORED_KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.status === 401 && (await askForKey())) {
    return request(path, options);
  }
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new ServerError(body?.error?.message ?? `the server answered ${response.status}`);
  }
  return response;
}

let asking = null;

/** Resolves to whether a key was given. Requests that fail together ask once. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    field.value = "";
    dialog.addEventListener("close", () => {
      asking = null;
      sessionStorage.setItem(STORED_KEY, field.value);
      resolve(field.value !== "");
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** The chunks of a streamed chat, as objects. */
export async function* chat(body, signal) {
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
