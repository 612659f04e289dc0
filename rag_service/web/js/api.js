// The service's HTTP interface, with the reader's key and errors as sentences.

const KEY = "rag-service-key";

/** What went wrong, as one sentence. `status` 0: no answer came. */
export class ServiceError extends Error {
  constructor(message, status = 0, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const key = {
  get() {
    try { return sessionStorage.getItem(KEY) || ""; } catch { return ""; }
  },
  set(value) {
    try { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); } catch { /* none kept */ }
  },
};

export function headers(extra = {}) {
  const value = key.get();
  return value ? { ...extra, Authorization: `Bearer ${value}` } : extra;
}

/** The error that a body of the service's shape tells, or a plain sentence by status. */
export function errorOf(status, body, retryAfter = null) {
  let told = null;
  try { told = JSON.parse(body).error?.message ?? null; } catch { /* not ours: a proxy's page, perhaps */ }
  const plain = status >= 500 || status === 0
    ? "The service did not answer as it should. Try again in a moment."
    : `The service refused this (status ${status}).`;
  return new ServiceError(told || plain, status, retryAfter ? Number(retryAfter) : null);
}

/** A fetch that raises `ServiceError` for anything but a success. */
export async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ServiceError("The service cannot be reached. Check that it is running, then try again.");
  }
  if (!response.ok) {
    throw errorOf(response.status, await response.text(), response.headers.get("retry-after"));
  }
  return response;
}

export async function json(path, options) {
  return (await call(path, options)).json();
}

/**
 * The objects of a stream of server-sent events, as they come, up to `[DONE]`. Comments are passed over; an
 * error event raises `ServiceError`, as does a stream that breaks off.
 */
export async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) throw new ServiceError("The answer broke off before its end. Ask again.");
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event.error) throw new ServiceError(event.error.message, 500);
        yield event;
      }
    }
  } catch (fault) {
    if (fault instanceof ServiceError || fault.name === "AbortError") throw fault;
    throw new ServiceError("The connection was lost before the answer was finished. Ask again.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
