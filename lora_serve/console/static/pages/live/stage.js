/** @file The lanes on a canvas: tiles are painted when something in them changed, and moved in every frame. */

import { TILE, tilesBetween } from "./layout.js";
import { paintTile } from "./paint.js";

/** @typedef {import("./paint.js").Scene} Scene */

const BUDGET_MS = 1; // of painting what changed, in one frame of the screen
const FIRST_BUDGET_MS = 4; // of painting what was never painted
const SPARE_TILES = 32;

/** A canvas that shows the lanes up to a time. */
export class Stage {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.tiles = /** @type {Map<number, {canvas: HTMLCanvasElement, isStale: boolean}>} */ (new Map());
    this.spare = /** @type {HTMLCanvasElement[]} */ ([]);
    this.scene = /** @type {Scene | null} */ (null);
    this.width = 0;
    this.height = 0;
    this.ratio = 1;
  }

  /**
   * Takes the size in CSS pixels, and what to paint. Everything is painted anew; where times stay where they were, the
   * old pictures are shown until then.
   * @param {number} width @param {number} height @param {number} ratio device pixels per CSS pixel
   * @param {Scene} scene
   */
  set(width, height, ratio, scene) {
    const { scene: old } = this;
    const canShow = old?.scale === scene.scale && old.origin === scene.origin && this.ratio === ratio;
    this.width = width;
    this.height = height;
    this.ratio = ratio;
    this.scene = scene;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    if (canShow) for (const tile of this.tiles.values()) tile.isStale = true;
    else this.#drop([]);
  }

  /**
   * Says that something changed at `time` or later.
   * @param {number} time
   */
  touch(time) {
    if (!this.scene) return;
    const first = Math.floor(((time - this.scene.origin) * this.scene.scale) / TILE);
    for (const [index, tile] of this.tiles) if (index >= first) tile.isStale = true;
  }

  /**
   * Shows the lanes up to `time`, its right edge; false if tiles are left for the next frame.
   * @param {number} time @param {() => number} clock milliseconds
   */
  draw(time, clock) {
    if (!this.scene || !this.width || !this.height) return true;
    const started = clock();
    const right = (time - this.scene.origin) * this.scene.scale;
    const left = right - this.width;
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    const wanted = tilesBetween(left, right);
    let isWhole = true;
    for (const index of wanted.reverse()) {
      const known = this.tiles.get(index);
      const canPaint = clock() - started < (known ? BUDGET_MS : FIRST_BUDGET_MS);
      if ((!known || known.isStale) && canPaint) this.#paint(index);
      else if (!known || known.isStale) isWhole = false;
      const tile = this.tiles.get(index);
      if (tile) this.context.drawImage(tile.canvas, Math.round((index * TILE - left) * this.ratio), 0);
    }
    if (this.tiles.size > wanted.length + SPARE_TILES) this.#drop(wanted);
    return isWhole;
  }

  /** @param {number} index */
  #paint(index) {
    const canvas = this.tiles.get(index)?.canvas ?? this.spare.pop() ?? document.createElement("canvas");
    canvas.width = Math.round(TILE * this.ratio); // clears it, too
    canvas.height = this.canvas.height;
    const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    paintTile(context, /** @type {Scene} */ (this.scene), index);
    this.tiles.set(index, { canvas, isStale: false });
  }

  /** @param {number[]} wanted */
  #drop(wanted) {
    const keep = new Set(wanted);
    for (const [index, tile] of this.tiles) {
      if (keep.has(index)) continue;
      this.tiles.delete(index);
      if (this.spare.length < SPARE_TILES) this.spare.push(tile.canvas);
    }
  }
}
