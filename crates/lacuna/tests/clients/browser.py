"""The web page in a headless Chromium: `browser.py URL SCREENSHOT`.

Beside other sessions, sends a message, watches the reply come and the memory map change, takes a
picture, and stops the reply.
"""

import json
import sys
import tempfile
import threading
import time
import urllib.request

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
        "--window-size=1180,720",
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
        body = {"prompt": prompt, "max_tokens": 700, "temperature": 1.0, "stream": True}
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
    def __init__(self, browser):
        self.browser = browser

    def find(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

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
        replies = self.texts("#messages li.assistant:last-child .text")
        return replies[0] if replies else ""


def converse(page, others):
    """A message is sent, its reply comes in pieces, and the map shows the pages it takes."""
    until("the page knows the model", lambda: page.texts("#model") == ["demo"])
    # On a busy machine a reply may end before the map is drawn again.
    for _ in range(5):
        until("there is room for a message", page.is_waiting)
        until("the map shows the others", lambda: len(page.sessions()) == others)
        committed = page.committed()
        page.say("What is ownership?")
        first = until("the reply begins", page.reply)
        if not page.while_replying(lambda: len(page.reply()) > len(first)):
            continue
        if not page.while_replying(lambda: len(page.sessions()) > others):
            continue
        drawn = sum(page.sessions())
        until("the sessions' pages grow", lambda: sum(page.sessions()) > drawn)
        return until("more memory is committed", lambda: page.committed() > committed)
    raise AssertionError("every reply ended before the map had shown its session")


def finish(page):
    """A reply that ends by itself has its figures, and leaves no session behind."""
    until("the reply ends", page.is_waiting)
    assert page.texts("#messages .figures"), "the reply has its figures"
    until("no session is left", lambda: not page.sessions())
    assert not page.find("#messages li.failed")


def stop(page, others):
    """A reply that is stopped stands as it is, and its pages are given back."""
    last = "#messages li.assistant:last-child"
    for _ in range(5):
        until("there is room for a message", page.is_waiting)
        page.say("What is a slice?")
        until("the reply begins", page.reply)
        page.browser.execute_script("document.getElementById('stop').click()")
        until("the reply is over", page.is_waiting)
        if not page.texts(f"{last} .figures"):
            break
    else:
        raise AssertionError("every reply was finished before it could be stopped")
    text = page.reply()
    time.sleep(0.5)
    assert text and page.reply() == text
    others.end()
    until("no session is left", lambda: not page.sessions())


def narrow(page):
    """On a phone the map takes the place of the chat when asked for."""
    page.browser.set_window_size(420, 800)
    button = page.find("#show-memory")[0]
    until("there is a button for the map", button.is_displayed)
    assert page.find("#chat")[0].is_displayed() and not page.find("#memory")[0].is_displayed()
    button.click()
    assert page.find("#memory")[0].is_displayed() and not page.find("#chat")[0].is_displayed()
    width = page.browser.execute_script("return document.documentElement.scrollWidth")
    shown = page.browser.execute_script("return document.documentElement.clientWidth")
    assert width <= shown, f"{width} pixels in {shown}"


def settings(page, values):
    page.find("#settings summary")[0].click()
    for field, value in values.items():
        page.find(field)[0].clear()
        page.find(field)[0].send_keys(value)
    page.find("#settings summary")[0].click()


def main():
    url, screenshot = sys.argv[1:]
    with tempfile.TemporaryDirectory() as profile:
        browser = open_browser(profile)
        try:
            page = Page(browser)
            browser.get(url)
            settings(page, {"#temperature": "0"})
            others = Others(url, 10)
            converse(page, 10)
            browser.save_screenshot(screenshot)
            stop(page, others)
            settings(page, {"#max-tokens": "40"})
            page.say("What is a closure?")
            finish(page)
            narrow(page)
            errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
            assert not errors, errors
        finally:
            browser.quit()


main()
