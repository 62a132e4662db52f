/** @file The steps of one replica, oldest first, and how many of them were never heard of. */

/** @typedef {import("./types.js").Step} Step */

const MAX_STEPS = 200_000;

/**
 * @typedef {{number: number, end: number, ms: number, rows: number, tokens: number, gap: boolean}} StepMark
 * One step; `gap`: at least one step before it was left out.
 */

/** The steps of one replica. */
export class Steps {
  /** @param {boolean} isPartial only the steps of one tenant are told: numbers that are missing mean nothing */
  constructor(isPartial) {
    this.isPartial = isPartial;
    this.marks = /** @type {StepMark[]} */ ([]);
    this.missing = 0;
    this.wasAway = false; // nobody listened for a while: steps that are skipped then are not missing
  }

  /**
   * Takes in a step; false if it was known already.
   * @param {Step} step
   */
  add(step) {
    const last = this.marks.at(-1);
    if (last && step.number === last.number && step.time <= last.end) return false;
    const skipped = last && step.number > last.number + 1 ? step.number - last.number - 1 : 0;
    const isMissed = skipped > 0 && !this.isPartial && !this.wasAway;
    if (isMissed) this.missing += skipped;
    this.wasAway = false;
    let tokens = 0;
    for (const row of step.rows) tokens += row[2];
    this.marks.push({
      number: step.number,
      end: step.time,
      ms: step.ms,
      rows: step.rows.length,
      tokens,
      gap: isMissed,
    });
    return true;
  }

  /**
   * The index of the first step that ended at `time` or later.
   * @param {number} time
   */
  firstFrom(time) {
    let low = 0;
    let high = this.marks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (/** @type {StepMark} */ (this.marks[middle]).end < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /**
   * The index of the step nearest to `time`, by its middle; -1 if there is none.
   * @param {number} time
   */
  nearest(time) {
    const after = Math.min(this.firstFrom(time), this.marks.length - 1);
    const distance = (/** @type {number} */ index) => {
      const mark = this.marks[index];
      return mark ? Math.abs(mark.end - mark.ms / 2000 - time) : Infinity;
    };
    return [after + 1, after - 1].reduce((best, one) => (distance(one) < distance(best) ? one : best), after);
  }

  /**
   * Forgets what ended before `time`.
   * @param {number} time
   */
  forget(time) {
    const first = Math.max(this.firstFrom(time), this.marks.length - MAX_STEPS);
    if (first * 4 > this.marks.length) this.marks.splice(0, first);
  }
}
