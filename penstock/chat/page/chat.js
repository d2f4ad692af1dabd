// What the buttons below questions and answers do, and what each event of the chat gets from this tab.
// The server reads an order ({act, turn}) with the conversation: penstock.orders() gives both.

const chat = { order: null, editing: null, tries: 0 };

function messageBox() {
  return document.querySelector("#penstock-message textarea");
}

function fill(text) {
  const box = messageBox();
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

function obey(act, turn) {
  chat.order = { act, turn };
  document.querySelector("#penstock-act")?.click();
}

function turnOf(id) {
  return JSON.parse(window.penstock.current()).turns[id];
}

function beginEdit(id) {
  if (!chat.editing) chat.editing = { draft: messageBox().value };
  chat.editing.turn = id;
  document.body.classList.add("penstock-editing");
  fill(turnOf(id)?.text ?? "");
  messageBox().focus();
}

function endEdit() {
  if (!chat.editing) return;
  const { draft } = chat.editing;
  chat.editing = null;
  document.body.classList.remove("penstock-editing");
  return draft;
}

async function copy(button, id) {
  const text = turnOf(id)?.text ?? "";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages without TLS beyond this machine have no clipboard.
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const label = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = label), 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.(".penstock-foot button[data-act]");
  // What a model wrote lies in .md; nothing there is a button of ours.
  if (!button || button.closest(".md")) return;
  const { act, turn } = button.dataset;
  if (act === "copy") copy(button, turn);
  else if (act === "edit") beginEdit(turn);
  else if (!document.body.classList.contains("penstock-busy")) obey(act, turn);
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !chat.editing) return;
  fill(endEdit() ?? "");
  event.preventDefault();
});

// An overloaded server said when to come again: a countdown, then the question is asked again, five times at most.
setInterval(() => {
  for (const button of document.querySelectorAll(".penstock-foot button[data-in]")) {
    if (chat.tries >= 5) continue;
    button.dataset.at ??= Date.now() + 1000 * Number(button.dataset.in);
    const left = Math.ceil((button.dataset.at - Date.now()) / 1000);
    button.textContent = left > 0 ? `Ask again in ${left} s` : "Ask again";
    if (left <= 0 && !document.body.classList.contains("penstock-busy") && !document.hidden) {
      chat.tries += 1;
      button.removeAttribute("data-in");
      button.click();
    }
  }
}, 250);

window.penstockChat = {
  // For the `js` of the event that answers: the conversation and the order, before the values of the other inputs.
  orders(_conversation, _order, ...rest) {
    const editing = chat.editing?.turn;
    const order = chat.order ?? (editing ? { act: "edit", turn: editing } : { act: "ask" });
    if (!chat.order) chat.tries = 0;
    if (order.act === "edit") endEdit();
    chat.order = null;
    document.body.classList.add("penstock-busy");
    return [window.penstock.current(), JSON.stringify(order), ...rest];
  },
  ended() {
    document.body.classList.remove("penstock-busy");
  },
  current: (_conversation, ...rest) => [window.penstock.current(), ...rest],
};
