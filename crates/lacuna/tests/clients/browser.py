"""The web page in a headless Chromium: `browser.py URL SCREENSHOT`.

Sends a message, watches the reply come and the memory map change, and takes a picture.
"""

import sys
import tempfile
import time

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

    def committed(self):
        return int(self.find("#bars")[0].get_attribute("data-committed-bytes") or 0)

    def say(self, text):
        self.find("#text")[0].send_keys(text, Keys.ENTER)

    def reply(self):
        replies = self.texts("#messages li.assistant:last-child .text")
        return replies[0] if replies else ""


def converse(page):
    until("the page knows the model", lambda: page.texts("#model") == ["demo"])
    before = page.committed()
    page.say("What is ownership?")
    first = until("the reply begins", page.reply)
    until("the reply grows", lambda: len(page.reply()) > len(first))
    session = until(
        "the map shows the session",
        lambda: [count for name, count in page.groups() if name.startswith("Request")],
    )
    until(
        "the session's pages grow",
        lambda: [count for name, count in page.groups() if name.startswith("Request")] > session,
    )
    assert page.committed() > before
    return first


def finish(page):
    until("the reply ends", lambda: page.find("#send")[0].is_displayed())
    assert page.texts("#messages .figures"), "the reply has its figures"
    until("no session is left", lambda: all(not n.startswith("Request") for n, _ in page.groups()))
    assert not page.find("#messages li.failed")


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


def main():
    url, screenshot = sys.argv[1:]
    with tempfile.TemporaryDirectory() as profile:
        browser = open_browser(profile)
        try:
            page = Page(browser)
            browser.get(url)
            converse(page)
            browser.save_screenshot(screenshot)
            page.find("#stop")[0].click()
            finish_after_stop(page)
            page.find("#settings summary")[0].click()
            page.find("#max-tokens")[0].send_keys("40")
            page.say("What is a closure?")
            finish(page)
            narrow(page)
            errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
            assert not errors, errors
        finally:
            browser.quit()


def finish_after_stop(page):
    """A reply that was stopped stands as it is, and its pages are given back."""
    until("the reply is over", lambda: page.find("#send")[0].is_displayed())
    text = page.reply()
    time.sleep(0.5)
    assert text and page.reply() == text
    until("its session is gone", lambda: all(not n.startswith("Request") for n, _ in page.groups()))


main()
