// The browser's half of the chat page. The server keeps no conversation: this script does, and gives the one of this tab
// to each event. Titles, names and texts come from models and from files: they are only ever text, never markup.
//
//   penstock.current()   JSON text of this tab's conversation; a new one has no turns. The `js=` of events gives it.
//   penstock.took(news)  what an event made of a conversation (JSON text or object): kept, and shown in the list.
//                        {"id", "updated_at", "leaf", "turn"} replaces one turn only: what streaming sends.
//   penstock.fresh()     a new conversation, with the settings used last.    penstock.open(id)   another one.
//   penstock.settings()  JSON text of the settings used last, "" before the first.
//   penstock.ready       a promise: the conversation that this tab had before a reload is there.
// Another conversation is drawn by a click on the hidden button #penstock-show.

const store = new Store();
const tabs = "BroadcastChannel" in window ? new BroadcastChannel("penstock") : { postMessage() {} };
// `others`: turns that another tab added to this conversation while the server works on it without knowing them.
// `saving`: the end of the last write. `taken`: the last news that was taken. `nChoices`: conversations that were chosen.
const page = { conversation: null, heard: new Set(), isFull: false, others: {}, saving: null, taken: "", nChoices: 0 };
const byId = (id) => document.getElementById(id);
const LEAVE_MS = 5_000; // an event that never ends does not keep anybody from the login

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

// What a private window or a full disk refuses is lost at the next reload, not now.
function keep(storage, key, value) {
  try {
    if (value) storage.setItem(key, value);
    else storage.removeItem(key);
  } catch (error) {
    console.debug(error);
  }
}

function kept(storage, key) {
  try {
    return storage.getItem(key) ?? "";
  } catch {
    return "";
  }
}

