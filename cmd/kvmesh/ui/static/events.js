// The records of one source, as they come.

import { h, n, clock } from "./dom.js";

const most = 200;

export function show(main, server, signal) {
  const source = h("select", { id: "source" }, h("option", { value: "" }, "choose a worker"));
  const state = h("p", { class: "soft", role: "status" });
  const list = h("ol", { id: "tail" });
  main.append(h("section", {}, h("label", { for: "source" }, "Worker", source), state), h("section", {}, list));
  const wanted = location.hash.split("?")[1] ?? "";

  server.read("/workers", { signal }).then((workers) => {
    for (const w of workers) {
      for (const rank of Object.keys(w.listeners)) {
        const q = new URLSearchParams({ model: w.model_name, group: w.routing_group, instance: w.instance_id, rank }).toString();
        source.append(h("option", { value: q }, `${w.instance_id}:${rank} of ${w.model_name}`));
      }
    }
    source.value = wanted;
    if (source.value) follow();
  }).catch((error) => { if (!signal.aborted) state.textContent = error.message; });

  let stop = null;
  async function follow() {
    stop?.abort();
    const mine = stop = new AbortController();
    signal.addEventListener("abort", () => mine.abort(), { once: true });
    list.replaceChildren();
    if (!source.value) return;
    while (!mine.signal.aborted) {
      try {
        state.textContent = "connecting";
        const reply = await server.ask("/ui/data/tail?" + source.value, { signal: mine.signal });
        if (!reply.ok) throw new Error((await reply.json()).error);
        state.textContent = "following";
        await lines(reply.body, (data) => {
          list.prepend(item(JSON.parse(data)));
          while (list.children.length > most) list.lastChild.remove();
        });
        state.textContent = "ended, trying again";
      } catch (error) {
        if (mine.signal.aborted) return;
        state.textContent = error.message + "; trying again";
      }
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  source.addEventListener("input", follow);
}

// lines calls f with the data of each server-sent event.
async function lines(body, f) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const p of parts) if (p.startsWith("data: ")) f(p.slice(6));
  }
}

function item(r) {
  const batches = r.last === null ? "before the first batch" : r.first === r.last || r.first > r.last ? `batch ${n(r.last)}` : `batches ${n(r.first)} to ${n(r.last)}`;
  return h("li", {}, h("div", { class: "soft" }, `${clock(r.time)} · record ${n(r.log_seq)} · ${batches} · ${n(r.size)} B`),
    r.error ? h("div", { class: "error" }, r.error) : null,
    r.ops.map((o) => h("div", {}, h("b", {}, o.op), o.tier ? ` ${o.tier}` : "", o.owner ? ` of ${o.owner}` : "",
      o.op === "stored" || o.op === "removed" || o.blocks ? ` ${n(o.blocks)} blocks` : "", o.op === "stored" ? ` at ${n(o.base ?? 0)}` : "", o.text ? ` (${o.text.trim()})` : "")));
}
