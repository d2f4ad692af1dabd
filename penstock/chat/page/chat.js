// The chat's own part: buttons below questions and answers, editing, images, and what each event gets from this tab.
// An order ({act, turn, images}) says what an event is about; window.penstockChat gives it to the server.

const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const IMAGE_SIDE_MAX = 2048; // larger ones are made smaller: models see no more
const TRIES_MAX = 5;
const DRAWING_MAX_MS = 15000; // a lost event must not keep the message box shut
const chat = {
  order: null, sent: null, waiting: null, editing: null, images: [], tries: 0, shown: null,
  drawingUntil: Date.now() + DRAWING_MAX_MS, // the first conversation comes by itself
};

const isAnswering = () => document.body.classList.contains("penstock-busy");
const nTurns = () => Object.keys(page.conversation.turns).length;
const turnOf = (id) => page.conversation.turns[id];
// As conversation.py has it: the calls of an answer that is nothing else.
const spoken = (turn) => turn?.text || (turn?.tool_calls ?? []).map((call) => `${call.name}(${call.arguments})`).join("\n");

function order(act, turn, overTokens = 1) {
  chat.order = { act, turn, over_tokens: overTokens };
  byId("penstock-act")?.click();
}

// What stands above the message box: that a question is edited, and the images that go with the next one.
function drawAbove() {
  const parts = chat.images.map((url, place) =>
    el("span", { class: "image" }, el("img", { src: url, alt: `image ${place + 1}` }),
      el("button", { type: "button", "aria-label": `Remove image ${place + 1}`, onclick: () => (chat.images.splice(place, 1), drawAbove()) }, "×")));
  if (chat.editing)
    parts.unshift(el("span", {}, "You edit a question; the old one stays as a branch. ",
      el("button", { type: "button", onclick: cancelEdit }, "Cancel")));
  byId("penstock-above")?.replaceChildren(...parts);
}

function beginEdit(id) {
  chat.editing = { draft: chat.editing?.draft ?? drafts.box().value, turn: id };
  fill(drafts.box(), turnOf(id)?.text ?? "");
  drafts.box().focus();
  drawAbove();
}

function cancelEdit() {
  if (!chat.editing) return;
  const { draft } = chat.editing;
  chat.editing = null;
  fill(drafts.box(), draft);
  drawAbove();
}

// Deleted at once, like a chat, with the same "Undo".
function remove(id) {
  const before = page.conversation;
  order("delete", id);
  notify("Message deleted.", { name: "Undo", run: () => putBack(before) });
}

async function putBack(before) {
  await settle();
  const isHere = before.id === page.conversation.id;
  const now = isHere ? page.conversation : await store.read(before.id);
  if (!now) return;
  const whole = { ...now, turns: { ...before.turns, ...now.turns }, leaf: before.leaf };
  if (isHere) become(whole, false), show();
  save(whole);
}

async function copyText(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages without TLS beyond this machine have no clipboard.
    const area = el("textarea", {});
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".penstock-foot button[data-act]");
  // What a model wrote lies in .md: nothing there is a button of ours.
  if (!button || button.closest(".md")) return;
  const { act, turn } = button.dataset;
  if (act === "copy") copyText(button, spoken(turnOf(turn)));
  else if (isAnswering()) notify("An answer is arriving. Stop it first.");
  else if (act === "edit") beginEdit(turn);
  else if (act === "delete") remove(turn);
  else if (act === "plain") {
    const box = document.querySelector("#penstock-has-system input");
    if (box?.checked) box.click();
    order("retry", turn);
  } else order(act, turn, Number(button.dataset.over ?? 1));
});

// Nor is a form there one of ours: it would log out.
document.addEventListener("submit", (event) => event.target.closest?.(".md") && event.preventDefault(), true);

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.editing && !isAnswering()) cancelEdit();
});

// Gradio does not hear what is sent before an event is over, which is some time after the answer's last word; and what a
// slow machine draws of a conversation that was just opened would cover a question that is asked before it comes. Such a
// message goes when that is over, if it is still the same.
const isDrawing = () => Date.now() < chat.drawingUntil;

function keepWaiting(event) {
  event.preventDefault();
  event.stopPropagation();
  chat.waiting = drafts.box().value;
}

function sendWaiting(waiting) {
  if (waiting !== null && (waiting.trim() || chat.images.length) && drafts.box()?.value === waiting) press("penstock-send");
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.target !== drafts.box()) return;
  if (isAnswering() || isDrawing() || page.isLeaving) keepWaiting(event);
}, true);

document.addEventListener("click", (event) => {
  if (isDrawing() && event.target.closest?.("#penstock-send")) keepWaiting(event);
}, true);

// An overloaded server said when to come again: a countdown, then the question is asked again.
setInterval(() => {
  for (const button of document.querySelectorAll(".penstock-foot button[data-in]")) {
    if (chat.tries >= TRIES_MAX) continue;
    button.dataset.at ??= Date.now() + 1000 * Number(button.dataset.in);
    const left = Math.ceil((button.dataset.at - Date.now()) / 1000);
    button.textContent = left > 0 ? `Ask again (by itself in ${left} s)` : "Ask again";
    if (left > 0 || isAnswering() || document.hidden) continue;
    chat.tries += 1;
    button.removeAttribute("data-in");
    button.click();
  }
}, 250);

