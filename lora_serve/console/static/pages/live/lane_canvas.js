/** @file The lanes: the canvas, and the ways to choose a moment on it by pointer and keys. */

import { colourOf, resolved } from "../../lib/colour.js";
import { useIsDark } from "../../lib/theme.js";
import { TEXTS } from "../../texts.js";
import { html, useEffect, useLayoutEffect, useRef } from "../../vendor/preact.js";
import { trackIn } from "./layout.js";
import { Stage } from "./stage.js";

/** @typedef {import("./feed.js").Feed} Feed @typedef {import("./layout.js").Stack} Stack */
/** @typedef {import("./view.js").View} View @typedef {import("./moment.js").Chosen} Chosen */

const WORDS = TEXTS.live;
const CALM_MS = 1000; // between pictures where motion is not wanted
const DRAG_PIXELS = 4;

/**
 * The canvas with everything that is laid over it.
 * @param {{feed: Feed, stack: Stack, view: View, valueText: string, onChoose: (chosen: Chosen) => void,
 *   onStep: (direction: 1 | -1) => void, onLane: (direction: 1 | -1) => void, onPan: (seconds: number) => void,
 *   onToggle: () => void, onClose: () => void}} props
 */
export function LaneCanvas({ feed, stack, view, valueText, onChoose, onStep, onLane, onPan, onToggle, onClose }) {
  const box = useRef(/** @type {HTMLDivElement | null} */ (null));
  const pane = usePane(feed, stack, view, box);
  const drag = useRef(/** @type {{x: number, isMoved: boolean} | null} */ (null));

  const timeAt = (/** @type {number} */ x) => pane.shown() - (pane.width() - x) / (pane.width() / view.span);
  const choose = (/** @type {PointerEvent} */ event) => {
    const bounds = /** @type {HTMLElement} */ (box.current).getBoundingClientRect();
    const time = timeAt(event.clientX - bounds.left);
    const y = event.clientY - bounds.top;
    const lane = stack.boxes.find((one) => y >= one.top && y < one.top + one.height);
    const replica = lane?.replica ?? feed.history.replicas[0] ?? "";
    const track = lane && trackIn(feed.history, lane, time);
    onChoose({ time, replica: track?.replica ?? replica, id: track?.id ?? null });
  };
  const keys = /** @type {Record<string, () => void>} */ ({
    ArrowLeft: () => onStep(-1),
    ArrowRight: () => onStep(1),
    ArrowUp: () => onLane(-1),
    ArrowDown: () => onLane(1),
    PageUp: () => onPan(-view.span / 2),
    PageDown: () => onPan(view.span / 2),
    " ": onToggle,
    Escape: onClose,
  });
  return html`<div
    class="live-canvas"
    ref=${box}
    style=${{ height: `${stack.height}px` }}
    role="slider"
    tabindex="0"
    aria-label=${WORDS.lanes.canvas}
    aria-orientation="horizontal"
    aria-valuemin=${0}
    aria-valuemax=${120}
    aria-valuenow=${Math.max(0, Math.round(feed.history.now - (view.chosen?.time ?? view.end ?? feed.history.now)))}
    aria-valuetext=${valueText}
    onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
      const act = event.altKey || event.ctrlKey || event.metaKey ? undefined : keys[event.key];
      if (act) event.preventDefault();
      act?.();
    }}
    onPointerDown=${(/** @type {PointerEvent} */ event) => {
      drag.current = { x: event.clientX, isMoved: false };
      /** @type {HTMLElement} */ (event.currentTarget).setPointerCapture(event.pointerId);
    }}
    onPointerMove=${(/** @type {PointerEvent} */ event) => {
      const { current } = drag;
      if (!current || view.end === null) return;
      const moved = event.clientX - current.x;
      if (!current.isMoved && Math.abs(moved) < DRAG_PIXELS) return;
      drag.current = { x: event.clientX, isMoved: true };
      onPan((-moved / pane.width()) * view.span);
    }}
    onPointerUp=${(/** @type {PointerEvent} */ event) => {
      if (drag.current && !drag.current.isMoved) choose(event);
      drag.current = null;
    }}
    onPointerCancel=${() => void (drag.current = null)}
  >
    <canvas ref=${pane.canvas} aria-hidden="true"></canvas>
    <div class="live-mark" ref=${pane.mark} hidden></div>
    ${view.end === null && feed.status === "live" && html`<div class="live-edge"></div>`}
  </div>`;
}

