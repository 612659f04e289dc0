// Dark or light: the reader's own choice when there is one, else the system's. Runs before the first paint.
"use strict";

(() => {
  const STORED = "rag-service-theme";
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function stored() {
    try { return localStorage.getItem(STORED); } catch { return null; }
  }

  function apply() {
    const theme = stored() || (system.matches ? "dark" : "light");
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.setAttribute("aria-label", theme === "dark" ? "Switch to the light theme" : "Switch to the dark theme");
    }
    window.dispatchEvent(new CustomEvent("themechange", { detail: theme }));
  }

  // A disc, half of it filled: the same picture says both.
  function picture() {
    const space = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(space, "svg");
    svg.setAttribute("viewBox", "0 0 18 18");
    svg.setAttribute("aria-hidden", "true");
    const ring = document.createElementNS(space, "circle");
    for (const [name, value] of [["cx", 9], ["cy", 9], ["r", 6.25], ["fill", "none"], ["stroke", "currentColor"], ["stroke-width", 1.5]]) {
      ring.setAttribute(name, value);
    }
    const half = document.createElementNS(space, "path");
    half.setAttribute("d", "M9 2.75a6.25 6.25 0 0 1 0 12.5z");
    half.setAttribute("fill", "currentColor");
    svg.append(ring, half);
    return svg;
  }

  system.addEventListener("change", apply);
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    button.append(picture());
    button.addEventListener("click", () => {
      const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      try { localStorage.setItem(STORED, next); } catch { /* private mode: for this page only */ }
      document.documentElement.dataset.theme = next;
      apply();
    });
    apply();
  });
})();
