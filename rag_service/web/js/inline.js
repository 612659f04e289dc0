// The inline part of Markdown: emphasis, code, links, and markers of sources. See markdown.js for `{s, at}`.

import { element } from "./dom.js";

const MARKER = /\[(\d{1,3})\]/y;
const LINK = /\[([^[\]\n]+)\]\(([^\s()<>]+)\)/y;
const ADDRESS = /https?:\/\/[^\s<>"]*[^\s<>".,;:!?)\]'*_]/y;
const PAIRS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const MAX_DEPTH = 8;

/** The nodes of a piece of text. */
export function inline(text, context, depth = 0) {
  const nodes = [];
  let plain = 0;
  let i = 0;
  const flush = (to) => {
    if (to > plain) nodes.push(...context.leaf(text.s.slice(plain, to), text.at.slice(plain, to)));
  };
  while (i < text.s.length) {
    const [made, end] = special(text, i, context, depth) ?? [null, i + 1];
    if (made) {
      flush(i);
      nodes.push(...made);
      plain = end;
    }
    i = end;
  }
  flush(text.s.length);
  return nodes;
}

/** The nodes that begin at `i` and where they end, or undefined for plain text. */
function special(text, i, context, depth) {
  const { s } = text;
  switch (s[i]) {
    case "\\": return PUNCTUATION.test(s[i + 1] ?? "") ? [context.leaf(s[i + 1], [text.at[i + 1]]), i + 2] : undefined;
    case "\n": return [[element("br")], i + 1];
    case "`": return codeSpan(text, i, context);
    case "[": return marker(text, i, context) ?? link(text, i, context, depth);
    case "h": return i === 0 || !WORD.test(s[i - 1]) ? address(text, i, context) : undefined;
    case "*": case "_": case "~": return depth < MAX_DEPTH ? emphasis(text, i, context, depth) : undefined;
    default: return undefined;
  }
}

function match(pattern, s, i) {
  pattern.lastIndex = i;
  return pattern.exec(s);
}

function part(text, from, to) {
  return { s: text.s.slice(from, to), at: text.at.slice(from, to) };
}

function codeSpan(text, i, context) {
  let width = 1;
  while (text.s[i + width] === "`") width += 1;
  const fence = "`".repeat(width);
  const close = text.s.indexOf(fence, i + width);
  if (close < 0 || text.s[close + width] === "`") return undefined;
  const inner = part(text, i + width, close);
  return [[element("code", {}, ...context.leaf(inner.s, inner.at))], close + width];
}

function marker(text, i, context) {
  const found = match(MARKER, text.s, i);
  const made = found ? context.cite(Number(found[1])) : null;
  return made ? [[made], i + found[0].length] : undefined;
}

function link(text, i, context, depth) {
  const found = match(LINK, text.s, i);
  const target = found && safe(found[2]);
  if (!target) return undefined;
  const inner = inline(part(text, i + 1, i + 1 + found[1].length), context, depth + 1);
  return [[anchor(target, inner)], i + found[0].length];
}

function address(text, i, context) {
  const found = match(ADDRESS, text.s, i);
  const target = found && safe(found[0]);
  if (!target) return undefined;
  return [[anchor(target, context.leaf(found[0], text.at.slice(i, i + found[0].length)))], i + found[0].length];
}

function anchor(target, children) {
  return element("a", { href: target, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** The address when it is one of the web or of mail, else null: no `javascript:`, no `data:`. */
export function safe(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function emphasis(text, i, context, depth) {
  const { s } = text;
  for (const [fence, name] of PAIRS) {
    if (!s.startsWith(fence, i)) continue;
    const from = i + fence.length;
    if (!s[from] || /\s/.test(s[from])) continue;
    if (fence[0] === "_" && i > 0 && WORD.test(s[i - 1])) continue;
    const close = closing(s, fence, from + 1);
    if (close < 0) continue;
    const inner = inline(part(text, from, close), context, depth + 1);
    return [[element(name, {}, ...inner)], close + fence.length];
  }
  return undefined;
}

function closing(s, fence, from) {
  for (let at = s.indexOf(fence, from); at >= 0; at = s.indexOf(fence, at + 1)) {
    const after = s[at + fence.length] ?? "";
    const single = fence.length === 1 && (s[at - 1] === fence || after === fence);
    const within = fence[0] === "_" && WORD.test(after);
    if (!/\s/.test(s[at - 1]) && !single && !within) return at;
  }
  return -1;
}
