// Conversations in this browser. Two stores: "conversations" (as the server writes them) and "titles" (what a list
// shows). A tab that saves over what another tab saved since joins both: turns are never edited, so that the union of
// two trees loses nothing. Where the browser keeps nothing (private windows), memory serves until the tab closes.

const STORES = ["conversations", "titles"];

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function finished(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new DOMException("aborted", "AbortError"));
  });
}

function titleOf(conversation) {
  return conversation.title || "New chat";
}

function hasText(conversation, words) {
  const texts = [conversation.title, ...Object.values(conversation.turns).map((turn) => turn.text ?? "")];
  const all = texts.join("\n").toLowerCase();
  return words.every((word) => all.includes(word));
}

function joined(ours, theirs) {
  const leaf = ours.leaf ?? theirs.leaf;
  return { ...ours, turns: { ...theirs.turns, ...ours.turns }, leaf };
}

class Store {
  constructor() {
    this.seen = new Map(); // the revision of each conversation that this tab has read or written
    this.memory = null;
    this.queue = Promise.resolve();
    this.opening = this.open();
  }

  async open() {
    try {
      const request = indexedDB.open("penstock", 1);
      request.onupgradeneeded = () => STORES.forEach((name) => request.result.createObjectStore(name, { keyPath: "id" }));
      const database = await done(request);
      database.onversionchange = () => database.close();
      return database;
    } catch {
      this.memory = new Map();
      return null;
    }
  }

  // Newest first: {id, title, updated_at, revision}.
  async titles() {
    const database = await this.opening;
    const rows = this.memory
      ? [...this.memory.values()].map(({ title }) => title)
      : await done(database.transaction("titles").objectStore("titles").getAll());
    return rows.sort((a, b) => (a.updated_at < b.updated_at ? 1 : -1));
  }

  async read(id) {
    const database = await this.opening;
    if (this.memory) return this.memory.get(id)?.conversation ?? null;
    const transaction = database.transaction(STORES);
    const [row, title] = await Promise.all([
      done(transaction.objectStore("conversations").get(id)),
      done(transaction.objectStore("titles").get(id)),
    ]);
    if (row) this.seen.set(id, title?.revision);
    return row ?? null;
  }

  // Each conversation to `look`, without holding all in memory.
  async each(look) {
    const database = await this.opening;
    if (this.memory) return [...this.memory.values()].forEach(({ conversation }) => look(conversation));
    return new Promise((resolve, reject) => {
      const request = database.transaction("conversations").objectStore("conversations").openCursor();
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) return resolve();
        look(cursor.value);
        cursor.continue();
      };
    });
  }

  async matching(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const ids = new Set();
    await this.each((conversation) => hasText(conversation, words) && ids.add(conversation.id));
    return ids;
  }

  // One write after another. Gives what is stored now: more than was given where another tab wrote too.
  save(conversation) {
    return this.next(() => this.write(conversation));
  }

  remove(ids) {
    return this.next(async () => {
      const database = await this.opening;
      if (this.memory) return ids.forEach((id) => this.memory.delete(id));
      const transaction = database.transaction(STORES, "readwrite");
      for (const name of STORES) ids.forEach((id) => transaction.objectStore(name).delete(id));
      return finished(transaction);
    });
  }

  next(work) {
    const result = this.queue.then(work);
    this.queue = result.catch(() => {});
    return result;
  }

  async write(given) {
    const database = await this.opening;
    const revision = crypto.getRandomValues(new Uint32Array(2)).join("-");
    const rowOf = (conversation) =>
      ({ id: conversation.id, title: titleOf(conversation), updated_at: conversation.updated_at, revision });
    if (this.memory) {
      this.memory.set(given.id, { conversation: given, title: rowOf(given) });
      return given;
    }
    const transaction = database.transaction(STORES, "readwrite");
    const ended = finished(transaction);
    const [conversations, titles] = STORES.map((name) => transaction.objectStore(name));
    const before = await done(titles.get(given.id));
    const isNews = before !== undefined && before.revision !== this.seen.get(given.id);
    const stored = isNews ? joined(given, await done(conversations.get(given.id))) : given;
    conversations.put(stored);
    titles.put(rowOf(stored));
    await ended;
    this.seen.set(given.id, revision);
    return stored;
  }
}
