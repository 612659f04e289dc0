// One turn of the conversation: the question, the answer as it comes, its sources and its figures.

import { element } from "./dom.js";
import { counted } from "./format.js";
import { render } from "./markdown.js";
import { openSource } from "./source.js";
import { stripOf } from "./strip.js";
import { origins } from "./tint.js";

export class Answer {
  constructor(question) {
    this.question = question;
    this.content = "";
    this.tokens = [];
    this.sources = [];
    this.annotations = [];
    this.metrics = null;
    this.usage = null;
    this.tinted = false;
    this.origins = null;
    this.frame = 0;
    this.asked = performance.now();
    this.first = null;
    this.text = element("div", { class: "prose writing" });
    this.state = element("p", { class: "state" }, "Searching the documents…");
    this.list = element("ol", { class: "sources", "aria-label": "Sources", hidden: true });
    this.searched = element("p", { class: "searched", hidden: true });
    this.end = element("div");
    this.node = element("article", { class: "turn" }, element("h2", { class: "asked" }, question),
      this.state, this.text, this.list, this.searched, this.end);
  }

  /** Take in one chunk of the stream. */
  see(chunk) {
    if (chunk.sources) this.showSources(chunk.sources, chunk.rag);
    for (const choice of chunk.choices ?? []) {
      this.content += choice.delta?.content ?? "";
      this.tokens.push(...(choice.tokens ?? []));
      this.annotations.push(...(choice.delta?.annotations ?? []));
      this.finishReason = choice.finish_reason ?? this.finishReason;
    }
    this.metrics = chunk.metrics ?? this.metrics;
    this.usage = chunk.usage ?? this.usage;
    if (this.content) {
      this.state.hidden = true;
      this.first ??= performance.now();
    }
    this.frame ||= requestAnimationFrame(() => { this.frame = 0; this.show(); });
  }

  show() {
    this.origins = this.tinted ? origins(this.content, this.tokens) : null;
    render(this.text, this.content, {
      cite: (number) => this.marker(number),
      leaf: (text, at) => this.leaf(text, at),
      signature: (from, to) => (this.origins ? this.origins.slice(from, to).join("") : ""),
    });
    this.onshow?.();
  }

  /** Runs of characters; those of accepted tokens are marked when asked for. */
  leaf(text, at) {
    if (!this.origins) return [document.createTextNode(text)];
    const nodes = [];
    let from = 0;
    for (let i = 1; i <= text.length; i += 1) {
      const accepted = this.origins[at[from]] === 1;
      if (i < text.length && (this.origins[at[i]] === 1) === accepted) continue;
      const part = text.slice(from, i);
      nodes.push(accepted ? element("mark", { class: "accepted" }, part) : document.createTextNode(part));
      from = i;
    }
    return nodes;
  }

  marker(number) {
    const source = this.sources.find((candidate) => candidate.index === number);
    if (!source) return null;
    return element("button", {
      type: "button", class: "cite", "aria-expanded": "false", "aria-controls": "source",
      "aria-label": `${number}, source: ${source.title || source.document_id}`,
      onclick: (event) => openSource(source, event.currentTarget),
    }, String(number));
  }

  showSources(sources, rag) {
    this.sources = sources;
    this.state.textContent = sources.length
      ? `Reading ${counted(sources.length, "source")}…` : "Nothing fitting is indexed; answering without sources…";
    this.list.hidden = !sources.length;
    this.list.replaceChildren(...sources.map((source) => element("li", { "data-source": source.index }, element("button", {
      type: "button", "aria-expanded": "false", "aria-controls": "source",
      onclick: (event) => openSource(source, event.currentTarget),
    },
    element("span", { class: "number" }, String(source.index)),
    element("span", { class: "title" }, source.title || source.document_id),
    element("span", { class: "place" }, place(source)),
    element("span", { class: "snippet" }, source.text.replace(/\s+/g, " ").slice(0, 180))))));
    this.searched.textContent = searchedFor(rag, this.question, sources.length);
    this.searched.hidden = !this.searched.textContent;
  }

  /** The answer has come to its end, whole. */
  finish() {
    this.close();
    if (!this.content) this.note("The model gave no answer.");
    if (this.finishReason === "length") this.note("The answer was cut at its length limit.");
    const cited = new Set(this.annotations.map((annotation) => annotation.source));
    for (const item of this.list.children) {
      item.classList.toggle("uncited", !cited.has(Number(item.dataset.source)));
    }
    if (this.metrics) this.strip(this.metrics, this.usage);
    this.onshow?.();
  }

  /** The reader has stopped it. The service's figures come last and so never came: shown is what the page saw. */
  stop() {
    this.close();
    this.note("Stopped.");
    if (!this.tokens.length || this.first === null) return;
    const accepted = this.tokens.filter((token) => token.accepted).length;
    const decode = (performance.now() - this.first) / 1000;
    this.strip({
      seen: true, accepted,
      timings: { time_to_first_token_seconds: (this.first - this.asked) / 1000, decode_seconds: decode },
    }, { completion_tokens: this.tokens.length });
  }

  strip(metrics, usage) {
    this.end.append(stripOf({
      metrics, usage, tokens: this.tokens,
      onTint: (shown) => { this.tinted = shown; this.show(); },
    }));
  }

  fail(message, retry) {
    this.close();
    this.end.append(element("p", { class: "notice bad", role: "alert" }, message,
      retry ? element("button", { type: "button", onclick: retry }, "Ask again") : null));
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.show();
    this.state.hidden = true;
    this.text.classList.remove("writing");
  }

  note(text) {
    this.end.append(element("p", { class: "note" }, text));
  }

  /** The answer without its markers, as a turn of the history: their numbers mean nothing later. */
  get plain() {
    const characters = Array.from(this.content);
    for (const { url_citation: { start_index: from, end_index: to } } of this.annotations) {
      if (/^\[\d+\]$/.test(characters.slice(from, to).join(""))) characters.fill("", from, to);
    }
    return characters.join("").replace(/ +(?=\s|$)/g, "").trim();
  }
}

function place(source) {
  return [source.page ? `p. ${source.page}` : null, source.domain].filter(Boolean).join(" · ");
}

function searchedFor(rag, question, found) {
  if (!rag) return "";
  const where = rag.domain_inferred && found ? `All domains were searched; most of what was found is ${rag.domain}.` : "";
  const what = rag.query && rag.query.trim() !== question.trim() ? `Searched for “${rag.query}”.` : "";
  return [where, what].filter(Boolean).join(" ");
}