function newConversation() {
  const now = Date.now() / 1000;
  const id = [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const settings = JSON.parse(kept(localStorage, "penstock.settings") || "{}");
  return { id, title: "", created_at: now, updated_at: now, turns: {}, leaf: null, settings, version: 1 };
}

function isEmpty(conversation) {
  return Object.keys(conversation.turns).length === 0;
}

// The conversation of this tab from here on; `draft` false where the message box keeps what it has.
function become(conversation, draft = true) {
  if (conversation.id !== page.conversation.id) page.others = {};
  page.conversation = conversation;
  page.heard.add(conversation.id);
  keep(sessionStorage, "penstock.current", isEmpty(conversation) ? "" : conversation.id);
  document.title = isEmpty(conversation) ? page.name : `${titleOf(conversation)} · ${page.name}`;
  if (draft) drafts.restore();
}

function show() {
  byId("penstock-show")?.click();
  refreshHistory();
}

async function save(conversation) {
  try {
    const stored = await store.save(conversation);
    if (stored !== conversation && page.conversation.id === stored.id) {
      const others = Object.entries(stored.turns).filter(([id]) => !(id in conversation.turns));
      page.others = { ...page.others, ...Object.fromEntries(others) };
      page.conversation = joined(page.conversation, stored);
    }
    page.isFull = false;
    tabs.postMessage({ saved: conversation.id });
    return true;
  } catch (error) {
    if (!page.isFull)
      notify(error.name === "QuotaExceededError"
        ? "This browser has no room for more. Export and delete old chats; until then this one is lost when the tab closes."
        : `This browser could not keep the chat: ${error.message}. Export it before the tab closes.`);
    page.isFull = true;
    return false;
  } finally {
    refreshHistory();
  }
}

async function took(given) {
  if (given && given === page.taken) return; // heard twice: by the change of its box, and at the event's end
  page.taken = given;
  let news = typeof given === "string" ? (given ? JSON.parse(given) : null) : given;
  if (!news?.id) return;
  if (news.turn) {
    const { turn, ...rest } = news;
    const before = news.id === page.conversation.id ? page.conversation : await store.read(news.id);
    if (!before) return; // deleted while it was answered
    news = { ...before, ...rest, turns: { ...before.turns, [turn.id]: turn } };
  }
  const isOurs = news.id === page.conversation.id;
  if (isOurs) news = { ...news, turns: { ...news.turns, ...page.others } };
  if (isOurs || (isEmpty(page.conversation) && !page.heard.has(news.id))) {
    if (isEmpty(page.conversation)) drafts.forget();
    if (system.draft() === (news.settings?.system ?? "")) keep(sessionStorage, system.key(), ""); // it was sent
    become(news, false);
    drafts.sync();
    keep(localStorage, "penstock.settings", JSON.stringify(news.settings ?? {}));
  }
  page.saving = save(news);
}

// To the login, when what was sent and typed is kept: it is there again afterwards.
async function leave() {
  if (page.isLeaving) return;
  page.isLeaving = true;
  for (const began = Date.now(); isBusy() && Date.now() - began < LEAVE_MS; )
    await new Promise((resolve) => setTimeout(resolve, 50));
  drafts.sync();
  await page.saving;
  location.assign(new URL("login", document.baseURI));
}

// Gradio throws the answer to an event that the session has no right to.
addEventListener("unhandledrejection", (event) => {
  if (event.reason?.status !== 401) return;
  event.preventDefault();
  document.body.classList.remove("penstock-busy");
  leave();
});

// An answer that arrives is stopped, and what there is of it kept, before another conversation takes its place.
async function settle() {
  for (let i = 0; isBusy() && i < 40; i++) {
    if (i === 0) stopAnswer();
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

// Of two that are chosen while an answer is stopped the last one is shown.
async function turnTo(choose) {
  const choice = ++page.nChoices;
  await settle();
  drafts.sync();
  const conversation = await choose();
  if (choice !== page.nChoices) return;
  if (!conversation) return refreshHistory();
  become(conversation);
  show();
}

async function fresh() {
  await turnTo(newConversation);
  drafts.box()?.focus();
}

async function open(id) {
  await turnTo(() => store.read(id));
}

// What is typed is kept at each key, for each conversation: in this tab, and in the browser for the tab opened next.
const drafts = {
  box: () => document.querySelector("#penstock-message textarea"),
  key: (id = isEmpty(page.conversation) ? "new" : page.conversation.id) => `penstock.draft.${id}`,
  sync() {
    const box = this.box();
    if (box) [sessionStorage, localStorage].forEach((storage) => keep(storage, this.key(), box.value));
  },
  forget(id) {
    [sessionStorage, localStorage].forEach((storage) => keep(storage, this.key(id), ""));
  },
  restore() {
    const box = this.box();
    const text = kept(sessionStorage, this.key()) || kept(localStorage, this.key());
    if (box && box.value !== text) fill(box, text);
  },
};

// So is a system message, until it is sent. The page draws that of the conversation first (chat.js).
const system = {
  key: () => drafts.key().replace("draft", "system"),
  draft: () => kept(sessionStorage, system.key()),
  restore() {
    const box = document.querySelector("#penstock-system textarea");
    if (box && system.draft()) fill(box, system.draft());
  },
};

function fill(box, text) {
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

function notify(text, action) {
  const notice = el("div", { class: "penstock-notice" }, text);
  if (action) notice.append(el("button", { type: "button", onclick: () => (action.run(), notice.remove()) }, action.name));
  let region = byId("penstock-notices");
  if (!region) document.body.append((region = el("div", { id: "penstock-notices", role: "status" })));
  region.replaceChildren(notice);
  setTimeout(() => notice.remove(), action ? 10_000 : 8_000);
}

// Runs `start` when an element is there, and again when Gradio draws it anew.
function whenThere(selector, start) {
  const look = () => {
    const node = document.querySelector(selector);
    if (node && !node.dataset.penstock) {
      node.dataset.penstock = "1";
      start(node);
    }
  };
  look();
  watched.push(look);
}

const watched = [];
// At each change and before the browser draws it, so that nobody meets an element without its name or its role.
const lookAgain = () => watched.forEach((look) => look());
const observer = new MutationObserver(lookAgain);

tabs.onmessage = async ({ data }) => {
  refreshHistory();
  if (data.saved !== page.conversation.id || isBusy()) return;
  const stored = await store.read(data.saved);
  if (stored) become(stored, false), show();
};

// An answer is arriving here, or on its way (chat.js).
function isBusy() {
  return document.body.classList.contains("penstock-busy");
}

page.name = window.gradio_config?.title || document.title || "penstock";
page.conversation = newConversation();
page.heard.add(page.conversation.id);
const ready = store.read(kept(sessionStorage, "penstock.current")).catch(() => null).then((conversation) => {
  if (conversation) become(conversation);
});
window.penstock = {
  current() {
    page.others = {}; // the event that begins knows them
    return JSON.stringify(page.conversation);
  },
  settings: () => kept(localStorage, "penstock.settings"),
  took, fresh, open, ready,
};

document.addEventListener("input", ({ target }) => {
  if (target.closest?.("#penstock-message")) drafts.sync();
  if (target.closest?.("#penstock-system")) keep(sessionStorage, system.key(), target.value);
});
addEventListener("DOMContentLoaded", lookAgain);
observer.observe(document.documentElement, { childList: true, subtree: true });
whenThere("#penstock-message textarea", () => ready.then(() => drafts.restore()));
// The texts of the other tabs outlive a reload too.
for (const id of ["penstock-prompt", "penstock-question"]) {
  whenThere(`#${id} textarea`, (box) => {
    const text = kept(sessionStorage, `penstock.draft.${id}`);
    if (text) fill(box, text);
    box.addEventListener("input", () => keep(sessionStorage, `penstock.draft.${id}`, box.value));
  });
}
