// Replicas and their digests, side by side.

import { h, n, position, positionOf, tiers, tile } from "./dom.js";
import { poll } from "./poll.js";

export function show(main, server, signal) {
  const tiles = h("div", { class: "tiles" });
  const wrong = h("p", { class: "error" });
  const list = h("div", {});
  main.append(tiles, wrong, list);
  poll(signal, 2000, async () => {
    const r = await server.read("/ui/data/replicas", { signal });
    const compared = r.compared.length > 0;
    tiles.replaceChildren(tile(n(r.replicas.length), "replicas"), tile(n(r.replicas.filter((v) => v.ready).length), "ready"),
      tile(!compared ? "–" : r.equal ? "equal" : "differ", compared ? `digests at ${position(r.compared.at(-1))}` : "digests: no two at one record", compared && (r.equal ? "good" : "bad")));
    list.replaceChildren(...partitions(r.replicas));
  }, (text) => { wrong.textContent = text; });
}

const head = (v) => h("th", {}, v.id, v.this ? h("span", { class: "soft" }, " (this one)") : null);

function partitions(replicas) {
  const names = [...new Set(replicas.flatMap((v) => Object.keys(v.partitions)))].sort();
  const out = [h("section", {}, h("h2", {}, "All"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", {}, ""), replicas.map(head))),
    h("tbody", {}, [
      ["state", (v) => h("span", { class: v.ready ? "good" : "bad" }, v.ready ? "ready" : v.reason)],
      ["log sequence", positionOf], ["behind", (v) => n(v.lag)], ["sources", (v) => n(v.sources)],
      ["diverged", (v) => h("span", { class: v.diverged ? "bad" : "" }, n(v.diverged))],
    ].map(([name, cell]) => h("tr", {}, h("th", {}, name), replicas.map((v) => h("td", {}, cell(v)))))))))];
  for (const name of names) {
    out.push(h("section", {}, h("h2", {}, name), h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", {}, "tier"), replicas.map(head))),
      h("tbody", {}, tiers.map((t) => h("tr", {}, h("th", {}, t), replicas.map((v) => {
        const d = v.partitions[name]?.[t];
        return h("td", {}, d ? [n(d.count), " ", h("span", { class: "mono soft" }, d.sum)] : "–");
      }))))))));
  }
  return out;
}
