/** @file One tile of the lanes on a 2D canvas. Each kind of row and each state has a form, not only a colour. */

import { BEAT, columnsOf, heightOf, lengthOf, TILE, tracksIn } from "./layout.js";
import { QUEUED } from "./types.js";

/** @typedef {import("./history.js").History} History @typedef {import("./layout.js").LaneBox} LaneBox */
/** @typedef {import("./layout.js").Column} Column @typedef {import("./track.js").Track} Track */

/**
 * @typedef {{history: History, boxes: LaneBox[], scale: number, origin: number, colourOf: (digest: string) => string,
 *   bad: string, muted: string}} Scene
 * What there is to paint; `scale`: pixels per second, `origin`: the time at pixel 0.
 * @typedef {{middle: number, height: number, from: number, to: number}} Band a lane's middle and height, the tile's ends
 */

const PADDING = 2;

/**
 * Paints the tile of this index; the context's pixel 0 is the tile's left edge.
 * @param {CanvasRenderingContext2D} context @param {Scene} scene @param {number} tile
 */
export function paintTile(context, scene, tile) {
  const from = tile * TILE;
  const to = from + TILE;
  context.save();
  context.translate(-from, 0);
  for (const box of scene.boxes) {
    const band = { middle: box.top + box.height / 2, height: box.height - 2 * PADDING, from, to };
    const seconds = /** @type {const} */ ([scene.origin + from / scene.scale, scene.origin + to / scene.scale]);
    for (const track of tracksIn(scene.history, box, ...seconds)) {
      context.fillStyle = context.strokeStyle = scene.colourOf(track.digest);
      if (box.kind === "queue") paintQueued(context, scene, track, band);
      else paintRunning(context, scene, track, band);
    }
  }
  context.restore();
}

/** @param {CanvasRenderingContext2D} context @param {Scene} scene @param {Track} track @param {Band} band */
function paintRunning(context, scene, track, band) {
  const end = at(scene, Math.min(track.end, scene.history.now));
  context.globalAlpha = 0.3;
  fillBetween(context, band, at(scene, track.cells.firstStart), end, band.middle - 0.5, 1);
  context.globalAlpha = 1;
  for (const { from, to } of track.stretches((state) => state === "preempted", scene.history.now)) {
    const [left, right] = track.cells.around(from);
    paintPreempted(context, band, at(scene, Math.min(left, from)), at(scene, Math.min(right, to)));
  }
  const second = track.info?.adapters[1];
  for (const column of columnsOf(track.cells, band.from, band.to, scene.scale, scene.origin)) {
    paintCell(context, column, band);
    if (second) paintSecond(context, column, band, scene.colourOf(second.digest));
  }
  if (track.end <= scene.history.now) paintEnd(context, scene, track, band, end);
}

/**
 * A chunk of a prompt is a solid block, a decode a beat at the step's end, a draft a beat with its guesses hollow beside
 * it, a pooled prompt two bars. The rest of a long step is a thin line.
 * @param {CanvasRenderingContext2D} context @param {Column} column @param {Band} band
 */
function paintCell(context, column, band) {
  const height = Math.round(band.height * heightOf(column.prefill + column.decode + column.draft + column.pool));
  const top = Math.round(band.middle - height / 2);
  const length = lengthOf(column);
  if (column.width > length + 1) paintTail(context, column, band);
  if (column.prefill) context.fillRect(column.left, top, length, height);
  else if (column.pool) {
    context.fillRect(column.left, top, length, height * 0.4);
    context.fillRect(column.left, top + height * 0.6, length, height * 0.4);
  } else if (column.draft) paintDraft(context, column.left + column.width - length - 1, top, length, height);
  else context.fillRect(column.left + column.width - BEAT - 1, top, BEAT, height);
}

/** @param {CanvasRenderingContext2D} context @param {Column} column @param {Band} band */
function paintTail(context, column, band) {
  context.globalAlpha = 0.45;
  context.fillRect(column.left, band.middle - 1, column.width - 1, 2);
  context.globalAlpha = 1;
}

/**
 * @param {CanvasRenderingContext2D} context @param {number} left @param {number} top @param {number} length
 * @param {number} height
 */
function paintDraft(context, left, top, length, height) {
  const beat = Math.ceil(height * 0.45);
  context.fillRect(left, top + height - beat, length, beat);
  context.fillRect(left, top, length, 1);
  context.fillRect(left, top, 1, height);
  context.fillRect(left + length - 1, top, 1, height);
}

