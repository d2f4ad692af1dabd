"use strict";
// Where the numbers come from: the key, the stream of snapshots, and the rows of the last hour.

const HISTORY_S = 3600;
const SILENCE_MS = 15000; // the gateway writes every second
const FIRST_MS = 8000; // a proxy that holds streams back: ask for single snapshots instead
const POLL_MS = 2000;
const LONGEST_WAIT_MS = 30000;
const LARGEST_EVENT = 2 ** 25;

const HERE = location.pathname.replace(/\/+$/, ""); // a proxy may have put a prefix before it, or a slash behind
const LIVE = `${HERE}/live`;
const METRICS = HERE.replace(/\/[^/]*$/, "/metrics");
const KEY_NAME = `penstock-key:${HERE}`; // several deployments may share a host

// The key that the address came with, or that this tab keeps.
function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key) {
    keepKey(key);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return key || stored((storage) => storage.getItem(KEY_NAME));
}

function keepKey(key) {
  stored((storage) => (key ? storage.setItem(KEY_NAME, key) : storage.removeItem(KEY_NAME)));
}

function stored(action) {
  try {
    return action(sessionStorage);
  } catch {
    return null; // a browser without cookies has no storage either
  }
}

class KeyNeeded extends Error {}
class Refused extends Error {}

async function ask(url, key, signal) {
  // A proxy in front, that of a Cloudera AI workbench, takes a bearer token for one of its own.
  const headers = key ? { "x-api-key": key } : {};
  const response = await fetch(url, { headers, signal, cache: "no-store" });
  if (response.status === 401 || response.status === 403) throw new KeyNeeded(key ? "refused" : "missing");
  if (!response.ok) throw new Refused(`the gateway answered ${response.status}`);
  return response;
}

// Calls `on(name, data)` for each event of a stream until it ends.
async function readEvents(response, on) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (rest.length > LARGEST_EVENT) throw new Error("the gateway sent an event without end");
    for (const event of events) {
      const fields = new Map(event.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      on(fields.get("event"), fields.has("data") ? JSON.parse(fields.get("data")) : null);
    }
  }
}

// Follows a gateway while it is open. `on` has: history, snapshot, state(name, text).
class Live {
  constructor(on) {
    this.on = on;
    this.key = takeKey();
    this.isOpen = false;
    this.polls = false;
    this.failures = 0;
  }

  open() {
    if (this.isOpen) return;
    this.isOpen = true;
    this.failures = 0;
    this.connect();
  }

  close() {
    this.isOpen = false;
    this.abort?.abort();
    clearTimeout(this.timer);
  }

  useKey(key) {
    keepKey((this.key = key));
    this.close();
    this.open();
  }

  async connect() {
    const abort = (this.abort = new AbortController());
    let silence = 0;
    let problem = "connection lost";
    const heard = (ms) => {
      clearTimeout(silence);
      silence = setTimeout(() => abort.abort(), ms);
    };
    let isHeard = false;
    const hear = (name, data) => {
      heard(SILENCE_MS);
      if (abort.signal.aborted || data === null) return;
      if (name === "history") this.on.history(data);
      if (name === "snapshot") {
        isHeard = true;
        this.failures = 0;
        this.on.state("live", "live");
        this.on.snapshot(data);
      }
    };
    try {
      heard(this.polls ? SILENCE_MS : FIRST_MS);
      const response = await ask(this.polls ? `${LIVE}?once` : LIVE, this.key, abort.signal);
      if (this.polls) hear("snapshot", await response.json());
      else await readEvents(response, hear);
    } catch (error) {
      if (error instanceof KeyNeeded && abort === this.abort && this.isOpen) {
        clearTimeout(silence);
        this.close();
        keepKey(null);
        this.on.state("key", error.message);
        return;
      }
      if (error instanceof Refused) problem = error.message;
      this.polls = error.name === "AbortError" && !isHeard && !this.polls;
    }
    clearTimeout(silence);
    if (abort !== this.abort || !this.isOpen) return;
    if (this.polls && isHeard) {
      this.timer = setTimeout(() => this.connect(), POLL_MS);
      return;
    }
    const wait = Math.min(LONGEST_WAIT_MS, 1000 * 2 ** this.failures++) * (0.75 + Math.random() / 4);
    this.on.state("lost", `${problem}, trying again in ${Math.ceil(wait / 1000)} s`);
    this.timer = setTimeout(() => this.connect(), wait);
  }
}

// The rows of the last hour, oldest first: what the gateway kept, then one each period; the last follows each snapshot.
class Hour {
  constructor() {
    this.rows = [];
    this.period_s = 5;
  }

  take(history) {
    const names = Object.keys(history.columns);
    const rows = (history.columns.at ?? []).map((_, i) => Object.fromEntries(names.map((n) => [n, history.columns[n][i]])));
    this.period_s = history.period_s;
    const begin = rows.length ? rows[0].at : Infinity; // a new gateway knows less than this page
    this.rows = [...this.rows.filter((row) => row.at < begin), ...rows];
    this.bound();
  }

  add(row) {
    const rows = this.rows;
    while (rows.length && rows[rows.length - 1].at >= row.at) rows.pop(); // the clock was set back
    if (rows.length > 1 && rows[rows.length - 1].at < rows[rows.length - 2].at + this.period_s) rows.pop();
    rows.push(row);
    this.bound();
  }

  bound() {
    const rows = this.rows;
    const end = rows.length ? rows[rows.length - 1].at : 0;
    const first = rows.findIndex((row) => row.at >= end - HISTORY_S);
    rows.splice(0, Math.max(first, rows.length - Math.ceil(HISTORY_S / this.period_s) - 2));
  }

  // [from, to] in Unix seconds: the hour, or what is known of it.
  span() {
    const to = this.rows.length ? this.rows[this.rows.length - 1].at : 0;
    const known = this.rows.length ? to - this.rows[0].at : 0;
    return [to - Math.min(HISTORY_S, Math.max(known, 120)), to];
  }

  column(field) {
    return this.rows.map((row) => row[field] ?? null);
  }
}
