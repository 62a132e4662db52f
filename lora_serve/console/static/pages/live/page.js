/** @file The page "Live": the steps of the engine as they happen, and what they run on. */

import { Loading } from "../../components/empty.js";
import { ms, number, plural, span } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { Blocks } from "./blocks.js";
import { otherLane, placeOf, snapped, stepped } from "./choices.js";
import { Axis, Controls, Scrub } from "./controls.js";
import { useFeed } from "./feeds.js";
import { Figures } from "./figures.js";
import { GettingStarted } from "./getting_started.js";
import { LaneCanvas } from "./lane_canvas.js";
import { LaneHeads, LaneList, nameOf } from "./lane_list.js";
import { numHidden, stackLanes } from "./layout.js";
import { Forms, Legend } from "./legend.js";
import { momentAt } from "./moment.js";
import { MomentPanel } from "./moment_panel.js";
import { presentAt } from "./present.js";
import { Queue } from "./queue.js";
import { Rates } from "./rates.js";
import { Slots } from "./slots.js";
import { Notices, StatusPill } from "./status.js";
import { Tiers } from "./tiers.js";
import { choosing, FIRST_VIEW, following, movedTo, paused, spanning } from "./view.js";

/** @typedef {import("./feed.js").Feed} Feed @typedef {import("./history.js").History} History */
/** @typedef {import("./view.js").View} View */
/** @typedef {import("./types.js").Frame} Frame @typedef {import("./track.js").Track} Track */

const WORDS = TEXTS.live;
const LEAST_LANES = 8;

/** The page "Live". */
export function Page() {
  const feed = useFeed();
  const [view, setView] = useState(FIRST_VIEW);
  const { history } = feed;
  history.heldFrom = view.end === null ? Infinity : view.end - view.span;
  const frame = history.latest && history.frameAt(view.chosen?.time ?? view.end ?? Infinity);
  return html`<div class="live" data-status=${feed.status}>
    <header class="page-head">
      <h1>${WORDS.title}</h1>
      <${StatusPill} feed=${feed} isPaused=${view.end !== null} />
      <${Server} feed=${feed} />
      <${Controls}
        view=${view}
        onToggle=${() => setView(view.end === null ? paused(view, shownNow(feed)) : following(view))}
        onSpan=${(/** @type {number} */ seconds) => setView(spanning(view, history, seconds))}
      />
    </header>
    <${Notices} feed=${feed} />
    ${frame ? html`<${Body} feed=${feed} frame=${frame} view=${view} setView=${setView} />` : feed.status !== "refused" && html`<${Loading} label=${WORDS.empty.loading} />`}
  </div>`;
}

/**
 * The time that the lanes show at their right edge while they follow the server.
 * @param {Feed} feed
 */
function shownNow(feed) {
  return Math.min(feed.history.now, Math.max(feed.clock.shown, feed.history.now - 1));
}

/** @param {{feed: Feed}} props */
function Server({ feed }) {
  const { hello } = feed.history;
  if (!hello) return null;
  return html`<span class="live-server muted">${hello.model} · ${hello.engine}${hello.scope === null ? "" : ` · ${WORDS.notice.scope(hello.scope)}`}</span>`;
}

/** @param {{feed: Feed, frame: Frame, view: View, setView: (view: View) => void}} props */
function Body({ feed, frame, view, setView }) {
  const { history } = feed;
  const time = view.chosen?.time ?? view.end ?? history.now;
  const pick = (/** @type {Track} */ track) => setView(choosing(view, history, placeOf(track, time), shownNow(feed)));
  const step = (/** @type {1 | -1} */ direction) => setView(stepped(view, history, direction, shownNow(feed)));
  const close = () => setView({ ...view, chosen: null });
  const present = presentAt(history, view.end === null ? null : time);
  return html`<${Figures} ...${{ history, frame, present, time }} />
    <div class="live-body" data-chosen=${view.chosen !== null}>
      <div class="live-main">
        <${Lanes} ...${{ feed, view, present, setView, pick, step, close }} />
        <${Rates} history=${history} time=${view.end ?? history.now} />
        <div class="live-pair"><${Queue} present=${present} />${frame.blocks && html`<${Blocks} blocks=${frame.blocks} />`}</div>
      </div>
      <div class="live-side">
        ${view.chosen && html`<${MomentPanel} history=${history} chosen=${view.chosen} onStep=${step} onPick=${pick} onClose=${close} />`}
        <${Slots} frame=${frame} isScoped=${history.isScoped} />
        <${Tiers} history=${history} frame=${frame} time=${time} isLive=${view.end === null} />
      </div>
    </div>`;
}

