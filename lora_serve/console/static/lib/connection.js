/**
 * Whether the server answers: told by every call, and asked about while it does not. When a lost one answers again, the
 * window gets the event "serverback": whoever shows its data fetches it anew.
 */

import { useChanges } from "./changes.js";

const AGAIN_MS = 1000;

/** The state of one server: "up", "lost", and "back" for some seconds after it was lost. */
export class Connection {
  /** @type {"up"|"lost"|"back"} */
  state = "up";
  /** @type {Set<() => void>} */
  #listeners = new Set();
  #timer = 0;

  /** @param {URL|string} base  Of the API. */
  constructor(base) {
    this.base = new URL(base);
  }

  /** Notes how a call went. @param {boolean} isReached */
  note(isReached) {
    if (isReached && this.state === "lost") this.#back();
    if (isReached || this.state === "lost") return;
    this.#set("lost");
    this.#askLater();
  }

  /** Calls `listener` at every change; the result stops that. @param {() => void} listener */
  listen(listener) {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  #askLater() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(async () => {
      if (this.state !== "lost") return;
      try {
        const response = await fetch(new URL("ready", this.base), { cache: "no-store", credentials: "omit" });
        if (response.ok) this.#back();
      } catch {
        // it is still away
      }
      if (this.state === "lost") this.#askLater();
    }, AGAIN_MS);
  }

  #back() {
    this.#set("back");
    dispatchEvent(new Event("serverback"));
    setTimeout(() => this.state === "back" && this.#set("up"), 4000);
  }

  /** @param {"up"|"lost"|"back"} state */
  #set(state) {
    this.state = state;
    for (const listener of this.#listeners) listener();
  }
}

/** The connection's state, kept up to date. @param {Connection} connection */
export function useConnection(connection) {
  useChanges(connection);
  return connection;
}
