/**
 * Who is signed in. The key is in memory, and in sessionStorage only if the person asked for that: it never stands in
 * a URL, a cookie, localStorage or a log.
 *
 * @typedef {"admin"|"tenant-admin"|"inference"|"metrics"|"anonymous"|"none"} Role
 *   anonymous: no key, on a server that asks for none; none: a key is needed first.
 * @typedef {{tenant: string, role: Role, key_id: string, may_use_base: boolean, quota: any, key_quota: any, has_neighbours: boolean}} Caller
 *   As GET /admin/whoami tells it.
 */

import { Api, ApiError } from "./api.js";
import { keep, readKept } from "./storage.js";
import { createContext, useContext } from "../vendor/preact.js";

const STORED = "lora_serve.key:"; // and the path of the API: another server of this origin has keys of its own
const PATIENCE_MS = 10_000; // with a server that takes a call and does not answer

/** The key, its caller, and the API as it may use it. Tells its listeners of every change. */
export class Session {
  #key = "";
  #isChecking = false;
  #stored;
  /** @type {Set<() => void>} */
  #listeners = new Set();

  /** @param {URL|string} base  Of the API. @param {(isReached: boolean) => void} [onReach] */
  constructor(base, onReach) {
    this.#stored = STORED + new URL(base, location.href).pathname;
    /** @type {Caller|null} */
    this.caller = null;
    /** @type {Role} */
    this.role = "none";
    /** Why the last session ended, in words; "" if nobody needs to be told. */
    this.reason = "";
    this.isStarted = false;
    this.api = new Api(base, { headers: () => this.headers(), end: (reason) => this.end(reason) }, onReach);
  }

  /** The caller's tenant; "" without a key. */
  get tenant() {
    return this.caller?.tenant ?? "";
  }

  /** True for the roles that the admin API lets in. */
  get isManaging() {
    return this.role === "admin" || this.role === "tenant-admin";
  }

  /** True if a key is in use. */
  get hasKey() {
    return this.#key !== "";
  }

  /** The headers that carry the key. @returns {Record<string, string>} */
  headers() {
    return this.#key ? { Authorization: `Bearer ${this.#key}` } : {};
  }

  /** Goes on with a key that this tab has kept, else finds out whether one is needed. Raises ApiError: try again. */
  async start() {
    const kept = readKept("sessionStorage", this.#stored);
    try {
      if (kept) await this.signIn(kept, true);
      else await this.#lookAround();
    } catch (error) {
      if (!(error instanceof ApiError) || error.status !== 401) throw error;
      this.reason = error.message;
      await this.#lookAround();
    }
    this.isStarted = true;
    this.#tell();
  }

  /** Signs in with a key. Raises ApiError: 401 for a wrong one, 429 after too many. @param {string} key @param {boolean} isKept */
  async signIn(key, isKept) {
    const asked = new Api(this.api.base, { headers: () => ({ Authorization: `Bearer ${key}` }), end: () => {} }, this.api.onReach);
    let caller;
    try {
      caller = await asked.get("admin/whoami");
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) keep("sessionStorage", this.#stored, null);
      throw error;
    }
    this.#key = key;
    if (isKept) keep("sessionStorage", this.#stored, key);
    else keep("sessionStorage", this.#stored, null);
    this.caller = caller;
    this.role = caller.role;
    this.reason = "";
    this.#tell();
  }

  /** Asks whether the key still opens anything: one that was revoked ends the session, a lost server is noted. */
  async check() {
    if (this.#isChecking) return;
    this.#isChecking = true;
    const key = this.#key;
    try {
      if (key) {
        const caller = await this.api.get("admin/whoami", {}, { signal: AbortSignal.timeout(PATIENCE_MS) });
        if (key === this.#key) this.caller = caller;
      } else await this.#lookAround();
    } catch {
      // the API has told `end` or the connection
    }
    this.#isChecking = false;
  }

  /** Forgets the key. @param {string} [reason]  Shown where one signs in. */
  end(reason = "") {
    const had = this.hasKey;
    this.#key = "";
    keep("sessionStorage", this.#stored, null);
    this.caller = null;
    if (had) this.reason = reason;
    if (had || this.role === "anonymous") {
      this.role = "none";
      this.#lookAround().then(() => this.#tell(), () => {});
    }
    this.#tell();
  }

  /** Calls `listener` at every change; the result stops that. @param {() => void} listener */
  listen(listener) {
    this.#listeners.add(listener);
    return () => void this.#listeners.delete(listener);
  }

  /** A server that asks for no key lets anybody use its models. */
  async #lookAround() {
    const { asks_for_key } = await this.api.get("ui/about.json", {}, { signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!this.hasKey) this.role = asks_for_key ? "none" : "anonymous";
  }

  #tell() {
    for (const listener of this.#listeners) listener();
  }
}

/** @type {import("../vendor/preact.js").Context<Session>} */
export const SessionContext = createContext(/** @type {any} */ (null));

/** The session: `caller`, `role`, `tenant`, `api`, `end(reason)`. */
export function useSession() {
  return useContext(SessionContext);
}

/** The API with the session's key. */
export function useApi() {
  return useContext(SessionContext).api;
}
