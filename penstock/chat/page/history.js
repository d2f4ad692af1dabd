// The list of conversations in the left sidebar: new, search, rename, delete with undo, export and import.

const history_ = { words: "", matching: null, drawn: "", root: null };

function dayOf(seconds, now = new Date()) {
  const midnight = new Date(now.getFullYear(), now.getMonth(), now.getDate());
  const days = Math.ceil((midnight - new Date(seconds * 1000)) / 86_400_000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days <= 7) return "Last 7 days";
  return new Date(seconds * 1000).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}

function itemOf(row) {
  const isCurrent = row.id === page.conversation.id;
  const when = new Date(row.updated_at * 1000).toLocaleString();
  return el("li", { "data-id": row.id },
    el("button", { type: "button", class: "open", title: `${row.title}\n${when}`, "aria-current": isCurrent && "true",
      onclick: () => (open(row.id), closeOnPhone()) }, row.title),
    el("button", { type: "button", class: "more", "aria-label": `Menu of ${row.title}`, "aria-haspopup": "menu",
      onclick: (event) => openMenu(event.currentTarget, row) }, "⋯"));
}

async function refreshHistory() {
  const root = history_.root;
  if (!root) return;
  const rows = await store.titles().catch(() => []);
  const shown = rows.filter((row) => !history_.matching || history_.matching.has(row.id));
  const signature = JSON.stringify([page.conversation.id, history_.words, shown.map((row) => [row.id, row.title])]);
  if (signature === history_.drawn) return;
  history_.drawn = signature;
  const days = Map.groupBy ? Map.groupBy(shown, (row) => dayOf(row.updated_at)) : new Map([["Chats", shown]]);
  const focused = document.activeElement?.closest?.("#penstock-history li")?.dataset.id;
  const sections = [...days].flatMap(([day, members]) =>
    [el("h3", {}, day), el("ul", { "aria-label": day }, ...members.map(itemOf))]);
  const empty = history_.words ? "No chat has these words." : "Your chats stay in this browser.";
  root.querySelector(".list").replaceChildren(...(sections.length ? sections : [el("p", { class: "empty" }, empty)]));
  if (focused) root.querySelector(`li[data-id="${CSS.escape(focused)}"] .open`)?.focus();
}

async function search(text) {
  history_.words = text.trim();
  const matching = history_.words ? await store.matching(history_.words) : null;
  if (history_.words !== text.trim()) return; // typed on since
  history_.matching = matching;
  refreshHistory();
}

