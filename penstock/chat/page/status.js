// The chip that says how the model is: from `status`, each 2 s until it is ready, then each 5 s, never while hidden.

const SLOW_MS = 5_000;
const FAST_MS = 2_000;
const state = { word: "", timer: null, rows: [] };

function seconds(value) {
  return value < 90 ? `${Math.round(value)} s` : `${Math.round(value / 60)} min`;
}

function progressText(progress) {
  const { fraction, shards_done, shards_total, eta_s } = progress ?? {};
  const share = shards_total ? `${shards_done ?? 0}/${shards_total}` : fraction != null ? `${Math.round(fraction * 100)} %` : "";
  return [share, eta_s != null ? seconds(eta_s) : ""].filter(Boolean).join(", ");
}

// {kind: "good" | "busy" | "bad", word, text} of one row of the gateway's models; others' rows have no state.
function chipOf(row) {
  const { ready, total } = row.replicas ?? {};
  if (ready > 0 || row.state === "ready" || !row.state)
    return { kind: "good", word: "ready", text: total > 1 ? `ready ${ready} of ${total}` : "ready" };
  const word = row.state;
  return { kind: word === "unavailable" ? "bad" : "busy", word, text: `${word} ${progressText(row.progress)}`.trim() };
}

async function readStatus() {
  try {
    const answer = await fetch(new URL("status", document.baseURI), { headers: { accept: "application/json" } });
    if (answer.status === 401) return leave();
    const facts = await answer.json();
    if (facts.state === "offline") return { kind: "bad", word: "offline", text: "offline", reason: facts.reason };
    state.rows = facts.models ?? [];
    const model = page.conversation.settings.model;
    const row = state.rows.find((one) => one.id === model || one.aliases?.includes(model)) ?? state.rows[0];
    return row ? chipOf(row) : { kind: "busy", word: "no model", text: "no model yet" };
  } catch {
    return { kind: "bad", word: "lost", text: "page is offline", reason: "The process of this page does not answer." };
  }
}

async function refreshStatus() {
  clearTimeout(state.timer);
  const chip = document.hidden ? null : await readStatus();
  if (chip) draw(chip);
  state.timer = setTimeout(refreshStatus, !chip || chip.kind === "good" ? SLOW_MS : FAST_MS);
}

function draw({ kind, word, text, reason }) {
  const node = byId("penstock-state");
  if (!node) return;
  node.className = `penstock-chip ${kind}`;
  node.title = reason ?? "";
  if (node.textContent !== text) node.textContent = text;
  // A screen reader hears the change of the state, not each second of a countdown.
  if (state.word && state.word !== word) byId("penstock-heard").textContent = `The model is ${word}.`;
  state.word = word;
}

whenThere("#penstock-status", (root) => {
  root.replaceChildren(el("span", { id: "penstock-state", class: "penstock-chip" }),
    el("span", { id: "penstock-heard", class: "penstock-unseen", role: "status" }));
  refreshStatus();
});
document.addEventListener("visibilitychange", () => document.hidden || refreshStatus());
