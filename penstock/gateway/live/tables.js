// Lists and tables: replicas, machines, requests, keys, events.

const MANY = 10;
const MOST_EVENTS = 200;
const OPEN_MACHINES = matchMedia("(max-width: 760px)").matches ? 0 : 4;

function cell(label, ...children) {
  const node = el("td", "", ...children);
  node.setAttribute("role", "cell");
  node.dataset.label = label;
  return node;
}

function row(...cells) {
  const node = el("tr", "", ...cells);
  node.setAttribute("role", "row");
  return node;
}

// A value with a smaller one below.
function makePair() {
  return el("span", "duo number", el("span", ""), el("small", ""));
}

function setPair(node, first, second) {
  setText(node.firstChild, first);
  setText(node.lastChild, second);
}

// Replicas.

const COLUMNS = [
  { label: "Replica", key: (r) => r.replica },
  { label: "State", key: (r) => r.state },
  { label: "In flight", key: (r) => r.in_flight, number: true },
  { label: "Running", key: (r) => r.running, number: true },
  { label: "KV cache", key: (r) => r.kv_use, number: true },
  { label: "Tokens/s", key: (r) => r.output_tokens_per_s, number: true },
  { label: "First token", key: (r) => r.ttft_s_p50, number: true },
  { label: "Between", key: (r) => r.itl_s_p50, number: true },
  { label: "Cached", key: (r) => r.cache_hits, number: true },
  { label: "Restarts", key: (r) => r.n_restarts, number: true },
  { label: "Up", key: (r) => r.up_s, number: true },
];
const order = { column: COLUMNS[0], isDown: false };
const natural = new Intl.Collator("en", { numeric: true });

function makeReplicaHead(redraw) {
  for (const column of COLUMNS) {
    const button = el("button", "", column.label);
    button.type = "button";
    const head = el("th", column.number ? "number" : "", button);
    head.setAttribute("role", "columnheader");
    head.scope = "col";
    button.addEventListener("click", () => {
      order.isDown = order.column === column ? !order.isDown : Boolean(column.number);
      order.column = column;
      markOrder();
      redraw();
    });
    column.head = head;
    $("replicas-head").append(head);
  }
  markOrder();
}

function markOrder() {
  for (const { head } of COLUMNS) head.removeAttribute("aria-sort");
  order.column.head.setAttribute("aria-sort", order.isDown ? "descending" : "ascending");
}

function compareReplicas(a, b) {
  const [first, second] = [order.column.key(a), order.column.key(b)];
  if (first == null || second == null) return (first == null) - (second == null);
  const sign = order.isDown ? -1 : 1;
  return sign * (typeof first === "number" ? first - second : natural.compare(first, second)) || natural.compare(a.replica, b.replica);
}

function withDefaults(replica) {
  const defaults = { host: "", engine: "", in_flight: 0, n_restarts: 0, machines: [] };
  return { ...defaults, ...replica };
}

function makeReplica() {
  const parts = {
    name: el("b", ""), model: el("small", ""), chip: el("span", "chip"), marks: el("span", "marks"),
    progress: makeBar(), note: el("small", "note"), kv: makeBar(), kvText: el("span", "number"),
    in_flight: el("span", "number"), running: makePair(), tokens: makePair(), ttft: makePair(), itl: makePair(),
    hits: el("span", "number"), restarts: el("span", "number"), up: el("span", "number"),
  };
  const cells = [
    [parts.name, parts.model], [parts.chip, parts.marks, parts.progress, parts.note], [parts.in_flight], [parts.running],
    [el("span", "gauge", parts.kv, parts.kvText)], [parts.tokens], [parts.ttft], [parts.itl], [parts.hits], [parts.restarts], [parts.up],
  ].map((children, i) => cell(COLUMNS[i].label, ...children));
  for (const [i, column] of COLUMNS.entries()) if (column.number) cells[i].classList.add("number");
  return Object.assign(row(...cells), { parts });
}

