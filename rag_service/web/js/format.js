// Figures for reading. An unknown figure is a dash, never a zero.

export const NONE = "–";

export function decimal(value, digits = 2) {
  return value === null || value === undefined || Number.isNaN(value) ? NONE : value.toFixed(digits);
}

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-GB");
}

/** `1 request`, `50 requests`. */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Seconds in the unit that reads best. */
export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.0005) return "0 ms";
  if (value < 1) return `${value < 0.01 ? (value * 1000).toFixed(1) : Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(2)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function bytes(value) {
  if (value < 1000) return `${value} B`;
  if (value < 1e6) return `${Math.round(value / 1000)} kB`;
  return `${(value / 1e6).toFixed(1)} MB`;
}

export function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
