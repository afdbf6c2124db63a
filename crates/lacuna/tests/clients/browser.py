"""The web page in a headless Chromium: `browser.py URL KEYED_URL KEY PICTURES SEEING_URL`.

Everything the page offers is done once: beside other sessions a message is sent, its reply comes and
the memory map changes; replies are stopped, made again and edited into branches; chats are kept, and
ended by new ones, and the same in two windows; files go along; what fails says so and can be tried again; a server that wants a key
gets one; a model that sees is shown pictures. Pictures are taken into a folder, and axe-core looks for what people who see or point badly
could not use.
"""

import base64
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

PATIENCE = 60


def open_browser(profile):
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--window-size=1280,860",
        f"--user-data-dir={profile}",
    ]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service("/usr/bin/chromedriver"))


def until(what, condition):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"it never came about that {what}")


class Others:
    """Sessions besides the page's, which all begin alike, so that there is something to look at."""

    def __init__(self, url, count):
        beginning = "# Ownership\n\nOwnership is a set of rules that govern how a Rust program manages memory. " * 8
        prompts = [f"{beginning}\n\n# Rule {number}\n\n" for number in range(count)]
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=self.read, args=(url, prompt), daemon=True) for prompt in prompts
        ]
        for thread in self.threads:
            thread.start()

    def read(self, url, prompt):
        body = {"prompt": prompt, "max_tokens": 700, "temperature": 1.0, "stream": True, "ignore_eos": True}
        while not self.over.is_set():
            request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request) as reply:
                for _ in reply:
                    if self.over.is_set():
                        return

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join(PATIENCE)


class Page:
    def __init__(self, browser, pictures):
        self.browser = browser
        self.pictures = Path(pictures)
        # A package that carries axe-core, for the driver of another browser, which it is installed without.
        package = Path(importlib.util.find_spec("axe_playwright_python").origin).parent
        self.axe = (package / "axe.min.js").read_text()

    def find(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector):
        """By script, since what is in motion cannot be pointed at."""
        self.browser.execute_script("document.querySelector(arguments[0]).click()", selector)

    def press(self, within, name):
        """The button of that name in the last element that `within` finds."""
        clicked = self.browser.execute_script(
            "const all = document.querySelectorAll(arguments[0]);"
            "const found = [...all[all.length - 1].querySelectorAll('button')]"
            ".find((b) => (b.getAttribute('aria-label') ?? b.textContent) === arguments[1]);"
            "found?.click(); return Boolean(found);",
            within,
            name,
        )
        assert clicked, f"{within} has a button {name}"

    def texts(self, selector):
        return self.browser.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector
        )

    def groups(self):
        """Page groups drawn, of sessions and of the prefix cache."""
        return self.browser.execute_script(
            "return [...document.querySelectorAll('#sessions .session')]"
            ".map((e) => [e.querySelector('.name').textContent, Number(e.dataset.groups)])"
        )

    def sessions(self):
        """Page groups drawn for each session."""
        return [groups for name, groups in self.groups() if name.startswith("Request")]

    def committed(self):
        return int(self.find("#bars")[0].get_attribute("data-committed-bytes") or 0)

    def say(self, text):
        self.find("#text")[0].send_keys(text, Keys.ENTER)

    def is_waiting(self):
        """Whether a message can be sent: no reply is on its way."""
        return self.find("#send")[0].is_displayed()

    def while_replying(self, condition):
        """Waits until it holds; whether it did before the reply was over."""
        held = []
        until(
            "it happens or the reply is over",
            lambda: held.append(condition()) or held[-1] or self.is_waiting(),
        )
        return held[-1]

    def reply(self):
        replies = self.texts("#messages > li.assistant:last-child .text")
        return replies[0] if replies else ""

    def finished(self):
        until("the reply ends", self.is_waiting)
        until("its figures are there", lambda: "tokens reused" in self.figures())

    def figures(self):
        return " ".join(self.texts("#messages > li:last-child .figures"))

    def prompt_tokens(self):
        """Tokens of the prompt of the last reply, which its figures tell."""
        return int(re.search(r" of (\d+) prompt tokens", self.figures())[1])

    def shown(self):
        """What it says at present, for those who look into why something never came about."""
        parts = ["#messages > li", "#refused", "#not-kept", "#summary"]
        typed = self.find("#text")[0].get_attribute("value")
        return f"{ {part: self.texts(part) for part in parts} }, typed is {typed!r}, sessions are {self.groups()}"

    def picture(self, name):
        self.browser.save_screenshot(str(self.pictures / f"{name}.png"))

    def accessible(self, what):
        """axe-core finds nothing that violates what it knows of the rules for accessible content."""
        self.browser.execute_script(self.axe)
        found = self.browser.execute_async_script(
            "const done = arguments[arguments.length - 1]; axe.run(document).then((r) => done(r.violations))"
        )
        told = [(v["id"], [node["target"] for node in v["nodes"]]) for v in found]
        assert not told, f"{what}: {told}"

    def settings(self, values):
        self.find("#show-settings")[0].click()
        for field, value in values.items():
            element = self.find(field)[0]
            element.clear()
            element.send_keys(value)
        self.find("#settings .primary")[0].click()

    def appear(self, appearance):
        self.browser.execute_script(
            "const s = document.getElementById('appearance'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('change'))",
            appearance,
        )


