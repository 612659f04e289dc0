// The dialog that asks for an API key when the service does.

import { byId } from "./dom.js";
import { key } from "./api.js";

let settle = null;

/** Ask for a key; true once one is given, false when the reader would rather not. */
export function askForKey(reason) {
  const dialog = byId("key");
  byId("open-key")?.removeAttribute("hidden");
  byId("key-text").textContent = reason
    || "This service asks for a key. It is kept in this tab only, until you close it.";
  byId("key-value").value = "";
  if (!dialog.open) dialog.showModal();
  byId("key-value").focus();
  settle?.(false);
  return new Promise((resolve) => { settle = resolve; });
}

/** `work()`, and again with a key for as long as the service asks for another one. */
export async function withKey(work) {
  for (;;) {
    try {
      return await work();
    } catch (fault) {
      if (fault.status !== 401) throw fault;
      const reason = key.get() ? `${fault.message} Give another one.` : "";
      if (!(await askForKey(reason))) throw fault;
    }
  }
}

export function installKeyring(onKey) {
  const answer = (given) => { settle?.(given); settle = null; };
  byId("key-form").addEventListener("submit", () => {
    key.set(byId("key-value").value.trim());
    const waited = settle !== null;
    answer(Boolean(key.get()));
    if (!waited) onKey();
  });
  byId("key-cancel").addEventListener("click", () => byId("key").close());
  byId("key").addEventListener("close", () => answer(false));
  byId("open-key").addEventListener("click", () => {
    askForKey("");
    settle = null;
  });
  byId("open-key").hidden = !key.get();
}
