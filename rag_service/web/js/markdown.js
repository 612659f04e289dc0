// Markdown as DOM nodes, block by block. Nothing of the text is ever parsed as HTML: tags show as text.
//
// A piece of text is `{s, at}`: its characters, and where each stands in the source, so that a leaf can be told
// apart by its place (which tokens were accepted). The inline part is in inline.js.

import { element } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const DASHES = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*(\[\d{1,3}\]\s*)*$/;
const MARKERS = /^(\[\d{1,3}\]\s*)+$/;
const MAX_DEPTH = 8;

/**
 * Show `source` in `container`, keeping every block that did not change, so that a selection or a focus in an
 * answer outlives the words that still stream in.
 *
 * `context`: `cite(number)` gives the node of a marker or null when there is no such source; `leaf(text, at)`
 * gives the nodes of plain text; `signature(start, end)` changes when leaves of that part would.
 */
export function render(container, source, context) {
  const found = parse(lines(source), 0);
  found.forEach((block, index) => {
    const from = block.lines[0].start;
    const to = block.lines.at(-1).start + block.lines.at(-1).length;
    const signature = `${block.type}\n${source.slice(from, to)}\n${context.signature(from, to)}`;
    const present = container.children[index];
    if (present && present.signature === signature) return;
    const made = node(block, context);
    made.signature = signature;
    if (present) present.replaceWith(made);
    else container.append(made);
  });
  while (container.children.length > found.length) container.lastElementChild.remove();
}

function lines(source) {
  let start = 0;
  return source.split("\n").map((s) => {
    const line = { s, at: Array.from(s, (_, i) => start + i), start, length: s.length };
    // `Array.from` walks code points: places are counted in UTF-16 units, as the text is.
    if (line.at.length !== s.length) line.at = Array.from({ length: s.length }, (_, i) => start + i);
    start += s.length + 1;
    return line;
  });
}

function cut(line, from, to = line.s.length) {
  return { ...line, s: line.s.slice(from, to), at: line.at.slice(from, to) };
}

function joined(rows) {
  const s = rows.map((row) => row.s).join("\n");
  const at = rows.flatMap((row, index) => {
    const end = row.start + row.length;
    return index < rows.length - 1 ? [...row.at, end] : row.at;
  });
  return { s, at };
}

function indentation(line) {
  return line.s.length - line.s.trimStart().length;
}

/** Blocks of `rows`: `{type, lines, ...}`. */
function parse(rows, depth) {
  const blocks = [];
  let i = 0;
  while (i < rows.length) {
    if (!rows[i].s.trim()) { i += 1; continue; }
    const [block, next] = one(rows, i, depth);
    block.lines = rows.slice(i, next);
    blocks.push(block);
    i = next;
  }
  return blocks;
}

function one(rows, i, depth) {
  const line = rows[i];
  const fence = FENCE.exec(line.s);
  if (fence) return code(rows, i, fence[1]);
  const heading = HEADING.exec(line.s);
  if (heading) {
    const from = line.s.indexOf(heading[2], heading[1].length);
    return [{ type: "heading", level: heading[1].length, text: cut(line, from, from + heading[2].length) }, i + 1];
  }
  if (RULE.test(line.s)) return [{ type: "rule" }, i + 1];
  if (QUOTE.test(line.s) && depth < MAX_DEPTH) return quote(rows, i, depth);
  if (ITEM.test(line.s) && depth < MAX_DEPTH) return list(rows, i, depth);
  if (line.s.includes("|") && rows[i + 1]?.s.includes("|") && DASHES.test(rows[i + 1].s)) return table(rows, i);
  return paragraph(rows, i);
}

function code(rows, i, fence) {
  let end = i + 1;
  const closes = (line) => line.s.trim().startsWith(fence) && !line.s.trim().replaceAll(fence[0], "");
  while (end < rows.length && !closes(rows[end])) end += 1;
  return [{ type: "code", text: joined(rows.slice(i + 1, end)) }, Math.min(end + 1, rows.length)];
}

function quote(rows, i, depth) {
  let end = i;
  while (end < rows.length && QUOTE.test(rows[end].s)) end += 1;
  const inner = rows.slice(i, end).map((line) => cut(line, QUOTE.exec(line.s)[0].length));
  return [{ type: "quote", blocks: parse(inner, depth + 1) }, end];
}

