// The analysts' page: asks for the report, shows it, keeps it current.

import { announce, byId, element } from "./dom.js";
import { call, json, ServiceError } from "./api.js";
import { cardOf } from "./card.js";
import * as charts from "./charts.js";
import { capital, count, counted, decimal, NONE, seconds } from "./format.js";
import { installKeyring, withKey } from "./keyring.js";
import { clock, plotly } from "./plot.js";

const REFRESH_MILLISECONDS = 60_000;
const ALL = "all";
const REQUESTS_A_STEP = 8;
const MAX_STEPS = 400; // as the service allows
const STEPS = [[60, "1m"], [300, "5m"], [900, "15m"], [3600, "1h"], [10_800, "3h"], [21_600, "6h"], [43_200, "12h"], [86_400, "1d"], [604_800, "7d"]];

let asked = 0;
let shown = null;

function wanted() {
  return { window: document.querySelector("input[name=window]:checked").value, domain: byId("domain").value };
}

function query(values) {
  return `/v1/acceptance?${new URLSearchParams({ window: wanted().window, group_by: "draft", ...values })}`;
}

/** Steps of the time series: as fine as the requests allow, since a rate of two requests says nothing. */
function bucket(report) {
  const { domain } = wanted();
  const counts = Object.entries(report.domains).filter(([name]) => (domain ? name === domain : name !== ALL))
    .map(([, figures]) => figures.num_requests).sort((a, b) => a - b);
  const typical = counts[Math.floor(counts.length / 2)] ?? 0;
  const { buckets, width } = seriesOf(report, domain || ALL);
  const filled = buckets.length ? buckets.at(-1).start + width - buckets[0].start : report.until - report.since;
  const ideal = filled / Math.min(60, Math.max(4, typical / REQUESTS_A_STEP));
  const away = ([seconds]) => Math.abs(Math.log(seconds / ideal));
  const allowed = STEPS.filter(([seconds]) => (report.until - report.since) / seconds <= MAX_STEPS);
  return allowed.reduce((best, step) => (away(step) < away(best) ? step : best))[1];
}

/** The report with its time series. How much there is must be known first: of this window, from the last time. */
async function read() {
  const { window: span } = wanted();
  const known = shown?.asked === span ? shown : await json(query({ bucket: "auto" }));
  const report = Object.keys(known.domains).length ? await json(query({ bucket: bucket(known) })) : known;
  return { ...report, asked: span };
}

/** Ask for the report and show it; a newer question makes an older answer void. */
async function load(loud = true) {
  asked += 1;
  const mine = asked;
  byId("report").setAttribute("aria-busy", String(loud));
  try {
    const report = await withKey(read);
    if (mine !== asked) return;
    byId("trouble").hidden = true;
    show(report);
    if (loud) announce(byId("stand").textContent);
  } catch (fault) {
    if (mine !== asked) return;
    trouble(fault instanceof ServiceError ? fault.message : "The page could not show this report.");
    byId("stand").textContent = shown ? byId("stand").textContent : "No figures could be read.";
    if (!(fault instanceof ServiceError)) throw fault;
  } finally {
    if (mine === asked) byId("report").setAttribute("aria-busy", "false");
  }
}

function show(report) {
  shown = report;
  const name = wanted().domain || ALL;
  const figures = report.domains[name];
  const total = figures?.num_requests ?? 0;
  byId("stand").textContent = `${counted(total, "request")} from ${clock(report.since).slice(0, 16)} to ${clock(report.until).slice(0, 16)}`;
  byId("empty").hidden = total > 0;
  byId("content").hidden = total === 0;
  byId("drifts").replaceChildren(...Object.entries(report.domains).flatMap(([domain, own]) => driftOf(domain, own.drift)));
  if (!total) return;
  byId("summary").replaceChildren(...summary(figures));
  domainTable(report);
  const series = seriesOf(report, name);
  const names = Object.keys(report.domains).filter((domain) => domain !== ALL);
  const rated = names.length > 1 && name === ALL ? names : [name];
  byId("rates").className = `grid ${rated.length > 1 ? "small" : "single"}`;
  fill("rates", rated.map((domain) => charts.rateOverTime(domain, report.domains[domain], seriesOf(report, domain))));
  fill("speculation", [charts.lengthOverTime(figures, series), charts.histogram(figures), charts.byPosition(figures),
    charts.byCause(figures), charts.drafts(figures), charts.drafters(figures)]);
  fill("latency", [charts.latencyOverTime(figures, series), charts.stages(figures), charts.speedOverTime(figures, series), charts.volume(figures, series)]);
  draw().catch((fault) => trouble(fault.message));
}

function trouble(sentence) {
  byId("trouble").textContent = sentence;
  byId("trouble").hidden = false;
}

function seriesOf(report, domain) {
  return { buckets: report.series.domains[domain] ?? [], width: report.series.bucket_seconds };
}

function fill(id, found) {
  byId(id).replaceChildren(...found.map(cardOf));
}

/** Draw the cards' charts one by one, so that the page answers meanwhile. */
async function draw() {
  await plotly();
  for (const card of document.querySelectorAll(".card")) {
    if (!card.isConnected || !card.draw) continue;
    await card.draw();
    await new Promise((resolve) => { setTimeout(resolve); });
  }
}

