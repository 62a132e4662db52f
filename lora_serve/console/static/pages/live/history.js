/** @file The last minutes as the stream told them: frames folded into requests, lanes and steps. Knows no page. */

import { Lanes } from "./lanes.js";
import { Steps } from "./steps.js";
import { Track } from "./track.js";
import { KINDS, QUEUED } from "./types.js";

/** @typedef {import("./types.js").Frame} Frame @typedef {import("./types.js").Step} Step */
/** @typedef {import("./types.js").Move} Move @typedef {import("./types.js").Hello} Hello */

/** Seconds that are kept and can be scrubbed through. */
export const KEPT_SECONDS = 120;

/** Seconds that are kept at most while the page is paused. */
const HELD_SECONDS = 600;

/** @param {Track} track */
const runStart = (track) => track.cells.firstStart;
/** @param {Track} track */
const queueStart = (track) => track.start;

/** The last minutes of one server. */
export class History {
  constructor() {
    this.hello = /** @type {Hello | null} */ (null);
    this.missingFrames = 0;
    this.frames = /** @type {Frame[]} */ ([]); // without their steps; what a frame left out is the last known
    this.tracks = /** @type {Map<string, Track>} */ (new Map());
    this.batches = /** @type {Map<string, Lanes>} */ (new Map()); // by replica
    this.steps = /** @type {Map<string, Steps>} */ (new Map()); // by replica
    this.queue = new Lanes((track) => track.queueEnd);
    this.moves = /** @type {(Move & {time: number})[]} */ ([]);
    this.lastNumber = 0; // of the last frame of this stream
    this.since = Infinity; // when this stream began
    this.heldFrom = Infinity; // nothing after this is forgotten, up to HELD_SECONDS
  }

  /** The last frame, null before the first. */
  get latest() {
    return this.frames.at(-1) ?? null;
  }

  /** The time of the last frame; 0 before the first. */
  get now() {
    return this.latest?.time ?? 0;
  }

  /** True if the frames hold what belongs to one tenant, and no more. */
  get isScoped() {
    return typeof this.hello?.scope === "string";
  }

  /** Steps that ran and were never heard of. */
  get missing() {
    return [...this.steps.values()].reduce((sum, steps) => sum + steps.missing, 0);
  }

  /** The replicas' names, sorted; one empty name without a fleet. */
  get replicas() {
    return [...this.batches.keys()].sort();
  }

  /**
   * Takes in what comes before the frames of a stream; true if the server was started again since the last one.
   * @param {Hello} hello
   */
  greet(hello) {
    const isRestart = this.hello !== null && hello.started !== this.hello.started;
    this.hello = hello;
    this.lastNumber = 0;
    for (const steps of this.steps.values()) steps.wasAway = true;
    return isRestart;
  }

  /**
   * Takes in one frame.
   * @param {Frame} frame
   */
  fold(frame) {
    if (!this.lastNumber) this.since = frame.time;
    for (const request of frame.requests) {
      const track = this.#track(request.id, request.replica);
      track.tell(request, frame.time, this.since);
      this.#group(request.replica);
    }
    const steps = withRows(frame.steps);
    this.#endFinished(frame, steps);
    for (const step of steps) this.#foldStep(step);
    const isWhole = frame.num_waiting <= frame.requests.filter((one) => QUEUED.has(one.state)).length;
    for (const track of this.tracks.values()) this.#settle(track, frame.time, isWhole);
    for (const move of frame.moves ?? []) this.moves.push({ ...move, time: frame.time });
    this.#keep(frame);
    this.#forget();
  }

  /**
   * The frame that was the last one at a time.
   * @param {number} time @returns {Frame | null}
   */
  frameAt(time) {
    return this.frames.findLast((frame) => frame.time <= time) ?? this.frames[0] ?? null;
  }

  /**
   * The request in a lane of a replica's batch at a time.
   * @param {string} replica @param {number} lane @param {number} time
   */
  runningIn(replica, lane, time) {
    return this.batches.get(replica)?.at(lane, time, runStart) ?? null;
  }

  /**
   * The request at a place of the queue at a time.
   * @param {number} place @param {number} time
   */
  queuedIn(place, time) {
    return this.queue.at(place, time, queueStart);
  }

  /**
   * How many lanes a replica's batch needs to show two times and what is between.
   * @param {string} replica @param {number} from @param {number} to
   */
  numLanes(replica, from, to) {
    return this.batches.get(replica)?.countBetween(from, to, runStart) ?? 0;
  }

