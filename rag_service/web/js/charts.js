// The charts of the acceptance report. Each says what it shows, on how many requests, and its figures.

import { capital, count, counted, decimal, seconds } from "./format.js";
import { axis, bands, clock, colours, layout, points, timeAxis } from "./plot.js";
import { drafterName } from "./strip.js";

const CAUSES = {
  all_accepted: "All accepted",
  rejected: "One rejected",
  censored: "Cut by the end",
  no_proposal_off: "No proposal: off",
  no_proposal_timeout: "No proposal: too late",
  no_proposal_miss: "No proposal: nothing fitted",
  no_proposal_draft_down: "No proposal: draft down",
  no_proposal_overloaded: "No proposal: draft full",
};
const STAGES = ["queue", "embed", "search", "rerank", "prompt", "prefill", "decode"];
const PERCENTILES = ["p50", "p95", "p99"];
const FEW = 4; // buckets up to which a band would hardly be seen: bars then

const when = (bucket) => clock(bucket.start).slice(5, 16);
const requests = (value) => `Stands on ${counted(value, "request")}`;
const nothingHere = (title, meaning, stands) => ({ title, meaning, stands, nothing: "Nothing of this was measured in the window." });

/** α of one domain over time: line, band of its interval, baseline. */
export function rateOverTime(name, figures, series) {
  const title = name === "all" ? "All domains" : capital(name);
  const told = figures.num_tested_requests;
  const rated = series.buckets.filter((bucket) => bucket.acceptance_rate !== null);
  const meaning = figures.lossy ? "Decoded by a lossy rule, which gives no α" : `α ${decimal(figures.acceptance_rate)}${span(figures.interval)}${dashed(figures.baseline)}`;
  if (!rated.length) return nothingHere(title, meaning, requests(told));
  return {
    title, meaning,
    stands: requests(told),
    label: `Acceptance rate of ${title} over time: ${decimal(figures.acceptance_rate)} in all, from `
      + `${decimal(Math.min(...rated.map((b) => b.acceptance_rate)))} to ${decimal(Math.max(...rated.map((b) => b.acceptance_rate)))}.`,
    data: () => rateTraces(rated, series.width, figures.baseline),
    layout: () => layout({
      xaxis: timeAxis(series), yaxis: axis({ range: [0, 1.02], dtick: 0.25, tickformat: ".2f" }),
      shapes: baseline(figures.baseline),
    }),
    table: {
      head: ["From", "α", "Low", "High", "Requests"],
      rows: rated.map((b) => [when(b), decimal(b.acceptance_rate), decimal(b.interval?.[0]), decimal(b.interval?.[1]), count(b.num_tested_requests)]),
    },
  };
}

function rateTraces(rated, width) {
  const { accent, tint } = colours();
  const line = points(rated, width, (bucket) => bucket.acceptance_rate);
  const few = rated.length <= FEW;
  const main = {
    x: line.x, y: line.y, mode: "lines+markers", line: { color: accent, width: 2 }, marker: { color: accent, size: few ? 7 : 4.5 },
    text: line.bucket.map((bucket) => (bucket ? `${decimal(bucket.acceptance_rate)}${span(bucket.interval)}<br>${counted(bucket.num_tested_requests, "request")}` : "")),
    hovertemplate: "%{text}<extra>%{x}</extra>",
  };
  if (!few) return [...bands(line, tint), main];
  const reach = (index) => line.bucket.map((bucket) => (bucket?.interval ? Math.abs(bucket.interval[index] - bucket.acceptance_rate) : 0));
  main.error_y = { type: "data", symmetric: false, color: accent, thickness: 1.5, width: 4, array: reach(1), arrayminus: reach(0) };
  return [main];
}

function baseline(value) {
  if (value === null || value === undefined) return [];
  return [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: value, y1: value, line: { color: colours().muted, width: 1, dash: "dash" } }];
}

function dashed(value) {
  return value === null || value === undefined ? "" : `; baseline ${decimal(value)}, dashed`;
}

function span(interval) {
  return interval ? `, ${decimal(interval[0])} to ${decimal(interval[1])}` : "";
}

