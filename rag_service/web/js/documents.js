// The dialog of documents: upload with progress, and what is indexed.

import { announce, byId, element } from "./dom.js";
import { errorOf, headers, json, ServiceError } from "./api.js";
import { bytes, counted } from "./format.js";
import { withKey } from "./keyring.js";

const POLL_MILLISECONDS = 700;
const LISTED = 200;

export function installDocuments(onIndexed) {
  const dialog = byId("documents");
  const files = byId("files");
  const drop = byId("drop");
  byId("open-documents").addEventListener("click", () => openDocuments());
  byId("welcome-add").addEventListener("click", () => openDocuments());
  byId("close-documents").addEventListener("click", () => dialog.close());
  byId("upload-domain").addEventListener("change", () => listIndexed());
  byId("upload").addEventListener("submit", (event) => event.preventDefault());
  files.addEventListener("change", () => {
    if (files.files.length) send([...files.files], onIndexed);
    files.value = "";
  });
  for (const name of ["dragenter", "dragover"]) {
    drop.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  }
  for (const name of ["dragleave", "drop"]) drop.addEventListener(name, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) send([...event.dataTransfer.files], onIndexed);
  });
}

function openDocuments() {
  const chosen = byId("domain").value;
  if (chosen) byId("upload-domain").value = chosen;
  byId("documents").showModal();
  listIndexed();
}

async function listIndexed() {
  const list = byId("indexed");
  const domain = byId("upload-domain").value;
  try {
    const found = await withKey(() => json(`/v1/documents?limit=${LISTED}&domain=${encodeURIComponent(domain)}`));
    if (domain !== byId("upload-domain").value) return;
    const rows = found.data.map((entry) => element("li", {}, element("span", { title: entry.title || entry.id }, entry.title || entry.id),
      element("span", {}, counted(entry.num_chunks, "passage"))));
    if (!rows.length) rows.push(element("li", {}, element("span", { class: "none" }, `Nothing is indexed in ${domain} yet.`)));
    if (found.next) rows.push(element("li", {}, element("span", { class: "none" }, "There are more.")));
    list.replaceChildren(...rows);
  } catch (fault) {
    list.replaceChildren(element("li", {}, element("span", { class: "none" }, fault.message)));
  }
}

/** Send `files` and follow their job to its end. */
async function send(files, onIndexed) {
  const domain = byId("upload-domain").value;
  const name = files.length === 1 ? files[0].name : `${files[0].name} and ${files.length - 1} more`;
  const size = files.reduce((sum, file) => sum + file.size, 0);
  const state = element("span", {}, "Sending");
  const bar = element("progress", { max: 1, value: 0, "aria-label": `Progress of ${name}` });
  const row = element("li", {}, element("div", { class: "row" }, element("span", { title: name }, name), state), bar);
  byId("uploads").prepend(row);
  try {
    const job = await withKey(() => post(files, domain, (share) => {
      bar.value = share / 2;
      state.textContent = share < 1 ? `Sending, ${bytes(share * size)} of ${bytes(size)}` : "Waiting to be indexed";
    }));
    const ended = await follow(job, bar, state);
    tell(ended, row, state);
  } catch (fault) {
    state.textContent = "Not added";
    row.append(element("p", { class: "failed" }, fault.message));
    announce(`${name} was not added. ${fault.message}`);
  }
  bar.remove();
  listIndexed();
  onIndexed();
}

/** XMLHttpRequest, since fetch tells nothing of how much is sent. */
function post(files, domain, onShare) {
  const form = new FormData();
  form.append("domain", domain);
  for (const file of files) form.append("files", file, file.name);
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", "/v1/documents");
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => onShare(event.lengthComputable ? event.loaded / event.total : 0));
    request.upload.addEventListener("load", () => onShare(1));
    request.addEventListener("error", () => reject(new ServiceError("The service cannot be reached, so nothing was added.")));
    request.addEventListener("load", () => {
      if (request.status < 300) resolve(JSON.parse(request.responseText));
      else reject(errorOf(request.status, request.responseText, request.getResponseHeader("retry-after")));
    });
    request.send(form);
  });
}

async function follow(job, bar, state) {
  let now = job;
  while (now.state === "queued" || now.state === "running") {
    bar.value = 0.5 + 0.5 * (now.num_documents ? now.num_done / now.num_documents : 0);
    state.textContent = now.state === "queued" ? "Waiting to be indexed" : `Indexing ${now.num_done} of ${now.num_documents}`;
    await new Promise((resolve) => { setTimeout(resolve, POLL_MILLISECONDS); });
    now = await json(`/v1/jobs/${encodeURIComponent(job.id)}`);
  }
  return now;
}

function tell(job, row, state) {
  const added = job.num_done - job.num_unchanged - job.failures.length;
  const words = {
    succeeded: job.num_unchanged && added <= 0 ? "Unchanged" : `Added, ${counted(job.num_chunks, "passage")}`,
    failed: "Not added",
    cancelled: "Cancelled",
  };
  state.textContent = words[job.state] ?? job.state;
  if (job.error) row.append(element("p", { class: "failed" }, job.error));
  for (const { name, reason } of job.failures) row.append(element("p", { class: "failed" }, `${name}: ${reason}`));
  announce(`${row.querySelector("span").textContent}: ${state.textContent}.`);
}