/**
 * The lanes with their names, scale, slider and legend.
 * @param {{feed: Feed, view: View, present: import("./present.js").Present, setView: (view: View) => void,
 *   pick: (track: Track) => void, step: (direction: 1 | -1) => void, close: () => void}} props
 */
function Lanes({ feed, view, present, setView, pick, step, close }) {
  const { history } = feed;
  const end = view.end ?? shownNow(feed);
  const from = end - view.span;
  const time = view.chosen?.time ?? end;
  const stack = stackLanes(history, from, end, LEAST_LANES);
  const hidden = numHidden(history, stack, time, present.waiting);
  const isEmpty = view.end === null && history.tracks.size === 0;
  const pan = (/** @type {number} */ seconds) => setView(movedTo(view, history, (view.end ?? shownNow(feed)) + seconds));
  return html`<section class="panel live-lanes" aria-label=${WORDS.lanes.heading}>
    <header class="live-panel-head"><h2>${WORDS.lanes.heading}</h2></header>
    <${Legend} history=${history} from=${from} to=${end} />
    <div class="live-field">
      <${LaneHeads} stack=${stack} present=${present} />
      <${LaneList} history=${history} stack=${stack} time=${time} chosenId=${view.chosen?.id ?? null} onPick=${pick} />
      <${LaneCanvas}
        feed=${feed}
        stack=${stack}
        view=${view}
        valueText=${valueText(history, view)}
        onChoose=${(/** @type {import("./moment.js").Chosen} */ chosen) => setView(choosing(view, history, snapped(history, chosen), shownNow(feed)))}
        onStep=${step}
        onLane=${(/** @type {1 | -1} */ direction) => setView(otherLane(view, history, stack, direction, shownNow(feed)))}
        onPan=${pan}
        onToggle=${() => setView(view.end === null ? paused(view, shownNow(feed)) : following(view))}
        onClose=${close}
      />
      ${isEmpty && html`<${GettingStarted} model=${history.hello?.model ?? "base"} />`}
    </div>
    ${hidden > 0 && html`<p class="muted live-hidden">${WORDS.lanes.hidden(hidden)}</p>`}
    <${Axis} span=${view.span} isPaused=${view.end !== null} />
    <${Scrub} history=${history} view=${view} onMove=${(/** @type {number} */ end) => setView(end >= history.now - 0.05 ? following(view) : movedTo(view, history, end))} />
    <${Forms} />
  </section>`;
}

/**
 * The chosen moment in words, for those who do not see the lanes.
 * @param {History} history @param {View} view
 */
function valueText(history, { end, chosen }) {
  const back = WORDS.controls.ago(span(Math.max(0, history.now - (chosen?.time ?? end ?? history.now))));
  if (!chosen) return end === null ? WORDS.controls.now : back;
  const { step, rows } = momentAt(history, chosen);
  if (!step) return WORDS.lanes.value(back, WORDS.lanes.noStep);
  const own = rows.find(({ track }) => track.id === chosen.id);
  const words = [WORDS.moment.step(number(step.number)), ms(step.ms), plural(step.rows, ...WORDS.lanes.rows)];
  if (own) words.push(`${nameOf(own.track)}: ${WORDS.kinds[own.kind]}, ${plural(own.tokens, "token", "tokens")}`);
  return WORDS.lanes.value(back, words.join(", "));
}