  /**
   * The same for the queue.
   * @param {number} from @param {number} to
   */
  numPlaces(from, to) {
    return this.queue.countBetween(from, to, queueStart);
  }

  /** @param {string} id @param {string} replica */
  #track(id, replica) {
    const known = this.tracks.get(id);
    if (known) return known;
    const track = new Track(id, replica);
    this.tracks.set(id, track);
    return track;
  }

  /** @param {string} replica */
  #group(replica) {
    if (!this.batches.has(replica)) {
      this.batches.set(replica, new Lanes((track) => track.end));
      this.steps.set(replica, new Steps(this.isScoped));
    }
    return {
      batch: /** @type {Lanes} */ (this.batches.get(replica)),
      steps: /** @type {Steps} */ (this.steps.get(replica)),
    };
  }

  /**
   * Ends those that the frame calls finished, with their last row: their lanes are free for others from then on.
   * @param {Frame} frame @param {Step[]} steps
   */
  #endFinished(frame, steps) {
    const lastRows = new Map();
    for (const step of steps) for (const [id] of step.rows) lastRows.set(id, step.time);
    for (const { id, state } of frame.requests) {
      const track = this.tracks.get(id);
      if (!track || state !== "finished") continue;
      const last = lastRows.get(id) ?? track.cells.lastEnd;
      track.end = Number.isFinite(last) ? last : frame.time;
    }
  }

  /** @param {Step} step */
  #foldStep(step) {
    const { batch, steps } = this.#group(step.replica);
    if (!steps.add(step)) return;
    const start = step.time - step.ms / 1000;
    const most = Math.max(1, ...step.rows.map((row) => row[2]));
    for (const [id, kind, tokens] of step.rows) {
      const track = this.#track(id, step.replica);
      track.cells.push(step.time, step.number, step.ms, tokens, KINDS.indexOf(kind), tokens / most);
      if (track.end < step.time) track.end = Infinity; // a frame in between was lost
      if (track.lane < 0) track.lane = batch.add(track, start);
    }
  }

  /**
   * Gives a request that waits a place in the queue, and ends one that the frame no longer names. A frame names the
   * first of the queue only: one that never ran may still be there unless the frame `isWhole`.
   * @param {Track} track @param {number} time @param {boolean} isWhole
   */
  #settle(track, time, isWhole) {
    if (track.end !== Infinity) return;
    const state = track.changes.at(-1)?.state;
    if (track.seen < time) {
      if (isWhole || track.cells.length) track.end = Math.max(track.cells.lastEnd, track.seen);
    } else if (track.lane < 0 && track.place < 0 && state && QUEUED.has(state)) {
      track.place = this.queue.add(track, track.start);
    }
  }

  /** @param {Frame} frame */
  #keep(frame) {
    const before = this.latest;
    if (this.lastNumber && frame.number > this.lastNumber + 1) this.missingFrames += frame.number - this.lastNumber - 1;
    this.lastNumber = frame.number;
    this.frames.push({ ...frame, tiers: frame.tiers ?? before?.tiers, steps: [], moves: [] });
  }

  #forget() {
    const from = Math.max(Math.min(this.now - KEPT_SECONDS, this.heldFrom), this.now - HELD_SECONDS);
    const first = this.frames.findIndex((frame) => frame.time >= from);
    if (first > 16) this.frames.splice(0, first);
    if (first > 16 || this.frames.length % 16 === 0) this.#forgetBefore(from);
  }

  /** @param {number} from */
  #forgetBefore(from) {
    for (const [id, track] of this.tracks) {
      if (track.end < from) this.tracks.delete(id);
      else track.cells.forget(from);
    }
    for (const lanes of [this.queue, ...this.batches.values()]) lanes.forget(from);
    for (const steps of this.steps.values()) steps.forget(from);
    this.moves = this.moves.filter((move) => move.time >= from);
  }
}

/**
 * The steps of a frame, each with its rows: the stream leaves out those that are as in the replica's step before.
 * @param {import("./types.js").ToldStep[]} steps @returns {Step[]}
 */
function withRows(steps) {
  const last = /** @type {Map<string, Step["rows"]>} */ (new Map());
  return steps.map((step) => {
    const rows = step.rows ?? last.get(step.replica) ?? [];
    last.set(step.replica, rows);
    return { ...step, rows };
  });
}
