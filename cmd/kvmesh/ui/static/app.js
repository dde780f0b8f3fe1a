// The frame: which view is shown, what it reads from the server, and with which token.

import * as workers from "./workers.js";
import * as blocks from "./blocks.js";
import * as replicas from "./replicas.js";
import * as prompt from "./prompt.js";
import * as events from "./events.js";
import { n, positionOf } from "./dom.js";

const views = { workers, blocks, replicas, prompt, events };
const state = document.getElementById("state");
const main = document.getElementById("view");
const login = document.getElementById("login");

let token = sessionStorage.getItem("kvmesh-token") ?? "";

// ask makes a request with the token, and asks for one if it is needed.
async function ask(path, options = {}) {
  for (;;) {
    const headers = { ...options.headers };
    if (token) headers.Authorization = "Bearer " + token;
    const reply = await fetch(path, { ...options, headers });
    if (reply.status !== 401) return reply;
    await newToken();
    if (options.signal?.aborted) throw new DOMException("", "AbortError");
  }
}

let asking = null;
function newToken() {
  asking ??= new Promise((resolve) => {
    login.addEventListener("close", () => {
      token = document.getElementById("token").value;
      sessionStorage.setItem("kvmesh-token", token);
      asking = null;
      resolve();
    }, { once: true });
    login.showModal();
  });
  return asking;
}

// read returns the JSON of a reply, or throws what the server says is wrong.
async function read(path, options) {
  const reply = await ask(path, options);
  const text = await reply.text();
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Error(path + ": " + reply.status + ", no JSON");
  }
  if (!reply.ok && body.error) throw new Error(body.error);
  return body;
}

const server = { ask, read };

// ready shows how the server is, whatever the view.
async function ready() {
  try {
    const r = await read("/ready");
    state.className = r.ready ? "" : "bad";
    state.textContent = r.ready ? `ready at ${positionOf(r)}, ${n(r.lag)} behind` : "not ready: " + r.reasons.join("; ");
  } catch (error) {
    state.className = "bad";
    state.textContent = "the server can't be reached";
  }
}

let leave = null; // ends the view that is shown

function show() {
  const name = location.hash.slice(1).split("?")[0];
  const view = views[name] ? name : "workers";
  leave?.abort();
  leave = new AbortController();
  for (const a of document.querySelectorAll("#tabs a")) {
    if (a.hash === "#" + view) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  main.replaceChildren();
  main.dataset.view = view;
  views[view].show(main, server, leave.signal);
}

addEventListener("hashchange", show);
show();
ready();
setInterval(() => { if (!document.hidden) ready(); }, 2000);
