// A chart with its title, what it stands on, its figures as a table and its picture to take away.

import { element } from "./dom.js";

/**
 * A card for one chart. `chart`: `{title, meaning, stands, data, layout, label, table: {head, rows}}`, or with
 * `nothing`, a sentence, instead of data.
 */
export function cardOf(chart) {
  const header = element("header", {}, element("h3", {}, chart.title),
    chart.meaning ? element("p", { class: "meaning" }, chart.meaning) : null);
  if (chart.nothing) {
    return element("article", { class: "card" }, header, element("p", { class: "nothing" }, chart.nothing),
      element("footer", {}, element("span", { class: "stands" }, chart.stands)));
  }
  const plot = element("div", { class: "chart", role: "img", "aria-label": chart.label });
  const table = element("div", { class: "table", hidden: true, tabindex: 0, role: "region", "aria-label": `Figures of ${chart.title}` });
  const card = element("article", { class: "card" }, header, plot, table,
    element("footer", {}, element("span", { class: "stands" }, chart.stands),
      element("span", { class: "tools" }, figuresButton(chart, table), pictureButton(chart, plot))));
  card.draw = () => window.Plotly.newPlot(plot, chart.data(), chart.layout(), {
    displayModeBar: false, responsive: true, showTips: false,
  });
  return card;
}

function figuresButton(chart, table) {
  return element("button", {
    type: "button", class: "link", "aria-expanded": "false", "aria-label": `Figures of ${chart.title}`,
    onclick: (event) => {
      if (!table.firstChild) table.append(tableOf(chart.table));
      table.hidden = !table.hidden;
      event.currentTarget.setAttribute("aria-expanded", String(!table.hidden));
    },
  }, "Figures");
}

function pictureButton(chart, plot) {
  return element("button", {
    type: "button", class: "link png", "aria-label": `PNG of ${chart.title}`,
    onclick: () => window.Plotly.downloadImage(plot, {
      format: "png", scale: 2, width: Math.max(720, plot.clientWidth), height: Math.max(360, plot.clientHeight),
      filename: chart.title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, ""),
    }),
  }, "PNG");
}

export function tableOf({ head, rows }) {
  return element("table", { class: "figures" },
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, index) => (
      element(index ? "td" : "th", { scope: index ? null : "row" }, String(cell))))))));
}
