#!/usr/bin/env python3
"""Measures how smoothly the web page shows a long reply: frames while 4,000 tokens of Markdown arrive, with other sessions
running and the memory map live.

    .ci/test-server                        # installs Chromium, its driver and the Python environment
    cargo build --release
    target/clients/bin/python bench/page_frames.py [--tokens 4000] [--rate 200] [--json]

The server, its other sessions and the map are real. The reply is not a model's: the page's own `fetch` is answered within
the page by a text with headings, lists, tables and long code, so that it is the same each time and as fast as asked for. A
headless Chromium draws in software, on the processor that the server computes on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "crates/lacuna/tests/clients"))

from browser import Others, open_browser  # noqa: E402

# Answers the page's request for a chat with the text, token by token, and notes when frames are drawn.
SCRIPT = """
const [pieces, rate, done] = arguments;
const real = window.fetch;
window.fetch = (path, options) => {
  if (path !== "/v1/chat/completions") return real(path, options);
  const encoder = new TextEncoder();
  const chunk = (delta, more = {}) =>
    encoder.encode(`data: ${JSON.stringify({ choices: [{ delta, ...more }] })}\\n\\n`);
  let sent = 0;
  const began = performance.now();
  const body = new ReadableStream({
    pull: async (to) => {
      await new Promise((resolve) => setTimeout(resolve, 4));
      const due = Math.min(pieces.length, Math.floor(((performance.now() - began) * rate) / 1000));
      while (sent < due) to.enqueue(chunk({ content: pieces[sent++] }));
      if (sent === pieces.length) {
        to.enqueue(chunk({}, { finish_reason: "stop" }));
        to.enqueue(encoder.encode("data: [DONE]\\n\\n"));
        to.close();
      } else if (due === 0) to.enqueue(chunk({}));
    },
  });
  return Promise.resolve(new Response(body, { headers: { "Content-Type": "text/event-stream" } }));
};
const frames = [];
let over = false;
const tick = (now) => {
  frames.push(now);
  if (!over) requestAnimationFrame(tick);
};
const text = document.getElementById("text");
text.value = "Tell me everything.";
document.getElementById("composer").requestSubmit();
requestAnimationFrame(tick);
const list = document.getElementById("messages").parentElement;
const wait = setInterval(() => {
  if (getComputedStyle(document.getElementById("stop")).display !== "none"
      && !document.getElementById("stop").hidden) return;
  clearInterval(wait);
  over = true;
  window.fetch = real;
  const far = list.scrollHeight - list.scrollTop - list.clientHeight;
  done({ frames, far, characters: list.textContent.length, height: list.scrollHeight });
}, 200);
"""


def text(tokens):
    """About so many tokens of Markdown, in pieces like a tokenizer's."""
    section = (
        "## Part {n}\n\nA reply has **emphasis**, `names`, [links](https://example.org/{n}) and sentences that go on for a while, "
        "so that lines break and the page grows.\n\n"
        "- one thing, and then another\n- a second thing with `code` in it\n  - and one within\n\n"
        "| page | bytes | of whom |\n|---|---:|---|\n| {n} | 65,536 | shared |\n| 7 | 4,096 | its own |\n\n"
        "```rust\n" + "".join(f"fn step_{line}(state: &mut State) -> Result<(), Error> {{\n    state.next({line})?;\n    Ok(())\n}}\n\n" for line in range(12)) + "```\n\n"
    )
    pieces = []
    number = 0
    while len(pieces) < tokens:
        number += 1
        words = section.replace("{n}", str(number))
        # Four characters a token, as of English and code.
        pieces += [words[at : at + 4] for at in range(0, len(words), 4)]
    return pieces[:tokens]


def figures(found, tokens, rate):
    times = found["frames"]
    gaps = sorted(after - before for before, after in zip(times, times[1:]))
    seconds = (times[-1] - times[0]) / 1000
    at = lambda part: round(gaps[min(len(gaps) - 1, int(part * len(gaps)))], 1)
    return {
        "tokens": tokens,
        "tokens_per_second": rate,
        "seconds": round(seconds, 1),
        "frames_per_second": round(len(gaps) / seconds, 1),
        "frame_milliseconds": {"median": at(0.5), "p95": at(0.95), "p99": at(0.99), "longest": round(gaps[-1], 1)},
        # A frame that is missed makes the next come after two of sixty.
        "frames_in_time_percent": round(100 * sum(gap < 25 for gap in gaps) / len(gaps), 1),
        "pixels_from_the_end": round(found["far"]),
        "page_height_pixels": found["height"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=200, help="tokens a second")
    parser.add_argument("--sessions", type=int, default=3, help="other sessions that the map shows")
    parser.add_argument("--program", default=str(ROOT / "target/release/lacuna"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    command = [args.program, "serve", "demo", "--port", "0", "--json", "--threads", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = json.loads(server.stdout.readline())["url"]
        others = Others(url, args.sessions)
        with tempfile.TemporaryDirectory() as profile:
            browser = open_browser(profile)
            try:
                browser.set_script_timeout(args.tokens / args.rate * 4 + 60)
                browser.get(url)
                time.sleep(2)
                found = browser.execute_async_script(SCRIPT, text(args.tokens), args.rate)
            finally:
                browser.quit()
        others.over.set()
    finally:
        server.terminate()
    told = figures(found, args.tokens, args.rate)
    if args.json:
        print(json.dumps(told))
        return
    for name, value in told.items():
        print(f"{name.replace('_', ' '):26} {value}")


main()