function fillReplica(node, replica) {
  const { parts } = node;
  setText(parts.name, replica.replica);
  setText(parts.model, [replica.model, replica.host].filter(Boolean).join(" · "));
  setChip(parts.chip, replica.state);
  const marks = [replica.is_draining && "draining", replica.is_ejected && "ejected"].filter(Boolean);
  fillList(parts.marks, marks, (mark) => mark, () => el("span", "chip warn"), (chip, mark) => setChip(chip, mark, "warn"));
  const progress = ["ready", "busy"].includes(replica.state) ? null : replica.progress;
  parts.progress.hidden = progress?.fraction == null;
  setBar(parts.progress, progress?.fraction, "busy");
  setText(parts.note, [progress && progressText(progress), replica.reason].filter(Boolean).join(" · "));
  setText(parts.in_flight, showCount(replica.in_flight));
  setPair(parts.running, showCount(replica.running), replica.waiting ? `${showCount(replica.waiting)} waiting` : "");
  parts.kv.hidden = replica.kv_use == null;
  setBar(parts.kv, replica.kv_use);
  setText(parts.kvText, showShare(replica.kv_use));
  setPair(parts.tokens, showRate(replica.output_tokens_per_s), replica.prompt_tokens_per_s == null ? "" : `${showRate(replica.prompt_tokens_per_s)} in`);
  setPair(parts.ttft, showSeconds(replica.ttft_s_p50), replica.ttft_s_p99 == null ? "" : `p99 ${showSeconds(replica.ttft_s_p99)}`);
  setPair(parts.itl, showSeconds(replica.itl_s_p50), replica.itl_s_p99 == null ? "" : `p99 ${showSeconds(replica.itl_s_p99)}`);
  setText(parts.hits, showShare(replica.cache_hits));
  setText(parts.restarts, showCount(replica.n_restarts));
  setAttribute(parts.restarts, "class", `number ${replica.n_restarts ? "warn-text" : ""}`);
  setText(parts.up, showPeriod(replica.up_s));
}

// "loading weights, 12 of 30 shards, 1.2 GB/s, 40 s left"
function progressText(progress) {
  const { stage, shards_done, shards_total, bytes_per_s, eta_s, fraction } = progress;
  return [
    stage,
    shards_total ? `${shards_done ?? 0} of ${shards_total} shards` : fraction != null && showShare(fraction),
    bytes_per_s && showBytesRate(bytes_per_s),
    eta_s != null && `${showPeriod(eta_s)} left`,
  ].filter(Boolean).join(", ");
}

function drawReplicas(snapshot) {
  const all = (snapshot.replicas ?? []).map(withDefaults);
  $("filter-label").hidden = all.length <= MANY;
  const words = all.length > MANY ? $("filter").value.toLowerCase().split(/\s+/).filter(Boolean) : [];
  const text = (r) => [r.replica, r.model, r.host, r.state, r.is_draining && "draining", r.is_ejected && "ejected"].join(" ").toLowerCase();
  const shown = all.filter((replica) => words.every((word) => text(replica).includes(word))).sort(compareReplicas);
  $("replicas-head").parentNode.classList.toggle("few", all.length <= MANY);
  fillList($("replicas"), shown, (replica) => replica.replica, makeReplica, fillReplica);
  setText($("replicas-count"), words.length ? `${shown.length} of ${all.length}` : `${all.length}`);
  const counts = new Map();
  for (const { state } of all) counts.set(state, (counts.get(state) ?? 0) + 1);
  const states = counts.size > 1 || all.length > MANY ? [...counts] : [];
  fillList($("states"), states, ([state]) => state, () => el("span", "chip"), (chip, [state, n]) => setChip(chip, `${n} ${state}`, TONES.get(state)));
  $("replicas-none").hidden = shown.length > 0;
  setText($("replicas-none"), all.length ? "No replica has all these words." : "No replica has announced itself.");
}

// Machines and their GPUs; several replicas may share a machine.

const network = new Map(); // by host: the counters of the last snapshot

