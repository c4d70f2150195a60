/* SPDX-License-Identifier: Apache-2.0 */
// Draws /cluster.json and draws it again when it changes. Every text from the cluster goes in as text, never as markup.
// What is looked at is in the address: #pod=namespace/name and #gpu=UUID can be bookmarked and sent to a colleague.

const EVERY_MS = 5000;
const HISTORY_EVERY_MS = 30000;
const GIB_MIB = 1024;
const GIB_BYTES = 2 ** 30;
const SVG = "http://www.w3.org/2000/svg";
const page = Object.fromEntries(
  ["totals", "search", "order", "troubled", "past", "span", "notice", "history", "waiting", "nodes", "detail"].map((id) => [id, document.getElementById(id)]));
let cluster = null;
let tag = "";

// --- words and colours ---

const gib = (mib) => (mib / GIB_MIB).toFixed(mib >= 100 * GIB_MIB ? 0 : 1).replace(/\.0$/, "");
const percent = (ratio) => `${Math.round(100 * ratio)} %`;
const namespaceOf = (pod) => pod.split("/")[0];
const shortName = (pod) => pod.slice(pod.indexOf("/") + 1);

function colour(text) {
  let hash = 2166136261;
  for (const character of text) hash = Math.imul(hash ^ character.codePointAt(0), 16777619);
  return `hsl(${(hash >>> 0) % 360} 55% ${68 + ((hash >>> 9) % 3) * 5}%)`;
}

const element = (name) => (["svg", "polyline", "title"].includes(name) ? document.createElementNS(SVG, name) : document.createElement(name));

function make(name, {text = "", on = {}, style = {}, ...attributes} = {}, ...children) {
  const made = element(name);
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  for (const [event, handler] of Object.entries(on)) made.addEventListener(event, handler);
  for (const [property, value] of Object.entries(style)) made.style.setProperty(property, value);
  made.append(...children);
  return made;
}

// --- what is shown ---

const memoryOf = (node) => node.gpus.reduce((sum, gpu) => sum + gpu.memoryMib, 0);
const usedOf = (node) => node.gpus.reduce((sum, gpu) => sum + gpu.usedMib, 0);
const fragmentationOf = (node) => node.gpus.reduce((sum, gpu) => sum + gpu.fragmentation, 0) / (node.gpus.length || 1);
const troubled = (node) => Boolean(node.cordoned) || node.gpus.some((gpu) => gpu.trouble || gpu.cordoned);
const ORDERS = {
  name: (a, b) => a.name.localeCompare(b.name, undefined, {numeric: true}),
  free: (a, b) => (memoryOf(b) - usedOf(b)) - (memoryOf(a) - usedOf(a)),
  full: (a, b) => usedOf(b) / (memoryOf(b) || 1) - usedOf(a) / (memoryOf(a) || 1),
  fragmentation: (a, b) => fragmentationOf(b) - fragmentationOf(a),
};