/** @param {CanvasRenderingContext2D} context @param {Column} column @param {Band} band @param {string} colour */
function paintSecond(context, column, band, colour) {
  const own = context.fillStyle;
  context.fillStyle = colour;
  context.fillRect(column.left, band.middle + band.height / 2 - 3, lengthOf(column), 3);
  context.fillStyle = own;
}

/** @param {CanvasRenderingContext2D} context @param {Scene} scene @param {Track} track @param {Band} band */
function paintQueued(context, scene, track, band) {
  for (const { from, to, state } of track.stretches((one) => QUEUED.has(one), Math.min(track.queueEnd, scene.history.now))) {
    const left = Math.max(at(scene, from), band.from);
    const right = Math.min(at(scene, to), band.to);
    if (right <= left) continue;
    if (state === "loading") paintStripes(context, band, left, right);
    else if (state === "compiling") paintWave(context, band, left, right);
    else paintDots(context, band, left, right);
  }
}

/** @param {CanvasRenderingContext2D} context @param {Band} band @param {number} left @param {number} right */
function paintDots(context, band, left, right) {
  context.globalAlpha = 0.75;
  for (let x = Math.ceil(left / 8) * 8; x < right; x += 8) context.fillRect(x, band.middle - 1, 2, 2);
  context.globalAlpha = 1;
}

/** @param {CanvasRenderingContext2D} context @param {Band} band @param {number} left @param {number} right */
function paintStripes(context, band, left, right) {
  const half = band.height * 0.36;
  context.save();
  context.beginPath();
  context.rect(left, band.middle - half, right - left, 2 * half);
  context.clip();
  context.globalAlpha = 0.16;
  context.fillRect(left, band.middle - half, right - left, 2 * half);
  context.globalAlpha = 0.85;
  context.lineWidth = 2;
  context.beginPath();
  for (let x = Math.floor(left / 8) * 8 - 8; x < right + 8; x += 8) {
    context.moveTo(x, band.middle + half);
    context.lineTo(x + 2 * half, band.middle - half);
  }
  context.stroke();
  context.restore();
}

/** @param {CanvasRenderingContext2D} context @param {Band} band @param {number} left @param {number} right */
function paintWave(context, band, left, right) {
  const half = band.height * 0.22;
  for (let x = Math.floor(left / 6) * 6; x < right; x += 6) {
    const y = (x / 6) % 2 ? band.middle - half : band.middle + half;
    context.fillRect(x, y, 6, 1.5);
    context.fillRect(x, band.middle - half, 1, 2 * half);
  }
}

/** @param {CanvasRenderingContext2D} context @param {Band} band @param {number} left @param {number} right */
function paintPreempted(context, band, left, right) {
  const half = band.height * 0.36;
  context.save();
  context.globalAlpha = 0.9;
  context.lineWidth = 1;
  context.setLineDash([4, 3]);
  context.lineDashOffset = -left;
  context.strokeRect(left + 0.5, band.middle - half, Math.max(2, right - left - 1), 2 * half);
  context.restore();
  context.fillRect(left + 4, band.middle - half * 0.5, 2, half);
  context.fillRect(left + 8, band.middle - half * 0.5, 2, half);
}

/**
 * An answer that is complete ends with a bar, one that failed with a cross, one that was given up with a stroke.
 * @param {CanvasRenderingContext2D} context @param {Scene} scene @param {Track} track @param {Band} band
 * @param {number} x
 */
function paintEnd(context, scene, track, band, x) {
  const reason = track.info?.reason;
  const half = band.height * 0.36;
  if (x < band.from - half || x > band.to + half) return;
  if (reason === "stop" || reason === "length") {
    context.fillRect(x, band.middle - half, 1.5, 2 * half);
    return;
  }
  if (reason !== "error" && reason !== "abort") return;
  context.save();
  context.strokeStyle = reason === "error" ? scene.bad : scene.muted;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x, band.middle + half * 0.7);
  context.lineTo(x + half * 1.4, band.middle - half * 0.7);
  if (reason === "error") {
    context.moveTo(x, band.middle - half * 0.7);
    context.lineTo(x + half * 1.4, band.middle + half * 0.7);
  }
  context.stroke();
  context.restore();
}

/** @param {Scene} scene @param {number} time */
function at(scene, time) {
  return (time - scene.origin) * scene.scale;
}

/**
 * @param {CanvasRenderingContext2D} context @param {Band} band @param {number} left @param {number} right
 * @param {number} top @param {number} height
 */
function fillBetween(context, band, left, right, top, height) {
  const from = Math.max(left, band.from);
  const to = Math.min(right, band.to);
  if (to > from) context.fillRect(from, top, to - from, height);
}