def welcome(page):
    """The first screen says what this is, and an example asks it."""
    assert "on this machine" in page.texts("#welcome")[0]
    until("the page knows the model", lambda: page.texts("#models option") == ["demo"])
    page.accessible("the first screen")
    page.click("#examples button")
    page.finished()
    assert not page.find("#welcome")[0].is_displayed()
    page.click("#new-chat")
    assert page.find("#welcome")[0].is_displayed() and not page.find("#messages > li")


# What the demo goes on about until its context is full, with products in f32 and in bf16, which processors have differently: its
# other replies end before the map is drawn again.
ASKS_FOR_MUCH = "Tell me everything about threads"


def converse(page, others):
    """A message is sent, its reply comes in pieces, and the map shows the pages it takes."""
    # Even that reply may be over too soon, where the machine had other things to do.
    for _ in range(25):
        page.click("#new-chat")
        until("there is room for a message", page.is_waiting)
        until("the map shows the others", lambda: len(page.sessions()) == others)
        committed = page.committed()
        page.say(ASKS_FOR_MUCH)
        first = until("the reply begins", page.reply)
        if not page.while_replying(lambda: len(page.reply()) > len(first)):
            continue
        if not page.while_replying(lambda: len(page.sessions()) > others):
            continue
        drawn = sum(page.sessions())
        if page.while_replying(lambda: sum(page.sessions()) > drawn):
            break
    else:
        raise AssertionError("every reply ended before the map had shown its session")
    # On a device memory is committed by heaps, and what a session takes lies in one that is there.
    if not os.environ.get("LACUNA_TEST_DEVICE"):
        until("more memory is committed", lambda: page.committed() > committed)
    page.click("#new-chat")
    until("the reply is over", page.is_waiting)
    page.say("What is ownership?")
    page.finished()


