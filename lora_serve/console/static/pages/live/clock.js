/** @file The server's time on this machine, from when frames arrive. */

const REMEMBERED = 64;

/** The server's clock as seen from here: the fastest of the last frames tells how far the two clocks are apart. */
export class Clock {
  /** @param {number} delay seconds by which the view lags, so that a frame is there before it is due */
  constructor(delay) {
    this.delay = delay;
    this.offsets = /** @type {number[]} */ ([]);
    this.shown = -Infinity;
  }

  /**
   * Takes in that a frame of the server's `time` arrived `now` (both in seconds).
   * @param {number} time @param {number} now
   */
  hear(time, now) {
    this.offsets.push(now - time);
    if (this.offsets.length > REMEMBERED) this.offsets.shift();
  }

  /** Forgets all: another server's clock, or the same one's after a long while. */
  reset() {
    this.offsets = [];
    this.shown = -Infinity;
  }

  /**
   * The server's time to show at `now`; it never runs backwards.
   * @param {number} now
   */
  timeAt(now) {
    if (!this.offsets.length) return this.shown;
    this.shown = Math.max(this.shown, now - Math.min(...this.offsets) - this.delay);
    return this.shown;
  }
}
