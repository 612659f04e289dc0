// The panel beside the conversation: a source's document, open at the passage that was used.

import { byId, element } from "./dom.js";
import { json, ServiceError } from "./api.js";
import { safe } from "./inline.js";

const AROUND = 40; // passages shown before and after the one that was used

let opener = null;
let asked = 0;

/** Open `source` of an answer; `from` is the control that did, and gets the focus back. */
export async function openSource(source, from) {
  closeSource(false);
  opener = from;
  opener?.setAttribute("aria-expanded", "true");
  const panel = byId("source");
  panel.hidden = false;
  byId("source-number").textContent = `Source ${source.index}`;
  byId("source-title").textContent = source.title || source.document_id;
  byId("source-facts").replaceChildren(...facts(source));
  const text = byId("source-text");
  text.replaceChildren(element("p", { class: "state" }, "Opening the document…"));
  panel.focus({ preventScroll: true });
  asked += 1;
  const mine = asked;
  const nodes = await contents(source);
  if (mine !== asked) return;
  text.replaceChildren(...nodes);
  const mark = text.querySelector("mark");
  text.scrollTop = mark ? Math.max(0, mark.offsetTop - text.clientHeight / 4) : 0;
}

export function closeSource(refocus = true) {
  const panel = byId("source");
  if (panel.hidden) return false;
  asked += 1;
  panel.hidden = true;
  opener?.setAttribute("aria-expanded", "false");
  if (refocus && opener?.isConnected) opener.focus();
  opener = null;
  return true;
}

function facts(source) {
  const told = [source.domain, source.section, source.page ? `page ${source.page}` : null].filter(Boolean).join(" · ");
  const address = source.url && !source.url.startsWith("/") ? safe(source.url) : null;
  const link = address
    ? element("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, "Open the original") : null;
  return [told, told && link ? " · " : "", link].filter(Boolean);
}

async function contents(source) {
  try {
    const found = await json(`/v1/documents/${encodeURIComponent(source.document_id)}`);
    const nodes = documentNodes(found.chunks, source);
    if (nodes.some((node) => node.nodeName === "MARK")) return nodes;
    return passageAlone(source, "The document has changed since. This is the passage as it was used.");
  } catch (fault) {
    if (!(fault instanceof ServiceError)) throw fault;
    const reason = fault.status === 404 ? "The document is no longer indexed." : fault.message;
    return passageAlone(source, `${reason} This is the passage as it was used.`);
  }
}

function passageAlone(source, reason) {
  return [element("p", { class: "notice" }, reason), document.createTextNode("\n"), ...marks(source.text)];
}

/** The document's text with the passage that was used marked. Places are code points, as the service counts. */
function documentNodes(chunks, source) {
  const at = chunks.findIndex((chunk) => chunk.chunk_id === source.chunk_id);
  const shown = chunks.slice(Math.max(0, at - AROUND), at + AROUND + 1);
  if (at < 0) return [];
  if (chunks.some((chunk) => chunk.start === null || chunk.end === null)) return byChunk(shown, source);
  const from = source.start ?? chunks[at].start;
  const used = Array.from(source.text).length;
  const to = Math.min(source.end ?? from + used, from + used);
  return joined(shown).flatMap(({ text, start }) => {
    const [before, marked, after] = [
      text.slice(0, Math.max(0, from - start)),
      text.slice(Math.max(0, from - start), Math.max(0, to - start)),
      text.slice(Math.max(0, to - start)),
    ].map((part) => part.join(""));
    return [document.createTextNode(before), ...marks(marked), document.createTextNode(after)];
  });
}

/** The text marked, its empty lines apart: a mark on nothing is a blot. */
function marks(text) {
  return text.split(/(\n\s*)/).filter(Boolean)
    .map((part) => (part.trim() ? element("mark", {}, part) : document.createTextNode(part)));
}

function byChunk(chunks, source) {
  return chunks.flatMap((chunk) => {
    const text = chunk.chunk_id === source.chunk_id ? marks(chunk.text) : [document.createTextNode(chunk.text)];
    return [...text, document.createTextNode("\n\n")];
  });
}

/** Passages may overlap: each gives only what those before it did not. */
function joined(chunks) {
  let end = null;
  const pieces = [];
  for (const chunk of [...chunks].sort((a, b) => a.start - b.start)) {
    const text = Array.from(chunk.text);
    const skipped = end === null ? 0 : Math.max(0, end - chunk.start);
    if (skipped >= text.length) continue;
    if (end !== null && chunk.start > end) pieces.push({ text: Array.from("\n\n"), start: end });
    pieces.push({ text: text.slice(skipped), start: chunk.start + skipped });
    end = chunk.start + text.length;
  }
  return pieces;
}