def the_map(page):
    """Words for every colour, and what a session's squares are when it is opened."""
    assert "reserved from the start" in page.texts("#summary")[0]
    for words in ["In use by one request", "Shared by several requests", "Kept for reuse", "Free"]:
        # Now and then the others are between two replies.
        until(f"it tells what is {words}", lambda: any(words in entry for entry in page.texts(".legend dt")))
    labels = page.browser.execute_script(
        "return [...document.querySelectorAll('#sessions canvas')].map((c) => c.getAttribute('aria-label'))"
    )
    assert labels and all(label[0].isdigit() for label in labels), labels
    # A session that is looked at may be over, and another one in its place.
    colors = (
        "const c = document.querySelector('#sessions canvas');"
        "return new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    )
    until("squares are drawn", lambda: page.browser.execute_script(colors) > 1)
    opened = (
        "const b = document.querySelector('#sessions .session button');"
        "if (b.getAttribute('aria-expanded') !== 'true') b.click()"
    )
    about = lambda: page.browser.execute_script(opened) or page.texts("#sessions .about li")
    until("it is told what they are", lambda: any("Tokens 0 to" in line for line in about()))
    for appearance in ["light", "dark"]:
        page.appear(appearance)
        page.accessible(f"a conversation, {appearance}")
        page.picture(f"page-{appearance}")
    page.appear("system")


def stop(page, others):
    """A reply that is stopped stands as it is, and its pages are given back."""
    for _ in range(5):
        page.click("#new-chat")
        until("there is room for a message", page.is_waiting)
        page.say(ASKS_FOR_MUCH)
        until("the reply begins", page.reply)
        page.click("#stop")
        until("the reply is over", page.is_waiting)
        if "stopped" in until("it is noted", page.figures):
            break
    else:
        raise AssertionError("every reply was finished before it could be stopped")
    text = page.reply()
    time.sleep(0.5)
    assert text and page.reply() == text
    others.end()
    until("no session is left", lambda: not page.sessions())


def new_chat_during_a_reply(page):
    """The old chat keeps what it has; nothing of it gets into the new one."""
    page.settings({"#max-tokens": "600"})
    page.say("What is a trait?")
    until("the reply begins", page.reply)
    page.click("#new-chat")
    page.settings({"#max-tokens": "12"})
    page.say("What is a closure?")
    page.finished()
    assert len(page.find("#messages > li")) == 2, page.texts("#messages > li")
    figures = page.figures()
    assert " 12 tokens" in figures, figures
    assert page.prompt_tokens() < 30, f"the prompt is one question: {figures}"


def branches(page):
    """A reply made again and an edited message are branches, between which one can change."""
    page.press("#messages > li.assistant", "Regenerate")
    page.finished()
    assert page.texts("#messages > li.assistant .branch") == ["2/2"]
    page.press("#messages > li.assistant", "Earlier version")
    assert page.texts("#messages > li.assistant .branch") == ["1/2"]
    page.press("#messages > li.user", "Edit")
    field = page.find("#messages textarea")[0]
    field.clear()
    field.send_keys("What is a *lifetime*?")
    page.press("#messages > li.user", "Send")
    page.finished()
    assert page.texts("#messages > li.user .text") == ["What is a *lifetime*?"]
    page.press("#messages > li.user", "Earlier version")
    assert page.texts("#messages > li.user .text") == ["What is a closure?"]


def kept(page):
    """Chats are there after a reload, with their branches; one that is deleted is not."""
    titles = page.texts("#chats .title")
    assert "What is a closure?" in titles and "What is ownership?" in titles, titles
    page.browser.refresh()
    until("they are there again", lambda: page.texts("#chats .title") == titles)
    assert page.texts("#messages > li.user .text") == ["What is a closure?"]
    assert page.texts("#messages > li.user .branch") == ["1/2"]
    page.browser.execute_script("window.confirm = () => true")
    page.press("#chats li", "Delete “%s”" % titles[-1])
    until("it is gone", lambda: page.texts("#chats .title") == titles[:-1])


def deleted_during_a_reply(page):
    """A chat that is deleted while its reply comes stays deleted when that ends."""
    titles = page.texts("#chats .title")
    page.click("#new-chat")
    page.settings({"#max-tokens": "600"})
    page.say(ASKS_FOR_MUCH)
    until("the reply begins", page.reply)
    page.press("#chats li:first-child", f"Delete “{ASKS_FOR_MUCH}”")
    until("the reply is over", page.is_waiting)
    page.settings({"#max-tokens": "40"})
    page.say("What is a module?")
    page.finished()
    assert page.texts("#chats .title") == ["What is a module?", *titles], page.texts("#chats .title")
    page.press("#chats li:first-child", "Delete “What is a module?”")


def left_during_a_reply(page):
    """What has come of a reply is there when the page is."""
    page.click("#new-chat")
    page.settings({"#max-tokens": "600"})
    page.say(ASKS_FOR_MUCH)
    begun = until("the reply begins", page.reply)
    page.browser.refresh()
    until("the chat is there again", lambda: page.texts("#messages > li.user"))
    assert page.reply().strip().startswith(begun.strip()[:10]), (page.reply(), begun)
    page.settings({"#max-tokens": "40"})


def a_model_that_is_gone(page):
    """A chat with a model that is served no longer goes on with one that is."""
    chat = {"id": "old", "title": "Old", "changed": time.time() * 2000, "model": "gone", "messages": {}, "leaf": None}
    page.browser.execute_script(
        "localStorage.setItem('lacuna-chat-old', arguments[0])", json.dumps(chat)
    )
    page.browser.refresh()
    page.browser.execute_script("window.confirm = () => true")
    until("it is shown", lambda: page.texts("#chats [aria-current]") == ["Old"])
    assert page.find("#models")[0].get_attribute("value") == "demo"
    page.say("What is a crate?")
    page.finished()
    page.press("#chats li:first-child", "Delete “Old”")


def two_windows(page):
    """What is said in one window is there in the other, and neither loses what the other has kept."""
    page.click("#new-chat")
    page.say("What is a slice?")
    page.finished()
    first = page.browser.current_window_handle
    url = page.browser.current_url
    page.browser.switch_to.new_window("tab")
    second = page.browser.current_window_handle
    page.browser.get(url)
    until("the chat is there", lambda: "What is a slice?" in page.texts("#chats [aria-current]"))
    page.say("And a string?")
    page.finished()
    said = page.texts("#messages > li.user .text")
    assert said == ["What is a slice?", "And a string?"], said
    page.browser.switch_to.window(first)
    until("it came here", lambda: page.texts("#messages > li.user .text") == said)
    page.say("And a vector?")
    page.finished()
    page.browser.switch_to.window(second)
    until("it came there", lambda: page.texts("#messages > li.user .text") == [*said, "And a vector?"])
    page.browser.execute_script("window.confirm = () => true")
    page.press("#chats li:first-child", "Delete “What is a slice?”")
    page.browser.close()
    page.browser.switch_to.window(first)
    until("it is gone", lambda: "What is a slice?" not in page.texts("#chats .title"))
    page.click("#new-chat")


def files(page):
    """A text file goes along under its name; what is no text is refused by name."""
    page.click("#new-chat")
    with tempfile.TemporaryDirectory() as folder:
        text, other = Path(folder) / "notes.txt", Path(folder) / "image.bin"
        text.write_text("Pages are 4 KiB.\n```\nfence\n```\n")
        other.write_bytes(b"\x00\xff\xfe")
        page.find("#files")[0].send_keys(f"{text}\n{other}")
        until("the text is there", lambda: page.texts("#attachments li span:first-child") == ["notes.txt"])
        assert "image.bin is not text" in page.texts("#refused")[0]
        # The model reads text alone, which is said; nothing typed is lost.
        page.find("#text")[0].send_keys("What does it say?")
        picture = Path(folder) / "cat.png"
        picture.write_bytes(drawn(page, 8, 8))
        page.find("#files")[0].send_keys(str(picture))
        until("it is refused", lambda: "cat.png is a picture" in page.texts("#refused")[0])
        assert len(page.find("#attachments li")) == 1
        page.find("#text")[0].send_keys(Keys.ENTER)
    page.finished()
    said = page.texts("#messages > li.user .text")[0]
    assert said.startswith("notes.txt:\n````\nPages are 4 KiB."), said
    assert said.endswith("````\n\nWhat does it say?"), said
    assert not page.find("#attachments li")


def markdown(page):
    """What models write is shown as they mean it, and never becomes part of the page."""
    shown = page.browser.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "import('/page/markdown.js').then(({ markdown, Markdown }) => {"
        "  const text = arguments[0];"
        "  const whole = document.createElement('div'); whole.append(...markdown(text));"
        "  const grown = document.createElement('div');"
        "  const growing = new Markdown(grown, (change) => change());"
        "  for (const part of text) { growing.append(part); growing.show(); }"
        "  done([whole.innerHTML, grown.innerHTML]);"
        "})",
        "# Title\n\nA **bold** word &amp; `code`, [a link](https://example.org) and [another](javascript:alert(1)).\n\n"
        "1. one\n2. two\n   - [x] done\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```rust\nlet a = \"<b>\";\n```\n\n"
        "<img src=x onerror=alert(1)> <script>alert(1)</script>\n\n![picture](https://example.org/p.png)\n",
    )
    whole, grown = shown
    assert whole == grown, f"{whole}\n{grown}"
    for part in ["<h3>Title</h3>", "<strong>bold</strong>", " &amp; ", "<table>", "let a = \"&lt;b&gt;\";", "checkbox"]:
        assert part in whole, f"{part} in {whole}"
    for part in ["<script", "<img", "javascript:"]:
        assert part not in whole, f"{part} in {whole}"
    assert 'href="https://example.org/"' in whole and "picture" in whole