function machinesOf(snapshot) {
  const hosts = new Map();
  for (const replica of snapshot.replicas ?? []) {
    for (const reading of replica.machines ?? []) {
      const machine = hosts.get(reading.host) ?? { ...reading, gpus: new Map() };
      for (const gpu of reading.gpus ?? []) machine.gpus.set(gpu.uuid, { ...gpu, replica: replica.replica });
      hosts.set(reading.host, machine);
    }
  }
  for (const machine of hosts.values()) {
    const isShared = new Set([...machine.gpus.values()].map((gpu) => gpu.replica)).size > 1;
    for (const gpu of machine.gpus.values()) gpu.isShared = isShared;
    const before = network.get(machine.host);
    const seconds = before ? snapshot.at - before.at : 0;
    const rate = (field) => (seconds > 0 && machine[field] >= before[field] ? (machine[field] - before[field]) / seconds : null);
    Object.assign(machine, { received: rate("received_bytes"), sent: rate("sent_bytes"), gpus: [...machine.gpus.values()].sort((a, b) => a.index - b.index) });
    network.set(machine.host, { at: snapshot.at, received_bytes: machine.received_bytes, sent_bytes: machine.sent_bytes });
  }
  for (const host of network.keys()) if (!hosts.has(host)) network.delete(host);
  return [...hosts.values()].sort((a, b) => natural.compare(a.host, b.host));
}

function makeMachine() {
  const parts = { host: el("b", ""), facts: el("span", "facts quiet number"), strip: el("span", "strip"), gpus: el("ul", "gpus") };
  parts.strip.setAttribute("role", "img");
  const node = el("details", "machine", el("summary", "", parts.host, parts.strip, parts.facts), parts.gpus);
  node.open = $("machines").children.length < OPEN_MACHINES;
  node.addEventListener("toggle", () => node.machine && fillMachine(node, node.machine));
  return Object.assign(node, { parts });
}

function fillMachine(node, machine) {
  const { parts } = node;
  node.machine = machine;
  const of = (used, total) => `${showGib(used)} of ${showGib(total)} GiB`;
  setText(parts.host, machine.host);
  setText(parts.facts, [
    gpusText(machine.gpus),
    machine.cpu_use != null && `CPU ${showShare(machine.cpu_use)}${machine.n_cpus ? ` of ${machine.n_cpus} cores` : ""}`,
    machine.memory_total_bytes && `memory ${of(machine.memory_used_bytes, machine.memory_total_bytes)}`,
    machine.disk_total_bytes && `disk ${showGib(machine.disk_free_bytes)} GiB free`,
    machine.received != null && `network ${showBytesRate(machine.received)} in, ${showBytesRate(machine.sent)} out`,
  ].filter(Boolean).join(" · "));
  parts.strip.hidden = !machine.gpus.length;
  const uses = machine.gpus.map((gpu) => showShare(gpu.utilization));
  setAttribute(parts.strip, "aria-label", `Use of ${uses.length} GPUs: ${uses.join(", ")}`);
  fillList(parts.strip, machine.gpus, byPosition, () => el("span", "", el("i", "")), (bar, gpu) => {
    bar.firstChild.style.height = `${Math.round(100 * Math.min(1, gpu.utilization ?? 0))}%`;
    setAttribute(bar, "class", gpu.n_xids ? "bad" : gpu.throttle?.length ? "warn" : "");
  });
  if (node.open) fillList(parts.gpus, machine.gpus, (gpu) => gpu.uuid, makeGpu, fillGpu);
}

function makeGpu() {
  const parts = { name: el("b", ""), use: makeBar(), useText: el("span", "number"), memory: makeBar(), memoryText: el("span", "number"), facts: el("span", "quiet number"), marks: el("span", "marks") };
  const gauge = (label, bar, text) => el("span", "gauge", el("span", "unseen", label), bar, text);
  const node = el("li", "gpu", parts.name, gauge("use", parts.use, parts.useText), gauge("memory", parts.memory, parts.memoryText), parts.facts, parts.marks);
  return Object.assign(node, { parts });
}

function fillGpu(node, gpu) {
  const { parts } = node;
  const share = gpu.memory_total_bytes ? gpu.memory_used_bytes / gpu.memory_total_bytes : null;
  setText(parts.name, `GPU ${gpu.index}`);
  setBar(parts.use, gpu.utilization, "");
  setText(parts.useText, showShare(gpu.utilization));
  setBar(parts.memory, share, "second");
  setText(parts.memoryText, gpu.memory_total_bytes ? `${showGib(gpu.memory_used_bytes)}/${showGib(gpu.memory_total_bytes)} GiB` : NONE);
  setText(parts.facts, [
    gpu.power_watts != null && `${withLimit(gpu.power_watts, gpu.power_limit_watts)} W`,
    gpu.temperature_celsius != null && `${Math.round(gpu.temperature_celsius)} °C`,
    gpu.sm_clock_mhz != null && `${withLimit(gpu.sm_clock_mhz, gpu.memory_clock_mhz)} MHz`,
  ].filter(Boolean).join(" · "));
  const marks = [...(gpu.throttle ?? []).map((why) => [`throttled: ${why}`, "warn"])];
  if (gpu.n_xids) marks.push([`XID ${(gpu.xids ?? []).slice(-3).join(", ")}${gpu.n_xids > 1 ? `, ${gpu.n_xids} in all` : ""}`, "bad"]);
  if (gpu.isShared) marks.push([`replica ${gpu.replica}`, "quiet"]);
  fillList(parts.marks, marks, byPosition, () => el("span", "chip"), (chip, [word, tone]) => setChip(chip, word, tone));
}

