// Search and filters of the index. The rows of all models are in models.js, which is loaded when somebody searches: a
// script, because a page that was opened from a folder may not fetch data. Texts are set as text, never as markup.
"use strict";
const MOST = 200;
const SYMBOLS = { proven: "✓", "proven on random inputs": "~", unproven: "?", failed: "✕", refused: "–" };
const form = document.querySelector(".filters");
const found = document.querySelector(".found");
const body = document.querySelector(".models tbody");
const pages = document.querySelector(".pages");
let rows = null;
let before = null;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function link(path, text) {
  const made = element("a", text);
  made.href = path;
  return made;
}

function cell(label, ...parts) {
  const made = element("td");
  made.dataset.label = label;
  made.append(...(parts.length ? parts : [element("span", "none", "muted")]));
  return made;
}

function row([name, version, versions, at, channels, statuses, , damaged, rollouts = {}]) {
  const head = element("th");
  head.scope = "row";
  head.append(link(`models/${name}/index.html`, name));
  const counts = Object.keys(SYMBOLS).filter((status) => statuses[status]).map((status) =>
    element("span", `${SYMBOLS[status]} ${statuses[status]} ${status}`, `count ${status}`));
  const pointing = Object.entries(channels).flatMap(([channel, target]) => {
    const made = element("span", `${channel} `, "channel");
    made.append(element("b", target));
    if (channel in rollouts) {
      const coming = element("span", "→ ", "coming");
      coming.append(element("b", rollouts[channel][0]), ` on ${rollouts[channel][1]}`);
      made.append(" ", coming);
    }
    return [made, " "];
  });
  const number = cell("versions", String(versions));
  number.className = "num right";
  const time = element("time", at && `${at.slice(0, 10)} ${at.slice(11, 16)} UTC`);
  time.dateTime = at;
  const published = cell("published", time);
  published.className = "num";
  const line = element("tr");
  line.append(head, cell("serves", link(`models/${name}/versions/${version}/index.html`, version)),
    cell("engines", ...(damaged ? [element("span", "unreadable", "badge failed")] : counts)),
    cell("channels", ...pointing), number, published);
  return line;
}

function matches([name, version, , , channels, statuses, targets, damaged], words, wanted) {
  if (!words.every((word) => name.includes(word) || version === word)) return false;
  if (wanted.channel === "-" ? Object.keys(channels).length : wanted.channel && !(wanted.channel in channels)) return false;
  if (wanted.target && !targets.includes(wanted.target)) return false;
  if (wanted.status === "damaged") return damaged;
  if (wanted.status === "proven") return statuses.proven > 0 && !statuses.unproven && !statuses["proven on random inputs"] && !statuses.failed;
  return !wanted.status || statuses[wanted.status] > 0;
}

function choices() {
  const data = new FormData(form);
  return Object.fromEntries(["q", "status", "channel", "target"].map((name) => [name, String(data.get(name) || "")]));
}

function show() {
  const wanted = choices();
  const words = wanted.q.toLowerCase().split(/\s+/).filter(Boolean);
  const searching = Object.values(wanted).some(Boolean);
  const kept = Object.entries(wanted).filter(([, value]) => value);
  history.replaceState(null, "", kept.length ? `#${new URLSearchParams(kept)}` : location.pathname);
  found.hidden = !searching;
  if (pages) pages.hidden = searching;
  if (!searching) {
    if (before) body.replaceChildren(...before);
    return;
  }
  if (!rows) return;
  before = before || [...body.children];
  const hits = rows.filter((item) => matches(item, words, wanted));
  body.replaceChildren(...hits.slice(0, MOST).map(row));
  const more = hits.length > MOST ? `, the first ${MOST} of them below` : "";
  found.textContent = `${hits.length} of ${rows.length} models${more}`;
}

function load() {
  if (document.getElementById("data")) return;
  const script = element("script");
  script.id = "data";
  script.src = "models.js";
  document.head.append(script);
}

// What models.js calls.
function registryModels(data) {
  rows = data;
  show();
}

if (form && body) {
  form.hidden = false;
  form.addEventListener("input", () => { load(); show(); });
  form.addEventListener("focusin", load, { once: true });
  form.addEventListener("submit", (event) => event.preventDefault());
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of kept) if (form.elements[name]) form.elements[name].value = value;
  if ([...kept].length) { load(); show(); }
}