def failing(page):
    """What is refused says why where one looks, keeps what was typed, and can be tried again."""
    page.click("#new-chat")
    long = "word " * 3000
    page.browser.execute_script(
        "const t = document.getElementById('text'); t.value = arguments[0]; t.dispatchEvent(new Event('input'))", long
    )
    page.click("#send")
    error = until("it is said", lambda: page.find("#messages > li.assistant .error"))[0]
    assert "shorten it" in error.text, error.text
    seen = page.browser.execute_script(
        "const r = arguments[0].getBoundingClientRect(), s = document.getElementById('scroll').getBoundingClientRect();"
        "return r.top >= s.top && r.bottom <= s.bottom + 1",
        error,
    )
    assert seen, "the error is in sight"
    assert page.texts("#messages > li.user .text")[0].strip() == long.strip()
    page.press("#messages > li.assistant", "Try again")
    until("it is refused again", lambda: page.texts("#messages > li.assistant .branch") == ["2/2"])


def instructions(page):
    """They belong to a chat and are the first of what the model reads."""
    page.click("#new-chat")
    page.say("Hello")
    page.finished()
    plain = page.prompt_tokens()
    page.click("#new-chat")
    page.settings({"#system": "Answer in the form of a poem about memory and ownership."})
    page.say("Hello")
    page.finished()
    assert page.prompt_tokens() > plain
    page.click("#new-chat")
    assert page.find("#system")[0].get_attribute("value") == ""


