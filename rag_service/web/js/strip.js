// The figures below an answer: how fast it came and how its tokens were made.

import { element } from "./dom.js";
import { capital, count, decimal, NONE, seconds } from "./format.js";

const STAGES = ["queue", "embed", "search", "rerank", "prompt", "prefill", "decode"];
const DRAFTERS = { model: "draft model", passages: "passages", history: "history", none: "none" };

/** The strip of an answer. `onTint(shown)` is told when accepted tokens are to be shown or hidden. */
export function stripOf({ metrics, usage, tokens, onTint }) {
  const stages = element("div", { class: "stages", hidden: true });
  const legend = element("span", { class: "legend", hidden: true });
  const tools = element("div", { class: "tools" });
  if (tokens.length) tools.append(tintToggle(tokens, legend, onTint));
  const timed = metrics.seen ? [] : STAGES.filter((name) => metrics.timings[`${name}_seconds`] !== undefined);
  if (timed.length) tools.append(stageToggle(metrics.timings, timed, stages));
  tools.append(legend);
  return element("footer", { class: "strip" }, metrics.seen ? seenFigures(metrics, usage) : figures(metrics, usage), tools, stages);
}

function figures({ speculative_decoding: spec, timings }, usage) {
  const drafted = spec.num_draft_tokens > 0;
  const speed = usage && timings.decode_seconds > 0 ? usage.completion_tokens / timings.decode_seconds : null;
  const shown = [
    ["First token", seconds(timings.time_to_first_token_seconds)],
    ["Tokens/s", decimal(speed, 1)],
    [spec.lossy ? "Acceptance, lossy rule" : "Acceptance rate α", decimal(spec.acceptance_rate)],
    ["Accepted / drafted", drafted ? `${count(spec.num_accepted_draft_tokens)} / ${count(spec.num_draft_tokens)}` : NONE],
    ["Tokens a round", decimal(spec.mean_acceptance_length)],
    ["Drafter", drafterName(spec.drafter)],
  ];
  return listed(shown);
}

/** Of an answer that was stopped: what the page itself can tell. */
function seenFigures({ accepted, timings }, usage) {
  const speed = timings.decode_seconds > 0 ? usage.completion_tokens / timings.decode_seconds : null;
  return listed([
    ["First token", seconds(timings.time_to_first_token_seconds)],
    ["Tokens/s", decimal(speed, 1)],
    ["Tokens until stopped", count(usage.completion_tokens)],
    ["Of them accepted", count(accepted)],
  ]);
}

function listed(shown) {
  return element("dl", {}, ...shown.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

export function drafterName(drafter) {
  return capital(drafter.split("+").map((kind) => DRAFTERS[kind] ?? kind).join(" + "));
}

function tintToggle(tokens, legend, onTint) {
  const accepted = tokens.filter((token) => token.accepted).length;
  legend.append(element("mark", { class: "accepted" }, "accepted"),
    ` ${count(accepted)} of ${count(tokens.length)} tokens were drafted and accepted`);
  return element("button", {
    type: "button", class: "link tint", "aria-pressed": "false",
    onclick: (event) => {
      const shown = event.currentTarget.getAttribute("aria-pressed") !== "true";
      event.currentTarget.setAttribute("aria-pressed", String(shown));
      event.currentTarget.textContent = shown ? "Hide accepted tokens" : "Show accepted tokens";
      legend.hidden = !shown;
      onTint(shown);
    },
  }, "Show accepted tokens");
}

function stageToggle(timings, names, stages) {
  const longest = Math.max(...names.map((name) => timings[`${name}_seconds`]), 1e-9);
  for (const name of names) {
    const value = timings[`${name}_seconds`];
    const fill = element("span", { class: "fill" });
    fill.style.width = `${(100 * value) / longest}%`;
    stages.append(element("div", {}, element("span", { class: "stage-name" }, capital(name)),
      element("span", { class: "track" }, fill), element("span", { class: "time" }, seconds(value))));
  }
  const total = element("span", { class: "time" }, seconds(timings.total_seconds));
  stages.append(element("div", {}, element("span", { class: "stage-name" }, "In all"), element("span"), total));
  return element("button", {
    type: "button", class: "link", "aria-expanded": "false",
    onclick: (event) => {
      stages.hidden = !stages.hidden;
      if (!stages.hidden) stages.scrollIntoView({ block: "nearest" });
      event.currentTarget.setAttribute("aria-expanded", String(!stages.hidden));
    },
  }, "Where the time went");
}