function summary(figures) {
  const { latency_seconds: latency, interval, baseline } = figures;
  const rate = figures.lossy ? ["Acceptance, lossy rule", figures.lossy_acceptance_rate] : ["Acceptance rate α", figures.acceptance_rate];
  const entries = [
    [rate[0], decimal(rate[1]), interval ? `${decimal(interval[0])} to ${decimal(interval[1])}${baseline ? `, baseline ${decimal(baseline)}` : ""}` : "no interval yet"],
    ["Tokens a round", decimal(figures.mean_acceptance_length), `${counted(figures.num_rounds, "round")}`],
    ["Latency, P50", seconds(latency?.p50), `P95 ${seconds(latency?.p95)}, P99 ${seconds(latency?.p99)}`],
    ["Tokens per second", decimal(figures.tokens_per_second, 1), `${count(figures.num_generated_tokens)} tokens`],
    ["Requests", count(figures.num_requests), outcomes(figures.outcomes)],
  ];
  return entries.map(([name, value, more]) => element("div", {}, element("dt", {}, name), element("dd", {}, value, element("small", {}, more))));
}

function outcomes(found) {
  const others = Object.entries(found).filter(([name]) => name !== "ok");
  return others.length ? others.map(([name, value]) => `${count(value)} ${name.replaceAll("_", " ")}`).join(", ") : "all answered";
}

function domainTable(report) {
  const head = ["Domain", "Requests", "α", "95 % interval", "Baseline", "Tokens a round", "Accepted / drafted", "P50", "P95", "P99", "Tokens/s"];
  const rows = Object.entries(report.domains).map(([name, figures]) => {
    const { latency_seconds: latency, interval } = figures;
    const cells = [count(figures.num_requests), decimal(figures.acceptance_rate),
      interval ? `${decimal(interval[0])} – ${decimal(interval[1])}` : NONE, decimal(figures.baseline), decimal(figures.mean_acceptance_length),
      decimal(figures.accepted_over_drafted), seconds(latency?.p50), seconds(latency?.p95), seconds(latency?.p99), decimal(figures.tokens_per_second, 1)];
    const title = name === ALL ? "All domains" : capital(name);
    const pick = element("button", { type: "button", class: "link", "aria-label": `Show ${title}`, onclick: () => choose(name === ALL ? "" : name) }, title);
    const current = name === (wanted().domain || ALL);
    return element("tr", { class: name === ALL ? "total" : null, "aria-current": current ? "true" : null }, element("th", { scope: "row" }, pick),
      ...cells.map((cell, index) => element("td", { class: index === 2 ? "range" : null }, cell)));
  });
  byId("domains").replaceChildren(
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, ...rows));
}

function driftOf(domain, drift) {
  if (!drift) return [];
  const since = drift.begun_before_window ? "since before this window" : `since ${clock(drift.begun_at).slice(0, 16)}`;
  const changed = (drift.changed ?? []).map((change) => change.dimension ?? change.name ?? change).filter((name) => typeof name === "string");
  const with_ = changed.length ? ` What changed with it: ${changed.join(", ")}.` : "";
  const from = drift.reference === "baseline" ? "the baseline" : "earlier";
  return [element("p", { class: `notice ${drift.direction === "fell" ? "bad" : ""}` },
    `α of ${domain} ${drift.direction} to ${decimal(drift.rate_after)} from ${from} (${decimal(drift.rate_before)}), ${since}, on ${counted(drift.num_requests, "request")}.${with_}`)];
}

function choose(domain) {
  byId("domain").value = domain;
  changed();
  byId("domain").focus();
}

function changed() {
  const { window: span, domain } = wanted();
  history.replaceState(null, "", `?${new URLSearchParams(domain ? { window: span, domain } : { window: span })}`);
  load();
}

async function download(format) {
  try {
    const { window: span, domain } = wanted();
    const response = await withKey(() => call(query(domain ? { format, domain } : { format })));
    const address = URL.createObjectURL(await response.blob());
    element("a", { href: address, download: `acceptance-${domain || ALL}-${span}.${format}` }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  } catch (fault) {
    trouble(fault.message);
  }
}

/** The pickers, as the address says. */
async function pickers() {
  const given = new URLSearchParams(location.search);
  const domains = await withKey(() => json("/v1/domains"));
  const known = [...domains.data.map(({ id }) => id), "other"];
  byId("domain").replaceChildren(element("option", { value: "" }, "All domains"), ...known.map((id) => element("option", { value: id }, id)));
  if (known.includes(given.get("domain"))) byId("domain").value = given.get("domain");
  const radio = [...document.querySelectorAll("input[name=window]")].find((input) => input.value === given.get("window"));
  if (radio) radio.checked = true;
}

async function start() {
  try {
    await pickers();
  } catch (fault) {
    trouble(fault.message);
  }
  await load();
}

installKeyring(start);
byId("controls").addEventListener("submit", (event) => event.preventDefault());
byId("controls").addEventListener("change", changed);
byId("download-csv").addEventListener("click", () => download("csv"));
byId("download-parquet").addEventListener("click", () => download("parquet"));
window.addEventListener("themechange", () => { if (shown) show(shown); });
setInterval(() => { if (!document.hidden && !document.querySelector("dialog[open]") && !document.querySelector(".card .table:not([hidden])")) load(false); }, REFRESH_MILLISECONDS);
start();