/** One figure over time as a line. */
function overTime({ title, meaning, series, value, stands, format, unit, from }) {
  const known = series.buckets.filter((bucket) => value(bucket) !== null && value(bucket) !== undefined);
  if (!known.length) return nothingHere(title, meaning, stands);
  return {
    title, meaning, stands,
    label: `${title}: from ${format(Math.min(...known.map(value)))} to ${format(Math.max(...known.map(value)))}.`,
    data: () => {
      const { accent } = colours();
      const line = points(known, series.width, value);
      return [{
        x: line.x, y: line.y, mode: "lines+markers", line: { color: accent, width: 2 }, marker: { color: accent, size: known.length <= FEW ? 7 : 4.5 },
        text: line.bucket.map((bucket) => (bucket ? `${format(value(bucket))}<br>${counted(bucket.num_requests, "request")}` : "")),
        hovertemplate: "%{text}<extra>%{x}</extra>",
      }];
    },
    layout: () => layout({ xaxis: timeAxis(series), yaxis: axis({ rangemode: "tozero", ...(from === undefined ? {} : { range: [from, 1.08 * Math.max(...known.map(value))] }), nticks: 5 }) }),
    table: { head: ["From", unit, "Requests"], rows: known.map((b) => [when(b), format(value(b)), count(b.num_requests)]) },
  };
}

export function lengthOverTime(figures, series) {
  return overTime({
    title: "Mean acceptance length", unit: "Tokens a round", series, from: 1, format: (value) => decimal(value),
    meaning: `Tokens a round, ${decimal(figures.mean_acceptance_length)} in all; plain decoding makes 1`,
    value: (bucket) => bucket.mean_acceptance_length, stands: requests(figures.num_tested_requests),
  });
}

export function speedOverTime(figures, series) {
  return overTime({
    title: "Tokens per second", unit: "Tokens/s", series, format: (value) => decimal(value, 1),
    meaning: `While decoding, one request; ${decimal(figures.tokens_per_second, 1)} in all`,
    value: (bucket) => bucket.tokens_per_second, stands: requests(figures.num_timed_requests),
  });
}

export function volume(figures, series) {
  return {
    title: "Request volume", stands: requests(figures.num_requests),
    meaning: `Each bar is ${spanOf(series.width)}`,
    label: `Request volume over time: ${counted(figures.num_requests, "request")} in all.`,
    data: () => [{
      type: "bar", x: series.buckets.map((b) => clock(b.start + series.width / 2)), y: series.buckets.map((b) => b.num_requests),
      width: series.width * 800, marker: { color: colours().accent }, hovertemplate: "%{y} requests<extra>%{x}</extra>",
    }],
    layout: () => layout({ xaxis: timeAxis(series), yaxis: axis({ rangemode: "tozero", tickformat: "d", ...(Math.max(...series.buckets.map((b) => b.num_requests)) < 6 ? { dtick: 1 } : { nticks: 5 }) }) }),
    table: { head: ["From", "Requests"], rows: series.buckets.map((b) => [when(b), count(b.num_requests)]) },
  };
}

function spanOf(width) {
  if (width < 3600) return counted(width / 60, "minute");
  return width < 86_400 ? counted(width / 3600, "hour") : counted(width / 86_400, "day");
}

function bars({ title, meaning, stands, x, y, text, unit, range, tickformat, table }) {
  return {
    title, meaning, stands, table,
    label: `${title}: ${x.map((name, i) => `${name}, ${text[i]}`).join("; ")}.`,
    data: () => [{
      type: "bar", x, y, text: text.map((t) => t.split(" ")[0]), textposition: "outside", cliponaxis: false,
      textfont: { color: colours().muted, size: 11 }, marker: { color: colours().accent },
      hovertext: text, hovertemplate: "%{hovertext}<extra></extra>",
    }],
    layout: () => layout({
      xaxis: axis({ showgrid: false, type: "category", title: { text: unit, font: { size: 11, color: colours().muted } } }),
      yaxis: axis({ range, tickformat, nticks: 5 }), margin: { l: 36, r: 12, t: 16, b: 40 },
    }),
  };
}

export function histogram(figures) {
  const counts = figures.acceptance_histogram;
  const all = counts.reduce((sum, value) => sum + value, 0);
  const title = "Accepted tokens a round";
  const meaning = "Share of the rounds that had a proposal";
  const stands = `${requests(figures.num_tested_requests)}, ${counted(all, "round")}`;
  if (!all) return nothingHere(title, meaning, stands);
  const shares = counts.map((value) => value / all);
  return bars({
    title, meaning, stands, x: counts.map((_, i) => String(i)), y: shares, unit: "accepted",
    text: counts.map((value, i) => `${Math.round(100 * shares[i])}% of rounds (${count(value)})`),
    range: [0, Math.min(1.1, 1.15 * Math.max(...shares))], tickformat: ".0%",
    table: { head: ["Accepted", "Rounds", "Share"], rows: counts.map((value, i) => [i, count(value), `${(100 * shares[i]).toFixed(1)}%`]) },
  });
}

