// Puts it together: draws each snapshot, says what changed, answers keys and clicks.

let latest = null;
let isDrawing = false;
const seenStates = new Map(); // of replicas, for what is said of their changes

const live = new Live({
  history: (columns) => hour.take(columns),
  snapshot: (snapshot) => {
    if (!isDrawing) requestAnimationFrame(draw); // once for all that came together
    isDrawing = true;
    latest = snapshot;
    hour.add(snapshot.now);
  },
  state: showLink,
});

function draw() {
  isDrawing = false;
  if (!latest) return;
  $("numbers").hidden = false;
  $("waiting").hidden = true;
  $("key-form").hidden = true;
  drawHeader(latest);
  drawTiles();
  drawCharts();
  drawReplicas(latest);
  drawQueue(latest);
  drawSlo(latest.slo);
  drawCost(latest.cost);
  drawMachines(latest);
  drawSlow(latest.slow);
  drawKeys(latest.keys);
  drawEvents(latest.events);
  sayChanges(latest);
}

function drawHeader(snapshot) {
  const { now } = snapshot;
  const n = now.n_desired ?? snapshot.replicas?.length ?? 0;
  const name = snapshot.deployment || "penstock";
  setText($("deployment"), name);
  document.title = `${name} ${now.n_ready}/${n} ready`;
  $("phase").hidden = !snapshot.phase;
  setChip($("phase"), snapshot.phase ?? "");
  setText($("ready"), `${now.n_ready} of ${n} ready`);
  $("reason").hidden = !snapshot.reason;
  setText($("reason"), snapshot.reason ?? "");
  setText($("version"), snapshot.version);
  setText($("clock"), showTime(snapshot.at));
}

function showLink(state, text) {
  const before = $("link").dataset.state;
  $("link").dataset.state = state;
  setText($("link-text"), state === "key" ? "needs a key" : text);
  if (state === "key") showKeyForm(text);
  if (state === "lost" && before === "live") say("Connection lost, trying again.");
  if (state === "live" && before === "lost") say("Connected again.");
}

function showKeyForm(why) {
  latest = null;
  for (const id of ["numbers", "waiting"]) $(id).hidden = true;
  $("key-form").hidden = false;
  if (why === "refused") setText($("key-problem"), "The gateway refused this key.");
  $("key").value = "";
  $("key").focus();
}

function say(text) {
  setText($("said"), text);
}

function sayChanges({ phase, replicas = [] }) {
  const changes = [];
  for (const [name, state] of [["deployment", phase], ...replicas.map((r) => [`replica ${r.replica}`, r.state])]) {
    if (seenStates.has(name) && seenStates.get(name) !== state) changes.push(`${name}: ${state}`);
    seenStates.set(name, state);
  }
  if (seenStates.size > replicas.length + 1) seenStates.clear();
  if (changes.length) say(changes.length > 3 ? `${changes.length} replicas changed their state.` : changes.join(", "));
}

async function showMetrics(event) {
  if (!live.key) return; // the link works as it is
  event.preventDefault();
  $("metrics-view").showModal();
  setText($("metrics-text"), "reading...");
  try {
    const response = await ask(METRICS, live.key);
    setText($("metrics-text"), await response.text());
  } catch (error) {
    setText($("metrics-text"), `could not read them: ${error.message}`);
  }
}

function pressed(event) {
  const isTyping = event.target.matches("input, textarea, select");
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping || document.querySelector("dialog[open]")) return;
  if (event.key === "?") $("help").showModal();
  if (event.key === "/" && !$("filter-label").hidden) {
    event.preventDefault();
    $("filter").focus();
  }
}

function start() {
  setText($("address"), location.host);
  $("metrics").href = METRICS;
  makeReplicaHead(() => latest && drawReplicas(latest));
  $("filter").addEventListener("input", () => latest && drawReplicas(latest));
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("metrics").addEventListener("click", showMetrics);
  $("metrics-view").addEventListener("close", () => setText($("metrics-text"), ""));
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    live.useKey($("key").value.trim());
  });
  document.addEventListener("keydown", pressed);
  document.addEventListener("visibilitychange", () => (document.hidden ? live.close() : live.open()));
  window.addEventListener("online", () => live.isOpen && live.useKey(live.key));
  window.addEventListener("hashchange", () => location.hash.startsWith("#key=") && live.useKey(takeKey()));
  new ResizeObserver(() => document.querySelectorAll(".chart").forEach((node) => node.plot?.setSize(plotSize(node)))).observe($("charts"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.querySelectorAll(".chart").forEach((node) => node.plot?.redraw(false, true)));
  if (!document.hidden) live.open();
}

start();