/**
 * The canvas' life: its size, its pictures while it is in sight, and what was painted of an older history.
 * @param {Feed} feed @param {Stack} stack @param {View} view @param {{current: HTMLDivElement | null}} box
 */
function usePane(feed, stack, view, box) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const mark = useRef(/** @type {HTMLDivElement | null} */ (null));
  const state = useRef({ width: 0, shown: 0, isVisible: true, isOld: true, view, stack });
  const isDark = useIsDark();
  const shape = `${stack.boxes.length}:${stack.height}:${stack.heads.length}:${view.span}:${isDark}`;
  state.current.view = view;
  state.current.stack = stack;
  useLayoutEffect(() => void (state.current.isOld = true), [shape]);
  useEffect(() => {
    const { current } = state;
    const stage = new Stage(/** @type {HTMLCanvasElement} */ (canvas.current));
    const element = /** @type {HTMLElement} */ (box.current);
    const resized = new ResizeObserver(() => void (current.isOld = true));
    const seen = new IntersectionObserver(([entry]) => void (current.isVisible = entry?.isIntersecting ?? true));
    resized.observe(element);
    seen.observe(element);
    feed.onFold = (from) => stage.touch(from);
    const stop = animate(() => {
      if (!current.isVisible) return;
      if (current.isOld) current.width = fit(stage, element, feed, current);
      current.isOld = false;
      const { end, span } = current.view;
      current.shown = end ?? liveTime(feed);
      stage.draw(current.shown, () => performance.now());
      place(mark.current, current.view, current.shown, current.width / span);
    });
    return () => {
      stop();
      resized.disconnect();
      seen.disconnect();
    };
  }, [feed]);
  return { canvas, mark, shown: () => state.current.shown, width: () => state.current.width || 1 };
}

/**
 * The time at the right edge while nothing is paused: it stands still while the stream is broken.
 * @param {Feed} feed
 */
function liveTime(feed) {
  const { history, clock } = feed;
  return feed.status === "live" ? clock.timeAt(performance.now() / 1000) : Math.max(clock.shown, history.now);
}

/**
 * Gives the stage its size and what to paint; the width in pixels.
 * @param {Stage} stage @param {HTMLElement} element @param {Feed} feed @param {{view: View, stack: Stack}} current
 */
function fit(stage, element, feed, current) {
  const width = element.clientWidth;
  const colours = /** @type {Map<string, string>} */ (new Map());
  const colour = (/** @type {string} */ digest) => {
    const known = colours.get(digest) ?? resolved(colourOf(digest));
    colours.set(digest, known);
    return known;
  };
  stage.set(width, current.stack.height, devicePixelRatio || 1, {
    history: feed.history,
    boxes: current.stack.boxes,
    scale: width / current.view.span,
    origin: stage.scene?.history === feed.history ? stage.scene.origin : Math.floor(feed.history.now),
    colourOf: colour,
    bad: resolved("var(--bad)"),
    muted: resolved("var(--muted)"),
  });
  return width;
}

/**
 * Puts the line of the chosen moment where it belongs.
 * @param {HTMLElement | null} mark @param {View} view @param {number} shown @param {number} scale
 */
function place(mark, view, shown, scale) {
  if (!mark) return;
  mark.hidden = !view.chosen;
  if (view.chosen) mark.style.transform = `translateX(${((view.chosen.time - (shown - view.span)) * scale).toFixed(1)}px)`;
}

/**
 * Calls `draw` for each picture of the screen, once a second where motion is not wanted; the result stops that.
 * @param {() => void} draw
 */
function animate(draw) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  let last = -Infinity;
  let handle = requestAnimationFrame(function next(now) {
    handle = requestAnimationFrame(next);
    if (calm.matches && now - last < CALM_MS) return;
    last = now;
    draw();
  });
  return () => cancelAnimationFrame(handle);
}