function openMenu(button, row) {
  const menu = byId("penstock-menu") ?? document.body.appendChild(el("div", { id: "penstock-menu", popover: "auto", role: "menu" }));
  const item = (name, run) =>
    el("button", { type: "button", role: "menuitem", onclick: () => (menu.hidePopover(), run(row)) }, name);
  menu.replaceChildren(item("Rename", rename), item("Export as Markdown", exportMarkdown), item("Export as JSON", exportJson),
    item("Delete", (one) => removeAll([one.id], "Chat deleted.")));
  menu.onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...menu.children];
    items.at((items.indexOf(document.activeElement) + step) % items.length).focus();
  };
  menu.showPopover();
  const place = button.getBoundingClientRect();
  menu.style.top = `${Math.min(place.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
  menu.style.left = `${Math.max(8, Math.min(place.right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8))}px`;
  menu.firstChild.focus();
}

function rename(row) {
  const item = history_.root.querySelector(`li[data-id="${CSS.escape(row.id)}"]`);
  const box = el("input", { "aria-label": "New title", value: row.title, maxlength: 200 });
  const end = async (isKept) => {
    if (!box.isConnected) return;
    const title = box.value.trim();
    const conversation = row.id === page.conversation.id ? page.conversation : await store.read(row.id);
    history_.drawn = "";
    if (!isKept || !title || !conversation || title === row.title) return refreshHistory();
    const renamed = { ...conversation, title };
    if (row.id === page.conversation.id) become(renamed, false);
    save(renamed);
  };
  box.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter" || event.key === "Escape") end(event.key === "Enter");
  });
  box.addEventListener("blur", () => end(true));
  item.replaceChildren(box);
  box.select();
}

// Deleted at once, and put back by "Undo" for ten seconds: nobody is asked first.
async function removeAll(ids, text) {
  const removed = [];
  for (const id of ids) removed.push(await store.read(id));
  await store.remove(ids);
  ids.forEach((id) => drafts.forget(id));
  tabs.postMessage({ removed: ids });
  if (ids.includes(page.conversation.id)) fresh();
  await refreshHistory();
  const restore = async () => {
    for (const conversation of removed.filter(Boolean)) await save(conversation);
  };
  notify(text, { name: "Undo", run: restore });
}

async function removeEverything() {
  const ids = (await store.titles()).map((row) => row.id);
  if (ids.length && confirm(`Delete all ${ids.length} chats of this browser?`)) removeAll(ids, `${ids.length} chats deleted.`);
}

function download(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function fileName(title, ending) {
  const words = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60);
  return `${words || "chat"}.${ending}`;
}

// One writer of Markdown and one judge of files, on the server: Python reads what Python wrote.
async function askServer(route, body) {
  const answer = await fetch(new URL(route, document.baseURI), { method: "POST", body });
  if (answer.ok) return answer.text();
  const problem = await answer.json().catch(() => ({}));
  throw new Error([problem.message ?? `the server said ${answer.status}`, problem.hint].filter(Boolean).join(". "));
}

async function exportMarkdown(row) {
  try {
    const text = await askServer("markdown", JSON.stringify(await store.read(row.id)));
    download(fileName(row.title, "md"), "text/markdown", text);
  } catch (error) {
    notify(`Could not export: ${error.message}`);
  }
}

async function exportJson(row) {
  download(fileName(row.title, "json"), "application/json", JSON.stringify(await store.read(row.id)));
}

async function exportAll() {
  const all = [];
  await store.each((conversation) => all.push(conversation));
  download(`chats-${new Date().toLocaleDateString("sv")}.json`, "application/json", JSON.stringify(all));
}

async function importFile(file) {
  if (!file) return;
  try {
    const conversations = JSON.parse(await askServer("import", file));
    const before = new Map((await store.titles()).map((row) => [row.id, row.updated_at]));
    const others = conversations.filter((one) => before.get(one.id) !== one.updated_at);
    for (const one of others) if (!(await save(before.has(one.id) ? { ...one, id: newConversation().id } : one))) return;
    const there = conversations.length - others.length;
    notify(`${others.length} imported${there ? `, ${there} already here` : ""}.`);
  } catch (error) {
    notify(`Could not import ${file.name}: ${error.message}`);
  }
}

function sidebar() {
  return history_.root?.closest(".sidebar");
}

function toggleSidebar() {
  sidebar()?.querySelector(".toggle-button")?.click();
}

function focusSearch() {
  if (!sidebar()?.classList.contains("open")) toggleSidebar();
  history_.root?.querySelector("input[type=search]").focus();
}

// On a phone the list covers the chat.
function closeOnPhone() {
  if (matchMedia("(max-width: 768px)").matches && sidebar()?.classList.contains("open")) toggleSidebar();
}

whenThere("#penstock-history", (root) => {
  const button = (name, run, attributes) => el("button", { type: "button", onclick: run, ...attributes }, name);
  const file = el("input", { type: "file", accept: ".json,.md,application/json,text/markdown", hidden: true, "aria-label": "File of chats",
    onchange: () => (importFile(file.files[0]), (file.value = "")) });
  history_.root = root;
  history_.drawn = "";
  root.replaceChildren(
    button("New chat", () => (fresh(), closeOnPhone()), { class: "new" }),
    el("input", { type: "search", placeholder: "Search chats", "aria-label": "Search chats",
      oninput: (event) => search(event.target.value) }),
    el("nav", { class: "list", "aria-label": "Chats" }),
    el("div", { class: "foot" }, button("Import", () => file.click()), button("Export all", exportAll),
      button("Delete all", removeEverything), button("?", showKeys, { "aria-label": "Keyboard shortcuts" }), file));
  const logOut = byId("penstock-logout");
  if (logOut) root.querySelector(".foot").prepend(logOut);
  ready.then(refreshHistory);
  closeOnPhone();
});
