/** One column's answer on its way: asked for, streamed, stopped or failed. */

import { Answer } from "./stream.js";
import { parseServerTiming } from "./timing.js";

/** @typedef {import("./types.js").Ask} Ask */
/** @typedef {"waiting" | "streaming" | "done" | "stopped" | "failed"} State */

/** Starts with `start`, tells its listener at most once a frame. */
export class Run {
  /**
   * @param {import("../../lib/api.js").Api} api
   * @param {Ask} ask
   */
  constructor(api, ask) {
    this.answer = new Answer();
    this.ask = ask;
    /** @type {State} */
    this.state = "waiting";
    /** @type {Record<string, number>} */
    this.told = {};
    /** @type {import("./timing.js").Times} */
    this.times = { sent: 0, first: null, last: null, numTokens: 0, numFirst: 0 };
    /** @type {Headers | null} */
    this.headers = null;
    /** @type {Error | null} */
    this.error = null;
    this._api = api;
    this._aborter = new AbortController();
    this._frame = 0;
    this._readAt = 0; // all that comes in one read came at one time
    this._listener = () => {};
  }

  get isOver() {
    return this.state !== "waiting" && this.state !== "streaming";
  }

  /**
   * Tells `listener` of news until the returned function is called.
   * @param {() => void} listener
   */
  listen(listener) {
    this._listener = listener;
    return () => {
      if (this._listener === listener) this._listener = () => {};
    };
  }

  stop() {
    this._aborter.abort();
  }

  /** Asks and reads to the end. Never raises: what went wrong is in `error`. */
  async start() {
    this.times.sent = performance.now();
    const { path, body } = this.ask;
    const { signal } = this._aborter;
    try {
      const onBytes = () => {
        this._readAt = performance.now();
      };
      await this._api.stream(path, { method: "POST", body, signal, onBytes, onOpen: (response) => this._open(response), onEvent: ({ data }) => this._take(data) });
      this.state = this.error ? "failed" : signal.aborted ? "stopped" : "done";
    } catch (error) {
      this.state = signal.aborted ? "stopped" : "failed";
      if (!signal.aborted) this.error = /** @type {Error} */ (error);
    }
    this.answer.end();
    this._tell();
  }

  /** @param {Response} response */
  _open(response) {
    this.state = "streaming";
    this.headers = response.headers;
    this.told = parseServerTiming(response.headers.get("Server-Timing"));
    this._tell();
  }

  /** @param {any} chunk */
  _take(chunk) {
    if (typeof chunk !== "object") return; // [DONE]
    const { numTokens } = this.answer;
    this.answer.add(chunk);
    if (this.answer.error) this.error = new Error(this.answer.error.message);
    const hasNews = this.answer.numTokens > numTokens || chunk.choices?.some((/** @type {any} */ one) => one.text || one.delta?.content);
    if (hasNews) {
      this.times.last = this._readAt;
      this.times.first ??= this._readAt;
    }
    this.times.numTokens = this.answer.usage?.completion_tokens ?? this.answer.numTokens;
    if (this.times.first === this._readAt) this.times.numFirst = this.answer.numTokens;
    this._tell();
  }

  _tell() {
    if (this._frame) return;
    this._frame = requestAnimationFrame(() => {
      this._frame = 0;
      this._listener();
    });
  }
}
