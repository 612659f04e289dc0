// Elements made from data. Text goes in as text, never as markup.

/** An element with attributes and children; a child that is a string becomes a text node. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

/** Say `text` to a screen reader, once. */
export function announce(text) {
  byId("announcement").textContent = text;
}
