// Keyboard shortcuts, and the list of them under "?".

const isMac = /Mac|iPhone|iPad/.test(navigator.platform);
const KEYS = [
  ["Enter", "Send"],
  ["Shift+Enter", "New line"],
  ["Esc", "Stop the answer"],
  ["Ctrl+Shift+O", "New chat"],
  ["Ctrl+K", "Search chats"],
  ["Ctrl+B", "Show or hide the chats"],
  ["?", "This list"],
];

function showKeys() {
  let dialog = byId("penstock-keys");
  if (!dialog) {
    const rows = KEYS.map(([keys, what]) => {
      const names = isMac ? keys.replace("Ctrl", "⌘") : keys;
      return el("div", {}, el("dt", {}, what), el("dd", {}, ...names.split("+").map((name) => el("kbd", {}, name))));
    });
    dialog = el("dialog", { id: "penstock-keys", "aria-labelledby": "penstock-keys-title" },
      el("h2", { id: "penstock-keys-title" }, "Keyboard shortcuts"), el("dl", {}, ...rows),
      el("form", { method: "dialog" }, el("button", {}, "Close")));
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    document.body.append(dialog);
  }
  dialog.showModal();
}

function isTyping(target) {
  return Boolean(target.closest?.("input, textarea, select, [contenteditable=true], dialog, [popover]"));
}

document.addEventListener("keydown", (event) => {
  // Enter that ends a word of an input method is no message.
  if (event.key === "Enter" && event.isComposing) return event.stopImmediatePropagation();
  const command = isMac ? event.metaKey : event.ctrlKey;
  const key = event.key.toLowerCase();
  const run =
    command && event.shiftKey && key === "o" ? fresh
    : command && !event.shiftKey && key === "k" ? focusSearch
    : command && !event.shiftKey && key === "b" ? toggleSidebar
    : key === "?" && !command && !isTyping(event.target) ? showKeys
    : key === "escape" && isBusy() && !document.querySelector("dialog[open], :popover-open") ? stopAnswer
    : null;
  if (!run) return;
  event.preventDefault();
  event.stopPropagation();
  run();
}, true);

function press(id) {
  const node = byId(id);
  (node.matches("button") ? node : node.querySelector("button"))?.click();
}

function stopAnswer() {
  press("penstock-stop");
}
