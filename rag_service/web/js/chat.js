// The chat page: asks, shows the answer as it comes, keeps the conversation.

import { announce, byId, element } from "./dom.js";
import { call, events, json, ServiceError } from "./api.js";
import { Answer } from "./answer.js";
import { counted } from "./format.js";
import { installDocuments } from "./documents.js";
import { installKeyring, withKey } from "./keyring.js";
import { closeSource } from "./source.js";

const NEAR = 90; // pixels from the end within which the page follows the answer

const question = byId("question");
const scroll = byId("scroll");
const conversation = byId("conversation");
let turns = [];
let model = null;
let running = null;
let following = true;
let lastTop = 0;

async function start() {
  installKeyring(learn);
  await learn();
  question.focus();
}

/** What may be named in a question: the model and the domains; and whether anything is indexed. */
async function learn() {
  try {
    const [models, domains] = await withKey(() => Promise.all([json("/v1/models"), json("/v1/domains")]));
    model = models.data[0].id;
    const options = () => domains.data.map(({ id }) => element("option", { value: id }, id));
    byId("domain").replaceChildren(element("option", { value: "" }, "All domains"), ...options());
    byId("upload-domain").replaceChildren(...options());
    await welcome();
  } catch (fault) {
    byId("welcome-text").textContent = fault.message;
  }
}

async function welcome() {
  try {
    const found = await json("/v1/documents?limit=1");
    const empty = !found.data.length;
    byId("welcome-add").hidden = !empty;
    byId("welcome-text").textContent = empty
      ? "Nothing is indexed yet. Add documents, then ask about them."
      : "Answers are written from what is indexed here, and every source can be opened at the passage that was used.";
  } catch { /* a key without the right to list may still ask */ }
}

function atEnd() {
  return scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR;
}

/** Only a reader who scrolls up stops the page from following: an answer may grow by more than NEAR at once. */
function scrolled() {
  if (scroll.scrollTop < lastTop) following = atEnd();
  else if (atEnd()) following = true;
  lastTop = scroll.scrollTop;
}

function follow() {
  if (following) scroll.scrollTop = scroll.scrollHeight;
}

async function ask(text) {
  const answer = new Answer(text);
  answer.onshow = follow;
  byId("welcome").hidden = true;
  byId("new-conversation").hidden = false;
  conversation.append(answer.node);
  following = true;
  follow();
  running = new AbortController();
  busy(true);
  try {
    await withKey(() => stream(answer, running.signal));
    answer.finish();
    turns.push(answer);
    announce(`The answer is complete, with ${counted(answer.sources.length, "source")}.`);
  } catch (fault) {
    if (fault.name === "AbortError") {
      answer.stop();
      if (answer.content && answer.node.isConnected) turns.push(answer);
      announce("Stopped.");
    } else {
      answer.fail(sentence(fault), () => again(answer));
      if (!(fault instanceof ServiceError)) throw fault;
    }
  } finally {
    running = null;
    busy(false);
    follow();
  }
}

async function stream(answer, signal) {
  if (!model) model = (await json("/v1/models")).data[0].id;
  const history = turns.flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.plain },
  ]);
  const domain = byId("domain").value;
  const response = await call("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      model,
      messages: [...history, { role: "user", content: answer.question }],
      stream: true,
      stream_options: { include_usage: true },
      rag: domain ? { domain } : {},
      speculation: { show_accepted: true },
    }),
  });
  for await (const event of events(response)) answer.see(event);
}

function sentence(fault) {
  if (!(fault instanceof ServiceError)) return "The page could not show this answer.";
  const wait = fault.retryAfter ? ` Try again in ${counted(fault.retryAfter, "second")}.` : "";
  return fault.message + wait;
}

function again(answer) {
  if (running) return;
  answer.node.remove();
  ask(answer.question);
}

function busy(is) {
  const stop = byId("stop");
  const held = document.activeElement === stop;
  byId("ask").hidden = is;
  stop.hidden = !is;
  conversation.setAttribute("aria-busy", String(is));
  if (held) question.focus();
  sized();
}

function submit() {
  const text = question.value.trim();
  if (!text || running) return;
  question.value = "";
  sized();
  ask(text);
}

/** The field grows with the question; nothing is asked without one. */
function sized() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  byId("ask").disabled = !question.value.trim();
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
scroll.addEventListener("scroll", scrolled);
question.addEventListener("input", sized);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (running) running.abort();
  else closeSource();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("close-source").addEventListener("click", () => closeSource());
byId("new-conversation").addEventListener("click", () => {
  running?.abort();
  closeSource(false);
  turns = [];
  conversation.replaceChildren();
  byId("new-conversation").hidden = true;
  byId("welcome").hidden = false;
  welcome();
  question.focus();
});

sized();
installDocuments(welcome);
start();