def narrow(page):
    """On a phone chats, conversation and map take turns."""
    page.browser.set_window_size(420, 860)
    until("the conversation is shown", page.find("#chat")[0].is_displayed)
    for name in ["memory", "history"]:
        assert not page.find(f"#{name}")[0].is_displayed()
        page.find(f"#show-{name}")[0].click()
        until("it is shown instead", page.find(f"#{name}")[0].is_displayed)
        assert not page.find("#chat")[0].is_displayed()
        page.accessible(f"{name} on a phone")
        page.find(f"#show-{name}")[0].click()
    page.click("#chats .title")
    width = page.browser.execute_script("return document.documentElement.scrollWidth")
    shown = page.browser.execute_script("return document.documentElement.clientWidth")
    assert width <= shown, f"{width} pixels in {shown}"
    model = page.find("#models")[0]
    assert model.rect["width"] > 60, "the model's name has room"
    for appearance in ["light", "dark"]:
        page.appear(appearance)
        page.accessible(f"a phone, {appearance}")
        page.picture(f"page-phone-{appearance}")
    page.appear("system")
    page.browser.set_window_size(1280, 860)


def drawn(page, width, height):
    """The PNG file of a picture: a sun over the sea."""
    url = page.browser.execute_script(
        "const [width, height] = arguments, c = document.createElement('canvas');"
        "c.width = width; c.height = height; const d = c.getContext('2d');"
        "const sky = d.createLinearGradient(0, 0, 0, height);"
        "sky.addColorStop(0, '#2a4d8f'); sky.addColorStop(0.7, '#f6a35c');"
        "d.fillStyle = sky; d.fillRect(0, 0, width, height);"
        "d.fillStyle = '#ffd98a'; d.beginPath();"
        "d.arc(width / 2, height * 0.68, width / 9, 0, 7); d.fill();"
        "d.fillStyle = '#1f3350'; d.fillRect(0, height * 0.72, width, height);"
        "return c.toDataURL()",
        width,
        height,
    )
    return base64.b64decode(url.split(",", 1)[1])


