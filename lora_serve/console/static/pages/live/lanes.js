/** @file Which lane a request is shown in: the lowest that is free, so that lanes stay where they are. */

/** @typedef {import("./track.js").Track} Track */

/** Lanes of one group (a replica's batch, or the queue), each with the tracks that were in it, oldest first. */
export class Lanes {
  /** @param {(track: Track) => number} endOf when a track leaves its lane; Infinity while it holds it */
  constructor(endOf) {
    this.endOf = endOf;
    this.lanes = /** @type {Track[][]} */ ([]);
  }

  /**
   * Puts a track that begins at `time` into the lowest lane that is free then; the lane's index.
   * @param {Track} track @param {number} time
   */
  add(track, time) {
    const free = this.lanes.findIndex((lane) => {
      const last = lane.at(-1);
      return !last || this.endOf(last) <= time;
    });
    if (free < 0) return this.lanes.push([track]) - 1;
    this.lanes[free]?.push(track);
    return free;
  }

  /**
   * The track in a lane at a time: the one that holds it, or null.
   * @param {number} lane @param {number} time @param {(track: Track) => number} startOf
   */
  at(lane, time, startOf) {
    const track = this.lanes[lane]?.findLast((one) => startOf(one) <= time);
    return track && this.endOf(track) >= time ? track : null;
  }

  /**
   * How many lanes hold something between two times: the highest such lane, plus one.
   * @param {number} from @param {number} to @param {(track: Track) => number} startOf
   */
  countBetween(from, to, startOf) {
    return this.lanes.findLastIndex((lane) => lane.some((one) => startOf(one) <= to && this.endOf(one) >= from)) + 1;
  }

  /**
   * Forgets tracks that left their lane before `time`, and empty lanes at the end.
   * @param {number} time
   */
  forget(time) {
    for (const lane of this.lanes) {
      while (lane[0] && this.endOf(lane[0]) < time) lane.shift();
    }
    while (this.lanes.length && !this.lanes.at(-1)?.length) this.lanes.pop();
  }
}