export function byPosition(figures) {
  const title = "Acceptance by position";
  const meaning = "Of the tokens tested at each place of a proposal";
  const places = figures.conditional_acceptance.map((rate, i) => ({ rate, tested: figures.tested_per_position[i], place: i + 1 }))
    .filter(({ rate, tested }) => rate !== null && tested > 0);
  const stands = `${requests(figures.num_tested_requests)}, ${counted(figures.tested_per_position.reduce((a, b) => a + b, 0), "tested token")}`;
  if (!places.length) return nothingHere(title, meaning, stands);
  return bars({
    title, meaning, stands, x: places.map(({ place }) => String(place)), y: places.map(({ rate }) => rate), unit: "position",
    text: places.map(({ rate, tested }) => `${decimal(rate)} of ${count(tested)} tested`), range: [0, 1.1], tickformat: ".2f",
    table: { head: ["Position", "Accepted of tested", "Tested"], rows: places.map(({ place, rate, tested }) => [place, decimal(rate, 3), count(tested)]) },
  });
}

export function byCause(figures) {
  const title = "Rounds by cause";
  const meaning = "Why each round ended as it did";
  const entries = Object.entries(figures.rounds_by_cause).sort((a, b) => a[1] - b[1]);
  const stands = `${requests(figures.num_tested_requests)}, ${counted(figures.num_rounds, "round")}`;
  if (!entries.length) return nothingHere(title, meaning, stands);
  const all = entries.reduce((sum, [, value]) => sum + value, 0);
  const name = (cause) => CAUSES[cause] ?? capital(cause.replaceAll("_", " "));
  return {
    title, meaning, stands,
    label: `${title}: ${[...entries].reverse().map(([cause, value]) => `${name(cause)}, ${count(value)}`).join("; ")}.`,
    data: () => [{
      type: "bar", orientation: "h", width: 0.5, y: entries.map(([cause]) => name(cause)), x: entries.map(([, value]) => value),
      text: entries.map(([, value]) => `${Math.round((100 * value) / all)}%`), textposition: "outside", cliponaxis: false,
      textfont: { color: colours().muted, size: 11 }, marker: { color: colours().accent },
      hovertemplate: "%{x} rounds<extra></extra>",
    }],
    layout: () => layout({ xaxis: axis({ nticks: 4, tickformat: ",d", range: [0, 1.14 * entries.at(-1)[1]] }), yaxis: axis({ showgrid: false, ticklabelstandoff: 8 }) }),
    table: { head: ["Cause", "Rounds", "Share"], rows: [...entries].reverse().map(([cause, value]) => [name(cause), count(value), `${((100 * value) / all).toFixed(1)}%`]) },
  };
}

export function latencyOverTime(figures, series) {
  const title = "End to end over time";
  const meaning = "Seconds from the question to the last token";
  const known = series.buckets.filter((bucket) => bucket.latency_seconds?.p50 !== null && bucket.latency_seconds);
  if (!known.length) return nothingHere(title, meaning, requests(figures.num_timed_requests));
  const trace = (name, index) => {
    const { accent, muted } = colours();
    const line = points(known, series.width, (bucket) => bucket.latency_seconds[name]);
    return {
      x: line.x, y: line.y, name: name.toUpperCase(), mode: "lines+markers",
      line: { color: index ? muted : accent, width: index ? 1.5 : 2, dash: ["solid", "solid", "dot"][index] },
      marker: { size: known.length <= FEW ? 6 : 3.5 }, hovertemplate: `${name.toUpperCase()} %{y:.2f} s<extra>%{x}</extra>`,
    };
  };
  return {
    title, meaning, stands: requests(figures.num_timed_requests),
    label: `${title}: ${percentilesOf(figures.latency_seconds)}.`,
    data: () => PERCENTILES.map(trace),
    layout: () => layout({ xaxis: timeAxis(series), yaxis: axis({ rangemode: "tozero", nticks: 5, ticksuffix: " s" }), showlegend: true, margin: { l: 36, r: 12, t: 28, b: 28 } }),
    table: { head: ["From", "P50", "P95", "P99", "Requests"], rows: known.map((b) => [when(b), ...PERCENTILES.map((p) => seconds(b.latency_seconds[p])), count(b.num_requests)]) },
  };
}

function percentilesOf(values) {
  return PERCENTILES.map((name) => `${name.toUpperCase()} ${seconds(values?.[name])}`).join(", ");
}

