/** @file Where things stand in the lanes: times as positions, steps as columns, tokens as sizes. Knows no canvas. */

/** @typedef {import("./cells.js").Cells} Cells @typedef {import("./history.js").History} History */
/** @typedef {import("./track.js").Track} Track */

/** Width in pixels below which steps share a column. */
const COLUMN = 4;

/** Width in pixels of one tile: a piece of the lanes that is painted once and then moved. */
export const TILE = 64;

/** Seconds that the lanes can show across their width. */
export const SPANS = [2, 5, 15, 60];

/** Queued requests that have a lane of their own; the others are counted. */
const MAX_PLACES = 8;

/** Width in pixels of the shortest cell. */
export const BEAT = 3;

const DRAFT = 6; // pixels of a draft, where there is room
const FULL_HEIGHT_TOKENS = 256;
const LEAST_HEIGHT = 0.34;

/**
 * @typedef {{left: number, width: number, share: number, prefill: number, decode: number, draft: number, pool: number,
 *   steps: number}} Column
 * The cells of one request that share a column: position in pixels, tokens by kind, number of steps; `share`: of the
 * tokens of the step's largest row, 1 where several steps share the column.
 */

/**
 * The height of a lane in pixels, of its row beside it too.
 * @param {number} lanes how many there are
 */
function laneHeight(lanes) {
  if (lanes <= 12) return 30;
  if (lanes <= 24) return 25;
  return lanes <= 40 ? 20 : 16;
}

/**
 * The part of a lane's height that a number of tokens fills: a beat at one, all of it at a long chunk.
 * @param {number} tokens
 */
export function heightOf(tokens) {
  const part = Math.log2(1 + tokens) / Math.log2(1 + FULL_HEIGHT_TOKENS);
  return LEAST_HEIGHT + (1 - LEAST_HEIGHT) * Math.min(1, part);
}

/**
 * The columns of a request between two positions. A step that is at least a column wide is one; shorter ones share
 * columns of equal width that stand still in time, so that nothing flickers while they move.
 * @param {Cells} cells @param {number} from @param {number} to in pixels @param {number} scale pixels per second
 * @param {number} origin the time at pixel 0
 * @returns {Column[]}
 */
export function columnsOf(cells, from, to, scale, origin) {
  const columns = /** @type {Column[]} */ ([]);
  for (let at = cells.firstFrom(origin + (from - COLUMN) / scale); at < cells.length; at++) {
    const end = (/** @type {number} */ (cells.ends[at]) - origin) * scale;
    const width = (/** @type {number} */ (cells.ms[at]) / 1000) * scale;
    if (end - Math.max(width, COLUMN) >= to) break;
    const isWide = width >= COLUMN;
    const left = isWide ? end - width : Math.floor((end - width / 2) / COLUMN) * COLUMN;
    let column = columns.at(-1);
    if (isWide || !column || column.left !== left) {
      const share = isWide ? /** @type {number} */ (cells.shares[at]) : 1;
      column = { left, width: isWide ? width : COLUMN, share, prefill: 0, decode: 0, draft: 0, pool: 0, steps: 0 };
      columns.push(column);
    }
    column[KIND_FIELDS[/** @type {number} */ (cells.kinds[at])] ?? "decode"] += /** @type {number} */ (cells.tokens[at]);
    column.steps++;
  }
  return columns;
}

const KIND_FIELDS = /** @type {const} */ (["prefill", "decode", "draft", "pool"]);

/**
 * The length of a column's cell in pixels: a chunk of the step's largest row fills it, another its share, a token is a
 * beat.
 * @param {Column} column
 */
export function lengthOf(column) {
  const full = column.width - 1;
  if (column.prefill || column.pool) return Math.max(BEAT, full * column.share);
  return Math.min(full, column.draft && column.width > COLUMN ? DRAFT : BEAT);
}

/**
 * The tiles that a view needs, from its first to its last pixel.
 * @param {number} from @param {number} to
 */
export function tilesBetween(from, to) {
  const first = Math.floor(from / TILE);
  return Array.from({ length: Math.max(0, Math.ceil(to / TILE) - first) }, (_, index) => first + index);
}

/**
 * @typedef {{kind: "batch" | "queue", replica: string, index: number, top: number, height: number}} LaneBox
 * @typedef {{replica: string, kind: "batch" | "queue", top: number}} GroupHead
 * @typedef {{boxes: LaneBox[], heads: GroupHead[], height: number}} Stack
 */

const HEAD = 26;
const STEADY_SECONDS = 15; // that a lane stays after its last request
const QUEUE_HEIGHT = 16;

/**
 * The lanes from top to bottom: the batch of each replica, then the queue.
 * @param {History} history @param {number} from @param {number} to the times shown @param {number} least lanes shown
 * @returns {Stack}
 */
export function stackLanes(history, from, to, least) {
  const replicas = history.replicas.length ? history.replicas : [""];
  const start = Math.min(from, to - STEADY_SECONDS);
  const counts = replicas.map((replica) => Math.max(history.numLanes(replica, start, to), least));
  const height = laneHeight(counts.reduce((sum, one) => sum + one, 0));
  const stack = /** @type {Stack} */ ({ boxes: [], heads: [], height: 0 });
  replicas.forEach((replica, at) => {
    if (replicas.length > 1) addHead(stack, replica, "batch");
    addBoxes(stack, "batch", replica, counts[at] ?? 0, height);
  });
  const places = history.numPlaces(from, to);
  if (places) addHead(stack, "", "queue");
  addBoxes(stack, "queue", "", Math.min(places, MAX_PLACES), QUEUE_HEIGHT);
  return stack;
}

/**
 * How many of those that wait at a time have no lane.
 * @param {History} history @param {Stack} stack @param {number} time @param {number} waiting
 */
export function numHidden(history, stack, time, waiting) {
  const shown = stack.boxes.filter((box) => box.kind === "queue" && trackIn(history, box, time)).length;
  return Math.max(0, waiting - shown);
}

/** @param {Stack} stack @param {string} replica @param {"batch" | "queue"} kind */
function addHead(stack, replica, kind) {
  stack.heads.push({ replica, kind, top: stack.height });
  stack.height += HEAD;
}

/** @param {Stack} stack @param {"batch" | "queue"} kind @param {string} replica @param {number} count @param {number} height */
function addBoxes(stack, kind, replica, count, height) {
  for (let index = 0; index < count; index++) {
    stack.boxes.push({ kind, replica, index, top: stack.height, height });
    stack.height += height;
  }
}

/**
 * The request in a lane at a time.
 * @param {History} history @param {LaneBox} box @param {number} time @returns {Track | null}
 */
export function trackIn(history, box, time) {
  if (box.kind === "queue") return history.queuedIn(box.index, time);
  return history.runningIn(box.replica, box.index, time);
}

/**
 * The requests of a lane that are in sight between two times.
 * @param {History} history @param {LaneBox} box @param {number} from @param {number} to
 */
export function tracksIn(history, box, from, to) {
  const lanes = box.kind === "queue" ? history.queue : history.batches.get(box.replica);
  const startOf = (/** @type {Track} */ one) => (box.kind === "queue" ? one.start : one.cells.firstStart);
  return (lanes?.lanes[box.index] ?? []).filter((one) => startOf(one) <= to && lanes && lanes.endOf(one) >= from);
}