// Images: chosen, pasted or dropped, where the model takes them.
function takesImages() {
  const chosen = document.querySelector("#penstock-model input")?.value ?? "";
  const names = (row) => [row.id, ...(row.aliases ?? [])];
  const row = state.rows.find((one) => names(one).some((name) => chosen === name || chosen.startsWith(`${name} (`))) ?? state.rows[0];
  // A server that is no gateway of ours does not say; its refusal does.
  return Boolean(row && (row.input_modalities ? row.input_modalities.includes("image") : !row.state));
}

async function smaller(file) {
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  const image = new Image();
  image.src = url;
  await image.decode();
  const share = IMAGE_SIDE_MAX / Math.max(image.naturalWidth, image.naturalHeight);
  if (share >= 1 && IMAGE_TYPES.includes(file.type)) return url;
  const canvas = el("canvas", { width: Math.round(image.naturalWidth * Math.min(1, share)), height: Math.round(image.naturalHeight * Math.min(1, share)) });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

async function addImages(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  if (!images.length) return;
  if (!takesImages()) return notify("This model takes no images.");
  for (const file of images) {
    try {
      chat.images.push(await smaller(file));
    } catch {
      notify(`${file.name} is no image that this browser can read.`);
    }
  }
  drawAbove();
}

whenThere("#penstock-ask", (row) => {
  const input = el("input", { type: "file", accept: "image/*", multiple: true, hidden: true, onchange: () => addImages(input.files).then(() => (input.value = "")) });
  const attach = el("button", { id: "penstock-attach", type: "button", hidden: true, "aria-label": "Attach images", title: "Attach images", onclick: () => input.click() }, "+");
  row.prepend(attach, input);
  row.addEventListener("paste", (event) => addImages(event.clipboardData?.files ?? []));
  row.addEventListener("dragover", (event) => event.preventDefault());
  row.addEventListener("drop", (event) => (event.preventDefault(), addImages(event.dataTransfer?.files ?? [])));
  setInterval(() => (attach.hidden = !takesImages()), 1000);
});

// The end of the conversation stays in view until somebody scrolls up. Gradio's own way loses it at a fast answer.
const view = { isPinned: true, top: 0 };

function pin() {
  view.isPinned = true;
}

whenThere("#penstock-chat [role=log]", (log) => {
  log.addEventListener("scroll", () => {
    if (log.scrollTop < view.top - 2) view.isPinned = false;
    else if (log.scrollHeight - log.scrollTop - log.clientHeight < 60) view.isPinned = true;
    view.top = log.scrollTop;
  });
  const follow = () => view.isPinned && (log.scrollTop = log.scrollHeight);
  new MutationObserver(follow).observe(log, { childList: true, subtree: true, characterData: true });
  new ResizeObserver(follow).observe(log);
});

window.penstockChat = {
  // The conversation and the order, before the values of the other inputs.
  orders(_conversation, _order, text, ...rest) {
    const given = chat.order ?? (chat.editing ? { act: "edit", turn: chat.editing.turn } : { act: "ask", images: chat.images });
    chat.order = null;
    if (given.act === "ask" || given.act === "edit") {
      chat.tries = 0;
      chat.sent = { text, images: chat.images, editing: chat.editing, nTurns: nTurns() };
      Object.assign(chat, { editing: null, images: given.act === "ask" ? [] : chat.images });
      drawAbove();
    }
    document.body.classList.add("penstock-busy");
    pin();
    return [window.penstock.current(), JSON.stringify(given), text, ...rest];
  },
  // An event is over, whatever became of it. What was refused before it was sent is still in the box, and comes back to it.
  ended(isError, news) {
    window.penstock.took(news); // the next question follows this answer
    document.body.classList.remove("penstock-busy");
    const { sent, waiting } = chat;
    Object.assign(chat, { sent: null, waiting: null });
    const box = drafts.box();
    if (!sent || !box) return;
    const isEmpty = !sent.text.trim() && (sent.editing || !sent.images.length);
    const isRefused = isError && nTurns() === sent.nTurns;
    if (isEmpty || isRefused) Object.assign(chat, { images: sent.images, editing: sent.editing });
    else if (sent.editing?.draft && !box.value) fill(box, sent.editing.draft);
    else if (!isError) sendWaiting(waiting);
    drawAbove();
  },
  // Another conversation is drawn; an answer that still arrives is left.
  async shown(_conversation, ...rest) {
    chat.drawingUntil = Date.now() + DRAWING_MAX_MS;
    await window.penstock.ready;
    document.body.classList.remove("penstock-busy");
    chat.drawingUntil = Date.now() + DRAWING_MAX_MS;
    if (chat.shown !== page.conversation.id) Object.assign(chat, { shown: page.conversation.id, editing: null });
    drawAbove();
    pin();
    return [window.penstock.current(), ...rest];
  },
  drawn() {
    const { waiting } = chat;
    Object.assign(chat, { waiting: null, drawingUntil: 0 });
    system.restore();
    sendWaiting(waiting);
  },
};