# What hands files to an element as dropping and pasting do.
HAND_OVER = """
const [selector, kind, files] = arguments, data = new DataTransfer();
for (const [name, type, encoded] of files)
  data.items.add(new File([Uint8Array.from(atob(encoded), (c) => c.charCodeAt(0))], name, { type }));
const given = { bubbles: true, cancelable: true };
const event = kind === "paste"
  ? new ClipboardEvent("paste", { ...given, clipboardData: data })
  : new DragEvent(kind, { ...given, dataTransfer: data });
document.querySelector(selector).dispatchEvent(event);
"""


def pictures(page, url):
    """A model that sees is shown pictures: chosen, dropped and pasted; they are kept as far as there is room."""
    page.browser.get(url)
    button = lambda: page.find("#attach")[0]
    until("pictures are offered", lambda: "pictures" in button().get_attribute("aria-label"))
    chips = lambda: page.texts("#attachments li span:first-of-type")

    def hand_over(kind, name, content, media_type="image/png"):
        encoded = base64.b64encode(content).decode()
        selector = "#text" if kind == "paste" else "#messages"
        page.browser.execute_script(HAND_OVER, selector, kind, [[name, media_type, encoded]])

    large = drawn(page, 1600, 1000)
    with tempfile.TemporaryDirectory() as folder:
        chosen = Path(folder) / "chosen.png"
        chosen.write_bytes(drawn(page, 320, 200))
        page.find("#files")[0].send_keys(str(chosen))
        until("it is there", lambda: chips() == ["chosen.png"])
    hand_over("dragover", "sea.png", large)
    assert "dropping" in page.find("#chat")[0].get_attribute("class")
    hand_over("drop", "sea.png", large)
    until("it is there too", lambda: chips() == ["chosen.png", "sea.png"])
    hand_over("paste", "pasted.png", drawn(page, 64, 64))
    until("all three are", lambda: len(chips()) == 3)
    shown = "return [...document.querySelectorAll(arguments[0])].map((i) => [i.naturalWidth, i.naturalHeight])"
    sizes = lambda selector: page.browser.execute_script(shown, selector)
    until("all are drawn", lambda: sizes("#attachments img") == [[320, 200], [1024, 640], [64, 64]])
    page.accessible("pictures that are attached")
    for name in ["chosen.png", "pasted.png"]:
        remove = page.find(f"#attachments button[aria-label='Remove {name}']")[0]
        page.browser.execute_script("arguments[0].focus()", remove)
        remove.send_keys(Keys.ENTER)
    assert chips() == ["sea.png"]
    # What is no picture is refused by name; nothing typed or attached is lost.
    # Longer than a group of pages, so that it is found computed again.
    text = (
        "Please say what is to be seen in this picture and whether the sun is about to rise or to set over the sea "
        "and how you can tell which of them it is"
    )
    page.find("#text")[0].send_keys(text)
    hand_over("drop", "broken.png", b"no picture")
    until("it is refused", lambda: "broken.png is no picture" in page.texts("#refused")[0])
    assert chips() == ["sea.png"] and page.find("#text")[0].get_attribute("value") == text
    page.settings({"#temperature": "0", "#max-tokens": "8"})
    page.find("#text")[0].send_keys(Keys.ENTER)
    page.finished()
    assert sizes("#messages .user img") == [[1024, 640]] and not page.find("#attachments li")
    assert page.find("#messages .user img")[0].get_attribute("alt") == "sea.png"
    page.accessible("a conversation with a picture")
    first = page.prompt_tokens()
    page.picture("page-picture")
    page.browser.refresh()
    until("it is kept", lambda: sizes("#messages .user img") == [[1024, 640]])
    page.say("A B")
    page.finished()
    assert page.prompt_tokens() > first + 4
    reused = int(re.search(r"(\d+) of \d+ prompt tokens reused", page.figures())[1])
    assert reused > 32, f"the same picture is found computed: {reused} of {first}"
    refused_by_the_server(page)
    without_room(page, hand_over, sizes)


