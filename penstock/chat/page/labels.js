// Names and states for screen readers where Gradio has none; a sidebar's button says what it opens.

const NAMES = { bot: "Answer", user: "Question" };
const SIDEBARS = { "penstock-left": "Chats", "penstock-settings": "Settings" };

function labelAll() {
  // The arrow in the title of a fold is a button without a name in a button; it does nothing by itself.
  for (const arrow of document.querySelectorAll(".thought-group .arrow:not([inert])")) arrow.inert = true;
  for (const title of document.querySelectorAll(".thought-group > .title")) {
    const isOpen = String(Boolean(title.nextElementSibling));
    if (title.getAttribute("aria-expanded") !== isOpen) title.setAttribute("aria-expanded", isOpen);
  }
  // Gradio's name of each message is all of its text, at each update of it; ours goes before that one.
  for (const [who, name] of Object.entries(NAMES)) {
    if (!byId(`penstock-name-${who}`)) document.body.append(el("span", { id: `penstock-name-${who}`, hidden: true }, name));
  }
  for (const message of document.querySelectorAll(":is([data-testid=bot], [data-testid=user])[aria-label]:not([role])")) {
    message.setAttribute("role", "group");
    message.setAttribute("aria-labelledby", `penstock-name-${message.dataset.testid}`);
  }
  // Wide code and tables scroll, also for those who have a keyboard only.
  for (const wide of document.querySelectorAll(".md :is(pre, table):not([tabindex])")) wide.tabIndex = 0;
  for (const list of document.querySelectorAll("#penstock-chat .examples[role=list]")) {
    list.setAttribute("role", "group");
    list.setAttribute("aria-label", "Examples");
  }
}

watched.push(labelAll);
for (const [id, name] of Object.entries(SIDEBARS)) {
  whenThere(`#${id} > .toggle-button`, (button) => {
    const label = () => {
      button.setAttribute("aria-label", button.parentNode.classList.contains("open") ? `Close ${name.toLowerCase()}` : name);
      button.setAttribute("aria-expanded", String(button.parentNode.classList.contains("open")));
    };
    label();
    button.title = name;
    new MutationObserver(label).observe(button.parentNode, { attributeFilter: ["class"] });
  });
}