/** P50, P95 and P99 of each stage as three marks on a line; the scale is logarithmic, since stages differ by far. */
export function stages(figures) {
  const title = "By stage";
  const meaning = "P50, P95 and P99; logarithmic scale";
  const rows = [["End to end", figures.latency_seconds], ["First token", figures.time_to_first_token_seconds],
    ...STAGES.map((stage) => [capital(stage), figures.stage_seconds[stage]])]
    .filter(([, values]) => values && values.p50 !== null && values.p99 > 0).reverse();
  if (!rows.length) return nothingHere(title, meaning, requests(figures.num_timed_requests));
  const floor = (value) => Math.max(value, 1e-4);
  return {
    title, meaning, stands: requests(figures.num_timed_requests),
    label: `${title}: ${[...rows].reverse().map(([name, values]) => `${name} ${percentilesOf(values)}`).join("; ")}.`,
    data: () => {
      const { accent, muted, raised } = colours();
      const spans = rows.map(([name, values]) => ({ x: [floor(values.p50), floor(values.p99)], y: [name, name], mode: "lines", line: { color: muted, width: 1 }, hoverinfo: "skip", showlegend: false }));
      const marks = [
        { color: accent, symbol: "circle", size: 9 },
        { color: raised, symbol: "circle", size: 8, line: { color: accent, width: 2 } },
        { color: muted, symbol: "line-ns-open", size: 10, line: { width: 2, color: muted } },
      ];
      return [...spans, ...PERCENTILES.map((p, i) => ({
        x: rows.map(([, values]) => floor(values[p])), y: rows.map(([name]) => name), mode: "markers", name: p.toUpperCase(), marker: marks[i],
        text: rows.map(([, values]) => seconds(values[p])), hovertemplate: `${p.toUpperCase()} %{text}<extra>%{y}</extra>`,
      }))];
    },
    layout: () => layout({
      xaxis: axis({
        type: "log", tickvals: [0.0001, 0.001, 0.01, 0.1, 1, 10, 100], ticktext: ["0.1 ms", "1 ms", "10 ms", "0.1 s", "1 s", "10 s", "100 s"],
      }),
      yaxis: axis({ showgrid: false, ticklabelstandoff: 8 }), showlegend: true, margin: { l: 36, r: 12, t: 28, b: 28 },
    }),
    table: { head: ["Stage", "P50", "P95", "P99"], rows: [...rows].reverse().map(([name, values]) => [name, ...PERCENTILES.map((p) => seconds(values[p]))]) },
  };
}

/** α with its interval for each of several: drafts, or kinds of drafter. */
function compared({ title, meaning, entries, total }) {
  const rated = entries.filter(({ figures }) => figures.acceptance_rate !== null);
  if (!rated.length) return nothingHere(title, meaning, requests(total));
  const rows = [...rated].sort((a, b) => a.figures.acceptance_rate - b.figures.acceptance_rate);
  const bound = (figures, index) => figures.interval?.[index] ?? figures.acceptance_rate;
  const name = (entry) => `${entry.name} (${count(entry.figures.num_requests)})`;
  return {
    title, meaning, stands: requests(total),
    label: `${title}: ${[...rows].reverse().map((e) => `${e.name} ${decimal(e.figures.acceptance_rate)}${span(e.figures.interval)}`).join("; ")}.`,
    data: () => {
      const { accent, tint } = colours();
      return [{
        y: rows.map(name), x: rows.map(({ figures }) => figures.acceptance_rate), mode: "markers", marker: { color: accent, size: 10 },
        error_x: {
          type: "data", symmetric: false, color: tint, thickness: 5, width: 0,
          array: rows.map(({ figures }) => bound(figures, 1) - figures.acceptance_rate),
          arrayminus: rows.map(({ figures }) => figures.acceptance_rate - bound(figures, 0)),
        },
        text: rows.map(({ figures }) => `${decimal(figures.acceptance_rate)}${span(figures.interval)}`), hovertemplate: "%{text}<extra></extra>",
      }];
    },
    layout: () => layout({ xaxis: axis({ range: [0, 1.02], dtick: 0.25, tickformat: ".2f" }), yaxis: axis({ showgrid: false, range: [-0.6, rows.length - 0.4] }) }),
    table: {
      head: ["Name", "α", "Low", "High", "Accepted / drafted", "Requests"],
      rows: [...rows].reverse().map(({ name: own, figures: f }) => [own, decimal(f.acceptance_rate, 3), decimal(f.interval?.[0], 3), decimal(f.interval?.[1], 3), decimal(f.accepted_over_drafted, 3), count(f.num_requests)]),
    },
  };
}

export function drafts(figures) {
  return compared({
    title: "Drafts compared", meaning: "α with its interval; in brackets, requests", total: figures.num_tested_requests,
    entries: (figures.groups ?? []).map((group) => ({ name: group.draft || "no draft", figures: group })),
  });
}

export function drafters(figures) {
  return compared({
    title: "Kinds of drafter", meaning: "α of what each kind proposed; in brackets, requests", total: figures.num_tested_requests,
    entries: Object.entries(figures.drafters ?? {}).map(([kind, own]) => ({ name: drafterName(kind), figures: own })),
  });
}