function matches(node, words) {
  const text = [node.name, ...node.gpus.flatMap((gpu) => [gpu.model, gpu.uuid, ...gpu.slices.map((slice) => slice.pod)])].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

function drawTotals() {
  const gpus = cluster.nodes.flatMap((node) => node.gpus);
  const memory = gpus.reduce((sum, gpu) => sum + gpu.memoryMib, 0);
  const used = gpus.reduce((sum, gpu) => sum + gpu.usedMib, 0);
  const pods = new Set(gpus.flatMap((gpu) => gpu.slices.map((slice) => slice.pod)));
  const fragmented = gpus.reduce((sum, gpu) => sum + gpu.fragmentation, 0) / (gpus.length || 1);
  const facts = [
    [cluster.nodes.length, "nodes"], [gpus.length, "GPUs"], [pods.size, "pods on them"],
    [percent(used / (memory || 1)), `of ${gib(memory)} GiB promised`], [percent(fragmented), "fragmented"], [cluster.waitingCount, "waiting"],
    [gpus.filter((gpu) => gpu.trouble).length, "GPUs in trouble"],
  ];
  page.totals.replaceChildren(...facts.map(([figure, word]) => make("li", {}, make("b", {text: String(figure)}), " ", make("span", {text: word}))));
}

function startOf(pod) {
  if (!pod.holds.length) return "";
  const where = `on ${pod.holds.join(", ")}`;
  if (!pod.start) return `unknown, ${where}`;
  const [middle, low, high] = pod.start.map((seconds) => new Date(1000 * seconds).toLocaleString([], {dateStyle: "short", timeStyle: "short"}));
  return `${middle} (80 %: ${low} to ${high}), ${where}`;
}

function drawWaiting() {
  page.waiting.hidden = cluster.waitingCount === 0;
  const held = cluster.waiting.some((pod) => pod.holds.length);
  const rows = cluster.waiting.map((pod) => make("tr", {},
    make("td", {text: pod.pod}), make("td", {text: pod.asks}),
    make("td", {text: pod.reasons.map(([sentence, count]) => `${count} ${count === 1 ? "node" : "nodes"}: ${sentence}`).join("; ")}),
    ...(held ? [make("td", {text: startOf(pod)})] : [])));
  const more = cluster.waitingCount > cluster.waiting.length ? ` (the first ${cluster.waiting.length} of ${cluster.waitingCount})` : "";
  page.waiting.replaceChildren(
    make("h2", {text: `Waiting for a GPU${more}`}),
    make("table", {}, make("tr", {}, ...["pod", "asks per GPU", "why it fits nowhere", ...(held ? ["expected start"] : [])].map((text) => make("th", {text}))), ...rows));
}

function drawSlice(slice, gpu, chosen) {
  const classes = ["slice", ...(slice.stage ? ["coming"] : []), ...(slice.pod === chosen ? ["chosen"] : [])];
  const label = `${slice.pod || "a pod being scheduled"}: ${gib(slice.memoryMib)} GiB${slice.instance ? `, MIG ${slice.instance}` : ""}`
    + `${slice.coresPercent ? `, ${slice.coresPercent} % cores` : ""}${slice.stage ? `, ${slice.stage}` : ""}`;
  return make("button", {
    class: classes.join(" "), type: "button", title: label, "aria-label": label, text: shortName(slice.pod),
    style: {width: `${100 * slice.memoryMib / (gpu.memoryMib || 1)}%`, background: colour(namespaceOf(slice.pod))},
    on: {click: () => { location.hash = `pod=${slice.pod}`; }},
  });
}

function drawGpu(gpu, chosen) {
  const state = [gpu.trouble ? "troubled" : "", gpu.cordoned ? "cordoned" : ""].join(" ");
  const parts = [make("div", {class: "gpu", "data-uuid": gpu.uuid},
    make("button", {class: "minor", type: "button", text: String(gpu.minor), "aria-label": `GPU ${gpu.minor}`,
      on: {click: () => { location.hash = `gpu=${gpu.uuid}`; }}}),
    make("div", {class: `bar ${state}`, title: `${gpu.model}${gpu.mig ? ", MIG" : ""}, ${gpu.uuid}`}, ...gpu.slices.map((slice) => drawSlice(slice, gpu, chosen))),
    make("span", {class: "amount", text: `${gib(gpu.usedMib)} of ${gib(gpu.memoryMib)} GiB`}))];
  const why = [gpu.trouble, gpu.cordoned ? "cordoned" : ""].filter(Boolean).join("; ");
  if (why) parts.push(make("p", {class: "why", text: `GPU ${gpu.minor}: ${why}`}));
  return parts;
}

function drawNode(node, chosen) {
  const models = [...new Set(node.gpus.map((gpu) => gpu.model))].join(", ");
  const parts = [make("h2", {}, node.name, make("small", {text: `${node.gpus.length} × ${models}${node.cordoned ? ", cordoned" : ""}`})),
    ...node.gpus.flatMap((gpu) => drawGpu(gpu, chosen))];
  if (node.links?.length) parts.push(make("p", {class: "links", text: node.links.join(", ")}));
  return make("article", {class: "node", "data-node": node.name}, ...parts);
}

function drawNodes(chosen) {
  const words = page.search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = cluster.nodes.filter((node) => (!page.troubled.checked || troubled(node)) && matches(node, words)).sort(ORDERS[page.order.value]);
  page.nodes.replaceChildren(...shown.map((node) => drawNode(node, chosen)));
  if (!shown.length) page.nodes.append(make("p", {class: "faint", text: cluster.nodes.length ? "No node matches." : "No node has published its GPUs yet."}));
}

function drawDetail({pod, gpu}) {
  page.detail.hidden = !pod && !gpu;
  const body = pod ? podDetail(pod) : gpu ? gpuDetail(gpu) : [];
  page.detail.replaceChildren(
    make("button", {type: "button", text: "×", "aria-label": "Close", on: {click: () => { location.hash = ""; }}}), ...body,
    ...(cluster.history && !page.detail.hidden ? [graphs(pod ? {pod} : {gpu})] : []));
}

function gpuDetail(uuid) {
  const node = cluster.nodes.find((one) => one.gpus.some((gpu) => gpu.uuid === uuid));
  if (!node) return [make("h2", {text: uuid}), make("p", {class: "faint", text: "No node has this GPU now."})];
  const gpu = node.gpus.find((one) => one.uuid === uuid);
  const rows = gpu.slices.map((slice) => make("tr", {},
    make("td", {}, make("a", {href: `#pod=${slice.pod}`, text: slice.pod || "a pod being scheduled"})),
    make("td", {text: `${slice.memoryMib} MiB`}), make("td", {text: slice.coresPercent ? `${slice.coresPercent} %` : "what is free"})));
  const state = [gpu.state, gpu.trouble, gpu.cordoned ? "cordoned" : "", gpu.mig ? "in MIG mode" : ""].filter(Boolean).join("; ");
  return [
    make("h2", {text: `${node.name}, GPU ${gpu.minor}`}),
    make("p", {text: `${gpu.model}${state ? `: ${state}` : ""}`}),
    make("p", {class: "faint", text: `${gib(gpu.usedMib)} of ${gib(gpu.memoryMib)} GiB promised, ${percent(gpu.fragmentation)} fragmented`
      + `${gpu.numa === undefined ? "" : `, NUMA node ${gpu.numa}`}`}),
    ...(rows.length ? [make("table", {}, make("tr", {}, ...["pod", "memory", "cores"].map((text) => make("th", {text}))), ...rows)] : []),
    make("p", {}, make("code", {text: `kubectl vgpu describe gpu ${uuid}`}))];
}

function podDetail(chosen) {
  const held = cluster.nodes.flatMap((node) => node.gpus.flatMap((gpu) =>
    gpu.slices.filter((slice) => slice.pod === chosen).map((slice) => ({node, gpu, slice}))));
  const rows = held.map(({node, gpu, slice}) => make("tr", {},
    make("td", {text: node.name}), make("td", {text: slice.instance ? `GPU ${gpu.minor}, MIG ${slice.instance}` : `GPU ${gpu.minor}`}),
    make("td", {text: `${slice.memoryMib} MiB`}), make("td", {text: slice.coresPercent ? `${slice.coresPercent} %` : "what is free"})));
  const neighbours = [...new Set(held.flatMap(({gpu}) => gpu.slices.map((slice) => slice.pod)))].filter((pod) => pod !== chosen).sort();
  const waiting = cluster.waiting.find((pod) => pod.pod === chosen);
  return [
    make("h2", {text: chosen}),
    ...(rows.length ? [make("table", {}, make("tr", {}, ...["node", "device", "memory", "cores"].map((text) => make("th", {text}))), ...rows)]
      : [make("p", {class: "faint", text: waiting ? "It waits for a GPU." : "It holds no GPU now."})]),
    make("p", {class: "faint", text: neighbours.length ? `Also on this GPU: ${neighbours.join(", ")}` : ""}),
    make("p", {}, make("code", {text: `kubectl vgpu describe pod -n ${namespaceOf(chosen)} ${shortName(chosen)}`}))];
}

// --- the past, from Prometheus ---

const UNITS = {
  memory: (value) => `${(value / GIB_BYTES).toFixed(1)} GiB`,
  compute: (value) => percent(value),
  waiting: (value) => String(Math.round(value)),
};

function graph(kind, lines, start, end) {
  const write = UNITS[kind];
  const top = Math.max(...lines.flatMap((line) => line.points.map(([, value]) => value)), kind === "compute" ? 1 : 0) || 1;
  const place = ([at, value]) => `${(300 * (at - start) / (end - start)).toFixed(1)},${(60 - 58 * value / top).toFixed(1)}`;
  const last = (line) => (line.points.length ? write(line.points.at(-1)[1]) : "no samples");
  const label = `${kind}: ${lines.map((line) => `${line.name} ${last(line)}`).join(", ")}; at most ${write(top)}`;
  return make("figure", {class: "graph"},
    make("svg", {viewBox: "0 0 300 60", preserveAspectRatio: "none", role: "img", "aria-label": label},
      make("title", {text: label}),
      ...lines.map((line, number) => make("polyline", {class: `line line-${number}`, points: line.points.map(place).join(" ")}))),
    make("figcaption", {}, make("b", {text: kind}), ...lines.map((line, number) => make("span", {class: `key key-${number}`, text: `${line.name} ${last(line)}`}))));
}

const pasts = new Map();

function graphs(subject) {
  const query = new URLSearchParams({...subject, span: page.span.value}).toString();
  const known = pasts.get(query);
  if (!known || Date.now() - known.askedAt > HISTORY_EVERY_MS) fetchPast(query, known?.past);
  const {past, trouble} = pasts.get(query);
  const parts = past ? [...new Set(past.lines.map((line) => line.graph))].map((kind) =>
    graph(kind, past.lines.filter((line) => line.graph === kind), past.start, past.end)) : [];
  if (trouble) parts.push(make("p", {class: "why", text: `No history: ${trouble}`}));
  return make("div", {class: "graphs"}, ...parts);
}

async function fetchPast(query, past) {
  const asked = {askedAt: Date.now(), past, trouble: ""};
  pasts.delete(query);
  pasts.set(query, asked);
  if (pasts.size > 50) pasts.delete(pasts.keys().next().value);
  try {
    const answer = await fetch(`history.json?${query}`, {cache: "no-store"});
    if (!answer.ok) throw new Error((await answer.text()).trim());
    asked.past = await answer.json();
  } catch (error) {
    asked.trouble = error.message;
  }
  drawPast();
  drawDetail(chosenInAddress());
}

function drawPast() {
  page.past.hidden = !cluster.history;
  page.history.hidden = !cluster.history;
  if (cluster.history) page.history.replaceChildren(graphs({}));
}

function chosenInAddress() {
  const [, kind, name] = location.hash.match(/^#(pod|gpu)=(.+)$/) ?? [];
  return kind ? {[kind]: decodeURIComponent(name)} : {};
}

function draw() {
  if (!cluster) return;
  const chosen = chosenInAddress();
  drawTotals();
  drawPast();
  drawWaiting();
  drawNodes(chosen.pod ?? "");
  drawDetail(chosen);
  const notices = cluster.unaccounted.map(([pod, why]) => `${pod} uses GPUs that are not counted: ${why}.`);
  if (cluster.trouble) notices.push(`Not current: ${cluster.trouble}.`);
  if (!cluster.leads) notices.push("This replica is not the leader: its data can be older.");
  page.notice.textContent = notices.join(" ");
}

// --- keeping up ---

async function refresh() {
  try {
    const answer = await fetch("cluster.json", {headers: tag ? {"If-None-Match": tag} : {}, cache: "no-store"});
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") ?? "";
      cluster = await answer.json();
      draw();
    } else if (answer.status === 304) {
      drawPast();
      drawDetail(chosenInAddress());
    } else {
      throw new Error(`the scheduler answers ${answer.status}`);
    }
  } catch (error) {
    page.notice.textContent = `Not up to date: ${error.message}. Trying again.`;
  }
}

for (const control of [page.search, page.order, page.troubled, page.span]) control.addEventListener("input", draw);
document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", draw);
await refresh();
setInterval(refresh, EVERY_MS);
