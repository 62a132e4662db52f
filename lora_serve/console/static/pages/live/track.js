/** @file One request as the page has seen it. */

import { Cells } from "./cells.js";
import { QUEUED } from "./types.js";

/** @typedef {import("./types.js").RequestInfo} RequestInfo @typedef {import("./types.js").State} State */

/** The key under which rows without an adapter have their colour. */
export const BASE = "base";

/** One request: its states and steps over time, and the lanes in which it is shown. */
export class Track {
  /** @param {string} id @param {string} replica */
  constructor(id, replica) {
    this.id = id;
    this.replica = replica;
    this.info = /** @type {RequestInfo | null} */ (null); // the last that was said of it
    this.cells = new Cells();
    this.changes = /** @type {{time: number, state: State}[]} */ ([]);
    this.isWhole = false; // it was watched from its arrival on
    this.seen = -Infinity; // time of the last frame that named it
    this.end = Infinity; // when it left the batch or the queue for good
    this.lane = -1; // among the rows of the batch
    this.place = -1; // in the queue
  }

  /** The digest that gives the lane its colour. */
  get digest() {
    return this.info?.adapters[0]?.digest ?? BASE;
  }

  /** When it was first in sight. */
  get start() {
    return this.changes[0]?.time ?? this.cells.firstStart;
  }

  /** When it left the queue: the start of its first step, else its end. */
  get queueEnd() {
    return Math.min(this.cells.firstStart, this.end);
  }

  /**
   * The state at a time; null before it was seen and after it ended.
   * @param {number} time @returns {State | null}
   */
  stateAt(time) {
    if (time > this.end) return null;
    const change = this.changes.findLast((one) => one.time <= time);
    if (change && QUEUED.has(change.state) && time >= this.cells.firstStart) return "running";
    if (!change || change.state === "finished") return time >= this.cells.firstStart ? "running" : null;
    return change.state;
  }

  /**
   * The stretches of time in one of `states`, no later than `until`.
   * @param {(state: State) => boolean} wanted @param {number} until
   * @returns {{from: number, to: number, state: State}[]}
   */
  stretches(wanted, until) {
    const last = Math.min(this.end, until);
    return this.changes.flatMap(({ time, state }, index) => {
      const to = Math.min(this.changes[index + 1]?.time ?? last, last);
      return wanted(state) && to > time ? [{ from: time, to, state }] : [];
    });
  }

  /**
   * Takes in what a frame of `time` says; `since`: when the page began to listen.
   * @param {RequestInfo} info @param {number} time @param {number} since
   */
  tell(info, time, since) {
    if (!this.info) this.isWhole = info.arrived >= since;
    if (!this.changes.length && !QUEUED.has(info.state)) {
      this.changes.push({ time: Math.min(info.arrived, time), state: "waiting" }); // and nobody saw for what
    }
    if (info.state !== this.changes.at(-1)?.state) {
      this.changes.push({ time: this.changes.length ? time : Math.min(info.arrived, time), state: info.state });
    }
    this.info = info;
    this.seen = time;
  }
}
