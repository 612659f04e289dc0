// What all charts share: Plotly, colours of the page, axes, and time as the reader's clock shows it.

import { ServiceError } from "./api.js";

let loading = null;

/** Plotly, asked for when the first chart is to be drawn: it is large, and the figures should not wait for it. */
export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/web/plotly.js";
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => {
      loading = null;
      reject(new ServiceError("The charts could not be loaded; the figures are complete without them."));
    });
    document.head.append(script);
  });
  return loading;
}

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: read("ink"), muted: read("muted"), line: read("line"), accent: read("accent"),
    tint: read("tint-strong"), raised: read("raised"), sans: read("sans"),
  };
}

/** Clock time of Unix seconds, as Plotly reads dates: without a zone, so that it shows what it is given. */
export function clock(at) {
  const date = new Date(at * 1000);
  const two = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} `
    + `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function axis(changes = {}) {
  const { muted, line } = colours();
  return {
    gridcolor: line, linecolor: line, zeroline: false, showline: false, fixedrange: true, automargin: true,
    tickfont: { color: muted, size: 11 }, ticks: "", ...changes,
  };
}

export function layout(changes = {}) {
  const { ink, muted, raised, sans, line } = colours();
  return {
    paper_bgcolor: raised, plot_bgcolor: raised, font: { family: sans, color: ink, size: 12 },
    margin: { l: 36, r: 12, t: 8, b: 28 }, showlegend: false, separators: ".,", bargap: 0.35, hovermode: "closest", dragmode: false,
    hoverlabel: { bgcolor: raised, bordercolor: line, font: { color: ink, size: 12, family: sans } },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: muted, size: 11 } },
    xaxis: axis({ showgrid: false }), yaxis: axis(), ...changes,
  };
}

/** An axis of time over the buckets, never so narrow that one bucket fills it. */
export function timeAxis({ buckets, width }) {
  const first = buckets[0].start;
  const last = buckets.at(-1).start + width;
  const spare = Math.max(width, (8 * width - (last - first)) / 2);
  return axis({
    showgrid: false, type: "date", range: [clock(first - spare), clock(last + spare)], nticks: 6, hoverformat: "%d %b %H:%M",
    tickformat: last - first + 2 * spare < 4 * 86_400 ? "%H:%M\n%-d %b" : "%-d %b", ticklabelstandoff: 6,
  });
}

/** Areas between the bounds of an interval, one for each run of buckets that have one. */
export function bands(line, color) {
  const runs = [];
  line.bucket.forEach((bucket, i) => {
    if (!bucket?.interval) { runs.push([]); return; }
    if (!runs.length) runs.push([]);
    runs.at(-1).push({ x: line.x[i], low: bucket.interval[0], high: bucket.interval[1] });
  });
  return runs.filter((run) => run.length > 1).map((run) => ({
    x: [...run, ...[...run].reverse()].map(({ x }) => x),
    y: [...run.map(({ high }) => high), ...[...run].reverse().map(({ low }) => low)],
    mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: color, hoverinfo: "skip",
  }));
}

/** Points of a series, with a break wherever buckets are missing between two. */
export function points(buckets, width, value) {
  const found = { x: [], y: [], bucket: [] };
  let previous = null;
  for (const bucket of buckets) {
    const y = value(bucket);
    if (y === null || y === undefined) continue;
    if (previous !== null && bucket.start - previous > 2.5 * width) {
      found.x.push(clock((bucket.start + previous) / 2));
      found.y.push(null);
      found.bucket.push(null);
    }
    found.x.push(clock(bucket.start + width / 2));
    found.y.push(y);
    found.bucket.push(bucket);
    previous = bucket.start;
  }
  return found;
}
