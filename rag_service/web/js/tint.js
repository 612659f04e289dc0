// Which characters of an answer came from accepted draft tokens.
//
// The answer's text is the model's own but for markers that the service set or removed, so the tokens' text is
// walked along it; where they part, the nearest place at which they agree again is taken.

const NEAREST = 48;
const AGREEMENT = 4;

/** One entry a UTF-16 unit of `content`: 1 accepted, 0 written by the target, -1 not the model's. */
export function origins(content, tokens) {
  const raw = tokens.map((token) => token.text).join("");
  const accepted = new Int8Array(raw.length);
  let place = 0;
  for (const token of tokens) {
    accepted.fill(token.accepted ? 1 : 0, place, place + token.text.length);
    place += token.text.length;
  }
  const found = new Int8Array(content.length).fill(-1);
  let i = 0;
  let j = 0;
  while (i < content.length && j < raw.length) {
    if (content[i] === raw[j]) {
      found[i] = accepted[j];
      i += 1;
      j += 1;
      continue;
    }
    const [skipContent, skipRaw] = apart(content, i, raw, j);
    // A character that its tokens share in part decodes to a replacement; it keeps its token's origin.
    if (skipContent && skipRaw) found.fill(accepted[j], i, i + skipContent);
    i += skipContent;
    j += skipRaw;
  }
  return found;
}

/** How far to go in each text until they agree again. */
function apart(content, i, raw, j) {
  const agree = (a, b) => a < content.length && b < raw.length
    && content.slice(a, a + AGREEMENT) === raw.slice(b, b + AGREEMENT).slice(0, content.length - a)
    || (b + AGREEMENT > raw.length && b < raw.length && content.startsWith(raw.slice(b), a));
  for (let distance = 1; distance <= NEAREST; distance += 1) {
    for (let skip = 0; skip <= distance; skip += 1) {
      if (agree(i + distance - skip, j + skip)) return [distance - skip, skip];
    }
  }
  return [1, 1];
}