function withLimit(value, limit) {
  return limit == null ? `${Math.round(value)}` : `${Math.round(value)}/${Math.round(limit)}`;
}

// "8 x NVIDIA H100, mean use 86%, 4.9 kW"
function gpusText(gpus) {
  if (!gpus.length) return "";
  const names = [...new Set(gpus.map((gpu) => gpu.name).filter(Boolean))].join(", ");
  const uses = gpus.map((gpu) => gpu.utilization).filter((use) => use != null);
  const watts = gpus.map((gpu) => gpu.power_watts).filter((power) => power != null);
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  return [`${gpus.length} × ${names || "GPU"}`, uses.length && `${showShare(sum(uses) / uses.length)} used`, watts.length && showWatts(sum(watts))].filter(Boolean).join(", ");
}

function drawMachines(snapshot) {
  const machines = machinesOf(snapshot);
  const n = machines.reduce((sum, machine) => sum + machine.gpus.length, 0);
  $("machines-section").hidden = !machines.length;
  setText($("machines-title"), n ? "Machines and GPUs" : "Machines");
  setText($("machines-count"), n ? `${machines.length} with ${n} GPUs` : `${machines.length}`);
  fillList($("machines"), machines, (machine) => machine.host, makeMachine, fillMachine);
}

// Queue, objectives, cost.

function fillFacts(list, facts) {
  fillList(list, facts, ([label]) => label, ([label]) => el("div", "", el("dt", "", label), el("dd", "number")), (node, [, value, tone]) => {
    setText(node.lastChild, value);
    setAttribute(node.lastChild, "class", `number ${tone ?? ""}`);
  });
}

function drawQueue({ now }) {
  fillFacts($("queue"), [
    ["Held in the gateway", showCount(now.waiting), now.waiting > 0 ? "warn-text" : ""],
    ["Waiting in engines", showCount(now.engine_waiting), now.engine_waiting > 0 ? "warn-text" : ""],
    ["On replicas", showCount(now.in_flight)],
    ["Fullest KV cache", showShare(now.kv_use)],
  ]);
}

function drawSlo(slo = {}) {
  const promises = [
    ["First token", slo.ttft_ms, slo.ttft_share],
    ["Each further token", slo.tpot_ms, slo.tpot_share],
  ].filter(([, bound]) => bound != null);
  $("slo-section").hidden = !promises.length;
  const make = () => el("p", "objective", el("span", ""), el("b", "number"), makeBar());
  fillList($("slo"), promises, byPosition, make, (node, [label, bound, share]) => {
    const [name, value, bar] = node.children;
    const tone = share == null ? "" : share < 0.9 ? "bad" : share < 0.99 ? "warn" : "good";
    setText(name, `${label} within ${showSeconds(bound / 1000).replace(" ", "\u00a0")}`);
    setText(value, share == null ? NONE : `${showExactShare(share)} of requests`);
    setBar(bar, share, tone);
  });
}

function drawCost(cost = {}) {
  const facts = [
    ["Per hour", cost.usd_per_hour, showUsd],
    ["Per million tokens", cost.usd_per_million_tokens, showUsd],
    ["Idle", cost.idle_share, showShare],
    ["Energy per token", cost.joules_per_token, (value) => `${digits(value)} J`],
  ].filter(([, value]) => value != null);
  $("cost-section").hidden = !facts.length;
  fillFacts($("cost"), facts.map(([label, value, show]) => [label, show(value)]));
}

// Requests, keys, events.

const PARTS = [["hold", "held", "hold_s"], ["own", "gateway", "own_s"], ["first", "first byte", "first_byte_s"], ["stream", "answer", "stream_s"]];

