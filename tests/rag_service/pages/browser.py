"""Headless Chromium as the tests speak to it."""

from __future__ import annotations

import base64
import importlib.resources
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

PICTURES = Path(__file__).resolve().parents[3] / "build" / "screenshots"
"""Kept as build artefacts, to be looked at."""
_FLAGS = (
    "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
    "disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars",
)  # fmt: skip
_PATIENCE_SECONDS = 60.0


class Browser:
    """One Chromium. Every page is looked after: what it logs, and whom it calls."""

    def __init__(self, chromium: str, driver: str) -> None:
        options = ChromeOptions()
        options.binary_location = chromium
        for flag in _FLAGS:
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = Chrome(options=options, service=Service(driver))
        self.complaints: list[str] = []
        self.strangers: set[str] = set()

    def quit(self) -> None:
        self.driver.quit()

    def fresh(self) -> None:
        """Forget the last page: its logs, its size, its theme."""
        self.leave()
        self.complaints, self.strangers = [], set()
        self.look(1280, 800)

    def leave(self) -> None:
        """Leave the page before its server goes, and keep what it logged and whom it called but its server."""
        here = urlsplit(self.driver.current_url).netloc
        self.driver.get("about:blank")
        logged = self._log("browser")
        self.complaints += [f"{entry['level']}: {entry['message']}" for entry in logged]
        self.strangers |= self._called() - {here}

    def look(self, width: int, height: int, dark: bool = False) -> None:
        """The size of the screen in pixels, and whether the system is dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})

    def all(self, selector: str) -> list[WebElement]:
        return [
            found for found in self.driver.find_elements(By.CSS_SELECTOR, selector) if found.is_displayed()
        ]

    def one(self, selector: str) -> WebElement:
        """The first visible element of ``selector``, waited for."""
        self.until(lambda: bool(self.all(selector)), selector)
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        return self.one(selector).text

    def until(self, condition: Callable[[], bool], what: str = "") -> None:
        """Wait for ``condition``; elements that are replaced meanwhile count as not yet."""
        from selenium.common.exceptions import StaleElementReferenceException

        def met(_: Any) -> bool:
            try:
                return condition()
            except StaleElementReferenceException:
                return False

        WebDriverWait(self.driver, _PATIENCE_SECONDS, poll_frequency=0.05).until(met, what)

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def js_later(self, script: str, given: Any = None) -> Any:
        """The value that ``script``, the body of an async function of ``given``, comes to."""
        body = f"(async (given) => {{ {script} }})(arguments[0]).then(arguments[1], (e) => arguments[1](String(e)))"
        return self.driver.execute_async_script(body, given)

    def picture(self, name: str) -> None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        shot = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        (PICTURES / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))

    def is_too_wide(self) -> bool:
        """Must one scroll sideways to see the page?"""
        return bool(
            self.js("return document.documentElement.scrollWidth > document.documentElement.clientWidth")
        )

    def barriers(self) -> list[str]:
        """What axe finds against WCAG 2.2 AA and its own best practice, a line each."""
        script = (
            importlib.resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
        )
        self.js(script)
        found = self.js_later("return (await axe.run()).violations")
        return [
            f"{violation['id']}: {node['html'][:160]} ({node['failureSummary'][:200]})"
            for violation in found
            for node in violation["nodes"]
        ]

    def _log(self, kind: str) -> list[dict[str, Any]]:
        driver: Any = self.driver  # selenium types everything but this
        return list(driver.get_log(kind))

    def _called(self) -> set[str]:
        events = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        addresses = [
            str(event["params"]["request"]["url"])
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return {urlsplit(address).netloc for address in addresses if address.startswith(("http", "ws"))}
