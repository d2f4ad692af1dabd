// Elements, and numbers as text. Names, reasons and events come from users: they are only ever text.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const NONE = "-";

function el(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function setAttribute(node, name, text) {
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}

// One node for each item, made once and filled each time; `keyOf` tells them apart.
function fillList(parent, items, keyOf, make, fill) {
  const before = (parent.kept ??= new Map());
  const kept = new Map();
  let next = parent.firstChild;
  for (const [i, item] of items.entries()) {
    const key = keyOf(item, i);
    const node = before.get(key) ?? make(item);
    if (node === next) next = node.nextSibling;
    else parent.insertBefore(node, next);
    fill(node, item);
    kept.set(key, node);
  }
  for (const [key, node] of before) {
    if (kept.has(key)) continue;
    node.plot?.destroy(); // a chart listens to the window
    node.remove();
  }
  parent.kept = kept;
}

const byPosition = (_, i) => i;

// Numbers as people read them; absent ones are "-".

function orNone(show) {
  return (value) => (value === null || value === undefined || !Number.isFinite(value) ? NONE : show(value));
}

function digits(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${digits(value / 1e9)}B`;
  if (size >= 1e6) return `${digits(value / 1e6)}M`;
  if (size >= 99950) return `${Math.round(value / 1e3)}k`;
  if (size >= 99.5 || size === 0) return Math.round(value).toLocaleString("en");
  return value.toFixed(size >= 9.95 ? 1 : 2);
}

const showCount = orNone((value) => (Number.isInteger(value) ? value.toLocaleString("en") : digits(value)));
const showRate = orNone(digits);
const showShare = orNone((value) => `${Math.round(value * 100)}%`);
const showExactShare = orNone((value) => `${(Math.floor(value * 1e4) / 100).toFixed(2)}%`); // 99.999% is not 100%
const showSeconds = orNone((value) => {
  if (value < 0.00995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 59.95) return `${value.toFixed(1)} s`;
  return showPeriod(value);
});
const showPeriod = orNone((value) => {
  const whole = Math.round(value);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}m${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d${two(Math.floor((whole % 86400) / 3600))}h`;
});
const showGib = orNone((value) => (value / 2 ** 30).toFixed(value < 10 * 2 ** 30 ? 1 : 0));
const showBytesRate = orNone((value) =>
  value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB/s` : value >= 1e6 ? `${(value / 1e6).toFixed(0)} MB/s` : `${(value / 1e3).toFixed(0)} kB/s`,
);
const showWatts = orNone((value) => (value >= 999.5 ? `${(value / 1000).toFixed(2)} kW` : `${Math.round(value)} W`));
const showUsd = orNone((value) => (value === 0 || value >= 1 ? `$${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}` : `$${Number(value.toPrecision(2))}`));
const showTime = orNone((at) => new Date(at * 1000).toLocaleTimeString("en-GB"));
const showMoment = orNone((at) => {
  const when = new Date(at * 1000);
  const isToday = when.toDateString() === new Date().toDateString();
  return isToday ? showTime(at) : `${when.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${showTime(at)}`;
});

// Words for states, and which colour they have.

const TONES = new Map([
  ["ready", "good"], ["starting", "busy"], ["loading", "busy"], ["warming", "busy"], ["queued", "busy"], ["waking", "busy"], ["busy", "warn"], ["sleeping", "quiet"],
  ["stalled", "warn"], ["restarting", "warn"], ["degraded", "warn"], ["stopping", "quiet"], ["down", "quiet"],
  ["failed", "bad"], ["silent", "bad"],
]);
// Of events, by their kind and text.
const EVENT_TONES = [[/fail|died|lost|gone|xid|error|stalled/i, "bad"], [/ready|done|up$/i, "good"], [/restart|eject|drain|degraded|busy/i, "warn"]];

function setChip(node, word, tone) {
  setText(node, word);
  setAttribute(node, "class", `chip ${tone ?? TONES.get(word) ?? "quiet"}`);
}

function eventTone({ event, text }) {
  if (event === "phase") return TONES.get(text.split(" ").pop()) ?? "quiet"; // "starting -> ready"
  return EVENT_TONES.find(([words]) => words.test(`${event} ${text}`))?.[1] ?? "quiet";
}

function shareTone(value) {
  return value >= 0.98 ? "bad" : value >= 0.9 ? "warn" : "";
}

function makeBar() {
  return el("span", "bar", el("span", "fill"));
}

function setBar(bar, share, tone) {
  const width = `${Math.round(Math.min(1, Math.max(0, share ?? 0)) * 1000) / 10}%`;
  if (bar.firstChild.style.width !== width) bar.firstChild.style.width = width;
  setAttribute(bar, "class", `bar ${tone ?? shareTone(share)}`);
}