function makeSlow() {
  const parts = { took: el("b", "number"), stack: el("span", "stack", ...PARTS.map(([name]) => el("span", name))), text: el("small", "number"), id: el("code", ""), trace: el("small", ""), replica: el("span", ""), model: el("small", ""), key: el("span", ""), tokens: makePair(), chip: el("span", "chip"), at: el("span", "number") };
  const cells = [[parts.took], [parts.stack, parts.text], [parts.id, parts.trace], [parts.replica, parts.model], [parts.key], [parts.tokens], [parts.chip], [parts.at]];
  const labels = ["Took", "Where the time went", "Request", "Replica", "Key", "Tokens", "Outcome", "At"];
  return Object.assign(row(...cells.map((children, i) => cell(labels[i], ...children))), { parts });
}

function drawSlow(slow = []) {
  $("slow-section").hidden = !slow.length;
  const longest = slow.reduce((most, request) => Math.max(most, request.duration_s), 0) || 1;
  fillList($("slow"), [...slow].sort((a, b) => b.duration_s - a.duration_s), byPosition, makeSlow, ({ parts }, request) => {
    setText(parts.took, showSeconds(request.duration_s));
    parts.stack.style.width = `${Math.max(1, (100 * request.duration_s) / longest)}%`;
    for (const [i, [, , field]] of PARTS.entries()) {
      parts.stack.children[i].hidden = !request[field];
      parts.stack.children[i].style.flexGrow = request[field] ?? 0;
    }
    const spent = PARTS.filter(([name, , field]) => (request[field] ?? 0) > 0 && (name !== "own" || request[field] >= 0.01));
    setText(parts.text, spent.map(([, label, field]) => `${label} ${showSeconds(request[field])}`).join(" · "));
    setText(parts.id, request.request_id);
    setText(parts.trace, request.trace_id ? `trace ${request.trace_id}` : "");
    setText(parts.replica, request.replica || NONE);
    setText(parts.model, request.model);
    setText(parts.key, request.key || NONE);
    setPair(parts.tokens, `${showCount(request.output_tokens ?? 0)} out`, `${showCount(request.prompt_tokens ?? 0)} in`);
    setChip(parts.chip, `${request.outcome.replaceAll("_", " ")} ${request.status}`, outcomeTone(request));
    setText(parts.at, showMoment(request.at));
  });
}

function outcomeTone({ outcome, status }) {
  if (outcome === "complete" && status < 400) return "good";
  return outcome === "client_gone" ? "quiet" : status >= 400 && status < 500 ? "warn" : "bad";
}

function drawKeys(keys = []) {
  $("keys-section").hidden = !keys.length;
  const labels = ["Key", "Model", "Requests", "Prompt tokens", "Output tokens", "Cost"];
  const make = () => row(...labels.map((label, i) => Object.assign(cell(label), { className: i > 1 ? "number" : "" })));
  const used = [...keys].sort((a, b) => b.prompt_tokens + b.output_tokens - a.prompt_tokens - a.output_tokens);
  fillList($("keys"), used, byPosition, make, (node, use) => {
    const values = [use.key || NONE, use.model, showCount(use.n_requests), showRate(use.prompt_tokens), showRate(use.output_tokens), showUsd(use.cost_usd)];
    for (const [i, value] of values.entries()) setText(node.children[i], value);
  });
}

function drawEvents(events = []) {
  $("events-section").hidden = !events.length;
  const make = () => el("li", "", el("time", "quiet number"), el("span", "chip"), el("span", "text"), el("small", "quiet"));
  fillList($("events"), events.slice(-MOST_EVENTS).reverse(), byPosition, make, (node, event) => {
    const [time, chip, text, more] = node.children;
    setText(time, showMoment(event.at));
    setChip(chip, event.event, eventTone(event));
    setText(text, event.replica == null ? event.text : `replica ${event.replica}: ${event.text}`);
    const spent = Object.entries(event.seconds ?? {}).filter(([stage, value]) => value >= 0.01 && !event.text.includes(stage));
    const seconds = spent.map(([stage, value]) => `${stage} ${showSeconds(value)}`);
    setText(more, [event.who && `by ${event.who}`, ...seconds].filter(Boolean).join(" · "));
  });
}