function list(rows, i, depth) {
  const first = ITEM.exec(rows[i].s);
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = i;
  let loose = false;
  while (end < rows.length) {
    const marker = ITEM.exec(rows[end].s);
    if (!marker || /\d/.test(marker[2]) !== ordered || marker[1].length > first[1].length + 1) break;
    const [own, next] = item(rows, end, marker);
    items.push(parse(own, depth + 1));
    loose ||= own.some((line, at) => !line.s.trim() && own.slice(at).some((later) => later.s.trim()));
    end = next;
  }
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  return [{ type: "list", ordered, start, items, loose }, end];
}

/** The lines of one item without its indentation, and where the next one begins. */
function item(rows, i, marker) {
  const indent = marker[1].length + 1;
  const own = [cut(rows[i], marker[0].length)];
  let end = i + 1;
  while (end < rows.length) {
    const line = rows[end];
    const blank = !line.s.trim();
    const inside = indentation(line) > marker[1].length;
    const follows = rows.slice(end).find((later) => later.s.trim());
    if (blank && !(follows && indentation(follows) > marker[1].length)) break;
    if (!blank && !inside && (ITEM.test(line.s) || !rows[end - 1].s.trim() || HEADING.test(line.s) || FENCE.test(line.s))) break;
    own.push(cut(line, Math.min(indentation(line), Math.max(indent, marker[0].length))));
    end += 1;
  }
  // Blank lines between items belong to the list: the next item follows them.
  let after = end;
  while (after < rows.length && !rows[after].s.trim()) after += 1;
  return [own, after < rows.length && ITEM.test(rows[after].s) ? after : end];
}

function table(rows, i) {
  let end = i + 2;
  while (end < rows.length && rows[end].s.includes("|") && rows[end].s.trim()) end += 1;
  const width = cells(rows[i + 1]).filter((cell) => !MARKERS.test(cell.s)).length;
  const [head, ...body] = [rows[i], ...rows.slice(i + 2, end)].map((line) => row(line, width));
  return [{ type: "table", head, body }, end];
}

/** The cells of a line; a marker of a source behind its last bar goes into the last cell. */
function row(line, width) {
  const found = cells(line);
  if (found.length === width + 1 && MARKERS.test(found.at(-1).s)) {
    const marker = found.pop();
    const last = found.at(-1);
    found[found.length - 1] = { ...last, s: `${last.s} ${marker.s}`, at: [...last.at, marker.at[0] - 1, ...marker.at] };
  }
  return found;
}

function cells(line) {
  const found = [];
  let from = 0;
  for (let i = 0; i <= line.s.length; i += 1) {
    if (i === line.s.length || (line.s[i] === "|" && line.s[i - 1] !== "\\")) {
      found.push(trimmed(cut(line, from, i)));
      from = i + 1;
    }
  }
  if (found.length && !found[0].s) found.shift();
  if (found.length && !found.at(-1).s) found.pop();
  return found;
}

function trimmed(line) {
  const from = indentation(line);
  return cut(line, from, Math.max(from, line.s.trimEnd().length));
}

function paragraph(rows, i) {
  let end = i + 1;
  const interrupts = (line) => !line.s.trim() || FENCE.test(line.s) || HEADING.test(line.s) || RULE.test(line.s)
    || QUOTE.test(line.s) || ITEM.test(line.s);
  while (end < rows.length && !interrupts(rows[end])) end += 1;
  return [{ type: "paragraph", text: joined(rows.slice(i, end).map(trimmed)) }, end];
}

function node(block, context) {
  switch (block.type) {
    case "heading": return element(`h${Math.min(block.level + 2, 6)}`, {}, ...inline(block.text, context));
    case "rule": return element("hr");
    case "quote": return element("blockquote", {}, ...block.blocks.map((inner) => node(inner, context)));
    case "code": return element("pre", { tabindex: 0 }, element("code", {}, ...context.leaf(block.text.s, block.text.at)));
    case "list": return listNode(block, context);
    case "table": return tableNode(block, context);
    default: return element("p", {}, ...inline(block.text, context));
  }
}

function listNode(block, context) {
  const tight = (inner) => inner.type === "paragraph" && !block.loose;
  const items = block.items.map((blocks) => element("li", {}, ...blocks.flatMap((inner) => (
    tight(inner) ? inline(inner.text, context) : [node(inner, context)]))));
  return element(block.ordered ? "ol" : "ul", { start: block.ordered && block.start !== 1 ? block.start : null }, ...items);
}

function tableNode(block, context) {
  const rowNode = (found, name) => element("tr", {}, ...found.map((cell) => (
    element(name, { scope: name === "th" ? "col" : null }, ...inline(cell, context)))));
  const table = element("table", {}, element("thead", {}, rowNode(block.head, "th")),
    element("tbody", {}, ...block.body.map((cellsOfRow) => rowNode(cellsOfRow, "td"))));
  return element("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Table" }, table);
}
