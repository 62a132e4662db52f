/** @file What one request did in each step, as columns of numbers that grow: no object per cell. */

const FIRST_CAPACITY = 64;

/** One cell per step in which the request had a row, in the order of time. */
export class Cells {
  constructor() {
    this.length = 0;
    this.ends = new Float64Array(FIRST_CAPACITY); // seconds
    this.steps = new Float64Array(FIRST_CAPACITY); // the steps' numbers
    this.ms = new Float32Array(FIRST_CAPACITY);
    this.tokens = new Uint32Array(FIRST_CAPACITY);
    this.kinds = new Uint8Array(FIRST_CAPACITY);
    this.shares = new Float32Array(FIRST_CAPACITY); // of the tokens of the step's largest row
  }

  /**
   * Appends the cell of a step that ended at `end`.
   * @param {number} end @param {number} step @param {number} ms @param {number} tokens @param {number} kind
   * @param {number} share
   */
  push(end, step, ms, tokens, kind, share) {
    if (this.length === this.ends.length) this.#resize(this.length * 2, 0);
    const at = this.length++;
    this.ends[at] = end;
    this.steps[at] = step;
    this.ms[at] = ms;
    this.tokens[at] = tokens;
    this.kinds[at] = kind;
    this.shares[at] = share;
  }

  /**
   * The index of the first cell that ended at `time` or later; `length` if there is none.
   * @param {number} time
   */
  firstFrom(time) {
    let low = 0;
    let high = this.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (/** @type {number} */ (this.ends[middle]) < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /**
   * The end of the last cell before `time` and the start of the next: the pause in which `time` is.
   * @param {number} time @returns {[number, number]}
   */
  around(time) {
    const next = this.firstFrom(time);
    const before = this.ends[next - 1] ?? time;
    const after = next < this.length ? /** @type {number} */ (this.ends[next]) - /** @type {number} */ (this.ms[next]) / 1000 : Infinity;
    return [before, after];
  }

  /** The end of the last cell, in seconds; -Infinity if there is none. */
  get lastEnd() {
    return this.length ? /** @type {number} */ (this.ends[this.length - 1]) : -Infinity;
  }

  /** The start of the first cell, in seconds; Infinity if there is none. */
  get firstStart() {
    return this.length ? /** @type {number} */ (this.ends[0]) - /** @type {number} */ (this.ms[0]) / 1000 : Infinity;
  }

  /**
   * Forgets what ended before `time`, once that is at least half of all (so that each cell is moved once at most).
   * @param {number} time
   */
  forget(time) {
    const first = this.firstFrom(time);
    if (first * 2 >= this.length && first >= FIRST_CAPACITY) this.#resize(this.ends.length, first);
  }

  /** @param {number} capacity @param {number} from */
  #resize(capacity, from) {
    const keep = (/** @type {any} */ old) => {
      const grown = new old.constructor(capacity);
      grown.set(old.subarray(from, this.length));
      return grown;
    };
    this.ends = keep(this.ends);
    this.steps = keep(this.steps);
    this.ms = keep(this.ms);
    this.tokens = keep(this.tokens);
    this.kinds = keep(this.kinds);
    this.shares = keep(this.shares);
    this.length -= from;
  }
}
