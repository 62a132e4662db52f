/** @file The stream of frames: read, folded into a history, and read again after it broke off. */

import { ApiError } from "../../lib/api.js";
import { TEXTS } from "../../texts.js";
import { Clock } from "./clock.js";
import { History } from "./history.js";

/** @typedef {import("./types.js").Frame} Frame @typedef {import("../../lib/api.js").Api} Api */

/**
 * @typedef {"connecting" | "live" | "lost" | "refused" | "asleep"} Status
 * lost: it broke off and is tried again; refused: the server said no, and trying again does not help; asleep: nobody
 * has looked at the page for a while.
 * @typedef {{seconds: number, isRestart: boolean}} Outage one that is over
 */

const PATH = "admin/engine/stream";
const RATE = 5; // frames per second
const FRAME_DELAY = 0.15; // seconds that a frame may be late beyond its turn
const FIRST_PAUSE = 0.4; // seconds before the first new try; each further one takes twice as long
const LONGEST_PAUSE = 5;
const SLEEP_AFTER_MS = 30_000;
const SILENCE_MS = 20_000; // after 15 s without a frame there comes a comment
const CLOCK_JUMP = 5; // seconds back: another machine's clock

/** Reads the stream while it is open, and keeps what it read. */
export class Feed {
  /** @param {Api} api */
  constructor(api) {
    this.api = api;
    this.onFold = (/** @type {number} */ _from) => {}; // told since when the history changed
    this.history = new History();
    this.clock = new Clock(1 / RATE + FRAME_DELAY);
    this.status = /** @type {Status} */ ("connecting");
    this.reason = ""; // why it broke off, in the server's words
    this.outage = /** @type {Outage | null} */ (null);
    this.onChange = () => {};
    this.pause = FIRST_PAUSE;
    this.lostAt = 0; // milliseconds; 0: it is not lost
    this.isRestart = false; // since the stream before this one
    this.reading = new AbortController();
    this.wake = () => {};
    this.silence = /** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined);
  }

  /**
   * Reads until the result is called, or until the server refuses.
   * @param {() => void} onChange called at each change
   */
  open(onChange) {
    const closed = new AbortController();
    let timer = /** @type {ReturnType<typeof setTimeout> | undefined} */ (undefined);
    const look = () => {
      clearTimeout(timer);
      if (document.hidden) timer = setTimeout(() => this.#sleep(), SLEEP_AFTER_MS);
      else if (this.status === "asleep") this.wake();
    };
    this.onChange = onChange;
    this.status = "connecting";
    document.addEventListener("visibilitychange", look);
    this.#run(closed.signal);
    return () => {
      document.removeEventListener("visibilitychange", look);
      clearTimeout(timer);
      this.onChange = () => {};
      closed.abort();
      this.reading.abort();
      this.wake();
    };
  }

  /** Tries again at once. */
  retry() {
    this.wake();
  }

  /** @param {AbortSignal} closed */
  async #run(closed) {
    while (!closed.aborted) {
      await this.#read(closed);
      if (closed.aborted || this.status === "refused") return;
      await this.#rest();
    }
  }

  /** @param {AbortSignal} closed */
  async #read(closed) {
    const reading = (this.reading = new AbortController());
    try {
      await this.api.stream(PATH, {
        query: { rate: RATE },
        signal: reading.signal,
        onBytes: () => {
          clearTimeout(this.silence);
          this.silence = setTimeout(() => this.#breakOff(), SILENCE_MS);
        },
        onEvent: ({ event, data }) => !reading.signal.aborted && this.#hear(event, data),
      });
      if (!closed.aborted) this.#lose("");
    } catch (error) {
      if (!reading.signal.aborted) this.#fail(error);
    } finally {
      clearTimeout(this.silence);
    }
  }

  /** @param {string} event @param {any} data */
  #hear(event, data) {
    if (event === "hello") {
      this.isRestart = this.history.greet(data);
      this.pause = FIRST_PAUSE;
      this.clock.reset();
    } else if (event === "frame") this.#fold(data);
    else if (event === "bye") this.reason = data.reason;
  }

  /** A server that hangs, and a network that is gone, leave the stream open. */
  #breakOff() {
    this.#lose(TEXTS.live.notice.silent);
    this.reading.abort();
  }

  /** @param {Frame} frame */
  #fold(frame) {
    const before = this.history.now;
    if (frame.time < before - CLOCK_JUMP) this.#startAnew();
    this.history.fold(frame);
    this.clock.hear(frame.time, performance.now() / 1000);
    if (this.status !== "live") this.#rejoin();
    this.onFold(Math.min(before, frame.time) - 1);
    this.onChange();
  }

  #rejoin() {
    if (this.lostAt) this.outage = { seconds: (performance.now() - this.lostAt) / 1000, isRestart: this.isRestart };
    this.lostAt = 0;
    this.status = "live";
    this.reason = "";
  }

  #startAnew() {
    const { hello } = this.history;
    this.history = new History();
    if (hello) this.history.greet(hello);
  }

  /** @param {unknown} error */
  #fail(error) {
    if (this.status === "asleep") return;
    if (!(error instanceof ApiError)) throw error;
    if (error.isLost || error.status === 429 || error.status >= 500) {
      this.pause = error.retryAfter ?? this.pause;
      this.#lose(error.isLost ? "" : error.message);
      return;
    }
    this.status = "refused";
    this.reason = error.message;
    this.onChange();
  }

  /** @param {string} reason */
  #lose(reason) {
    if (this.status === "asleep") return;
    if (!this.lostAt && this.history.latest) this.lostAt = performance.now();
    this.reason = reason || this.reason;
    this.status = "lost";
    this.onChange();
  }

  /** Waits for the next try; asleep, until somebody looks. */
  async #rest() {
    const isAsleep = this.status === "asleep";
    const seconds = this.pause;
    this.pause = Math.min(LONGEST_PAUSE, this.pause * 2);
    await new Promise((/** @type {(value?: undefined) => void} */ resolve) => {
      this.wake = resolve;
      if (!isAsleep) setTimeout(resolve, seconds * 1000);
    });
    if (isAsleep) this.status = "connecting";
  }

  #sleep() {
    if (this.status === "refused") return;
    this.status = "asleep";
    this.reading.abort();
    this.onChange();
  }
}
