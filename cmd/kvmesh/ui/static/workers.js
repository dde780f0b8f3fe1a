// Workers by state, with rates, lag and gaps.

import { h, n, rate, tile, badge, table, tiers, field } from "./dom.js";
import { poll } from "./poll.js";

const most = 200; // rows that are drawn
const columns = [
  { name: "worker" }, { name: "status" }, { name: "batches", number: true }, { name: "lag", number: true }, { name: "blocks", number: true },
  { name: "gaps", number: true }, { name: "dropped", number: true }, { name: "bridge" }, { name: "what is wrong", wide: true },
];

const sum = (o) => Object.values(o ?? {}).reduce((a, b) => a + b, 0);

// ranks makes one row a rank of what /workers says.
function ranks(workers) {
  return workers.flatMap((w) => Object.entries(w.listeners).map(([rank, l]) => ({
    key: [w.model_name, w.routing_group, w.instance_id, rank].join("\n"), model: w.model_name, group: w.routing_group, instance: String(w.instance_id), rank, l,
  })));
}

export function show(main, server, signal) {
  const tiles = h("div", { class: "tiles" });
  const wrong = h("p", { class: "error" });
  const list = h("div", { class: "scroll" });
  const state = h("select", {}, ["all", "active", "catching_up", "pending", "failed", "uncertain"].map((o) => h("option", { value: o }, o.replace("_", " "))));
  const name = h("input", { type: "search", placeholder: "part of a name" });
  let rows = [];
  const draw = () => list.replaceChildren(...drawn(rows, state.value, name.value));
  state.addEventListener("input", draw);
  name.addEventListener("input", draw);
  main.append(tiles, h("section", {}, h("div", { class: "fields" }, field("state", "State", state), field("name", "Worker", name)), wrong, list));

  let before = new Map(), at = 0;
  poll(signal, 2000, async () => {
    const now = ranks(await server.read("/workers", { signal }));
    const t = performance.now();
    for (const r of now) {
      const old = before.get(r.key);
      const seq = r.l.applied_engine_seq;
      r.rate = old === undefined || seq === null || seq < old ? null : (seq - old) / ((t - at) / 1000);
      r.lag = r.l.engine_seq === null || seq === null ? null : Math.max(0, r.l.engine_seq - seq);
    }
    before = new Map(now.filter((r) => r.l.applied_engine_seq !== null).map((r) => [r.key, r.l.applied_engine_seq]));
    at = t;
    rows = now;
    const count = (s) => now.filter((r) => r.l.status === s).length;
    tiles.replaceChildren(
      tile(n(now.length), "worker ranks"), tile(n(count("active")), "active", "active"), tile(n(count("catching_up")), "catching up", count("catching_up") && "warn"),
      tile(n(count("pending")), "pending", count("pending") && "warn"), tile(n(count("failed")), "failed", count("failed") && "bad"),
      tile(n(now.filter((r) => r.l.uncertain).length), "uncertain", now.some((r) => r.l.uncertain) && "bad"),
      tile(rate(now.reduce((a, r) => a + (r.rate ?? 0), 0)), "batches"), tile(n(now.reduce((a, r) => a + (r.lag ?? 0), 0)), "batches behind"),
    );
    draw();
  }, (text) => { wrong.textContent = text; });
}

function drawn(rows, state, name) {
  const chosen = rows.filter((r) => (state === "all" || r.l.status === state || state === "uncertain" && r.l.uncertain) && r.instance.includes(name));
  if (!chosen.length) return [h("p", { class: "soft" }, rows.length ? "no worker is like that" : "no worker is registered")];
  const cells = chosen.slice(0, most).map((r) => [
    h("a", { href: "#events?" + new URLSearchParams({ model: r.model, group: r.group, instance: r.instance, rank: r.rank }) }, `${r.instance}:${r.rank}`),
    h("span", {}, badge(r.l.status), r.l.uncertain ? h("span", { class: "bad" }, " uncertain") : null),
    r.rate === null ? "–" : rate(r.rate), r.lag === null ? "–" : n(r.lag),
    h("span", { title: tiers.map((t) => `${t} ${n(r.l.blocks[t])}`).join(", ") }, n(sum(r.l.blocks))),
    n(r.l.gaps), h("span", { title: Object.entries(r.l.dropped).map(([why, k]) => `${why} ${k}`).join(", ") }, n(sum(r.l.dropped))),
    r.l.bridge || "–", h("span", { class: "error" }, r.l.last_error ?? ""),
  ]);
  const rest = chosen.length - most;
  return [table(columns, cells), rest > 0 ? h("p", { class: "soft" }, `and ${n(rest)} more`) : ""];
}