def refused_by_the_server(page):
    """A picture that the server does not take is said to be none, and can be taken out of its message."""
    page.browser.execute_script(
        "const p = [{ name: 'odd.png', url: 'data:image/png;base64,AAAA' }];"
        "const m = { id: 'm', parent: null, role: 'user', content: 'A B C', made: 1, pictures: p };"
        "const c = { id: 'c', title: 'Odd', changed: Date.now() + 1e9, messages: { m }, leaf: 'm' };"
        "localStorage.setItem('lacuna-chat-c', JSON.stringify(c))"
    )
    page.browser.refresh()
    until("the chat is there", lambda: page.texts("#messages .user .text") == ["A B C"])
    page.press("#messages > li.user", "Edit")
    page.press("#messages > li.user", "Send")
    error = until("it is said", lambda: page.texts("#messages > li.assistant .error"))[0]
    assert "no PNG, JPEG, WebP or GIF" in error, error
    page.press("#messages > li.user", "Edit")
    assert page.find("#messages textarea")[0].get_attribute("value") == "A B C"
    page.press("#messages > li.user", "Remove odd.png")
    page.press("#messages > li.user", "Send")
    page.finished()
    assert page.texts("#messages > li.user .text") == ["A B C"] and not page.find("#messages img")


def without_room(page, hand_over, sizes):
    """Pictures that there is no room for are shown as long as the page is there, which is said."""
    page.click("#new-chat")
    # Full but for the text, whose place is made at first.
    page.browser.execute_script(
        "localStorage.setItem('fill', 'x'.repeat(4096));"
        "let bytes = 1 << 22; while (bytes > 2048) {"
        "  try { localStorage.setItem(`fill-${bytes}-${Math.random()}`, 'x'.repeat(bytes)) } catch { bytes /= 2 } }"
        "localStorage.removeItem('fill')"
    )
    hand_over("drop", "evening.png", drawn(page, 1600, 1000))
    until("it is there", lambda: page.find("#attachments img"))
    page.say("A B C")
    page.finished()
    assert "keep this chat’s pictures" in page.texts("#not-kept")[0]
    assert sizes("#messages .user img") == [[1024, 640]]
    page.browser.refresh()
    until("its text is", lambda: page.texts("#messages .user .text") == ["A B C"])
    assert page.texts("#messages .user .pictures li") == ["evening.png (not kept)"]


def keyed(page, url, key):
    """A server that wants a key is given one; a wrong one is said to be wrong, and can be mended."""
    page.browser.get(url)
    dialog = lambda: page.find("#key-dialog")[0].is_displayed()
    until("it asks for a key", dialog)
    assert not page.find("#key-refused")[0].is_displayed()
    page.find("#key")[0].send_keys("wrong", Keys.ENTER)
    until("it says that it is wrong", lambda: dialog() and page.find("#key-refused")[0].is_displayed())
    assert page.find("#key")[0].get_attribute("value") == "wrong"
    page.accessible("the key dialog")
    page.find("#key")[0].clear()
    page.find("#key")[0].send_keys(key, Keys.ENTER)
    until("the map is there", lambda: page.committed() or page.texts("#summary")[0])
    page.say("Hello")
    page.finished()


def main():
    url, keyed_url, key, folder, seeing_url = sys.argv[1:]
    with tempfile.TemporaryDirectory() as profile:
        browser = open_browser(profile)
        page = Page(browser, folder)
        try:
            browser.get(url)
            welcome(page)
            page.settings({"#temperature": "0"})
            others = Others(url, 10)
            converse(page, 10)
            the_map(page)
            stop(page, others)
            new_chat_during_a_reply(page)
            page.settings({"#max-tokens": "40"})
            branches(page)
            kept(page)
            deleted_during_a_reply(page)
            left_during_a_reply(page)
            a_model_that_is_gone(page)
            two_windows(page)
            files(page)
            markdown(page)
            failing(page)
            instructions(page)
            narrow(page)
            errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
            # The refused prompt is one that the browser tells.
            errors = [entry for entry in errors if " 400 " not in entry["message"]]
            assert not errors, errors
            keyed(page, keyed_url, key)
            pictures(page, seeing_url)
        except AssertionError as error:
            raise AssertionError(f"{error}; the page shows {page.shown()}") from error
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
