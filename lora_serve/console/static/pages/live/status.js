/** @file Whether what is seen is now, and in words why not. */

import { Button } from "../../components/button.js";
import { plural, span } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useEffect, useState } from "../../vendor/preact.js";

/** @typedef {import("./feed.js").Feed} Feed */

const WORDS = TEXTS.live;
const OUTAGE_SHOWN_MS = 12_000;

/**
 * One word for the state of the stream.
 * @param {{feed: Feed, isPaused: boolean}} props
 */
export function StatusPill({ feed, isPaused }) {
  const state = feed.status === "live" && isPaused ? "paused" : feed.status;
  return html`<span class="live-status" data-status=${state} role="status"><i aria-hidden="true"></i>${WORDS.status[state]}</span>`;
}

/**
 * What is to be said about the stream: why it ended, that it came back, that steps are missing. A server that does not
 * answer is what the shell tells.
 * @param {{feed: Feed}} props
 */
export function Notices({ feed }) {
  const { status, reason, history } = feed;
  const outage = useShortly(feed.outage);
  const [dismissed, setDismissed] = useState(0);
  const missing = history.isScoped ? history.missingFrames : history.missing;
  const nouns = history.isScoped ? WORDS.notice.frames : WORDS.notice.steps;
  return html`<div class="live-notices" role="status">
    ${status === "lost" && reason && html`<p class="notice">
      ${WORDS.notice.lost(reason)} <${Button} kind="quiet" onClick=${() => feed.retry()}>${WORDS.notice.retry}<//>
    </p>`}
    ${status === "refused" && html`<p class="error-note">${WORDS.notice.refused(reason)}</p>`}
    ${status === "live" && outage && html`<p class="notice good">
      ${outage.isRestart ? WORDS.notice.restarted(span(outage.seconds)) : WORDS.notice.back(span(outage.seconds))}
    </p>`}
    ${missing > dismissed && html`<p class="notice" data-missing=${missing}>
      ${WORDS.notice.missing(plural(missing, nouns[0], nouns[1]))} <${Button} kind="quiet" onClick=${() => setDismissed(missing)}>${WORDS.notice.dismiss}<//>
    </p>`}
  </div>`;
}

/**
 * A value for some seconds after it changed, then null.
 * @template T @param {T | null} value @returns {T | null}
 */
function useShortly(value) {
  const [old, setOld] = useState(/** @type {T | null} */ (null));
  useEffect(() => {
    if (!value) return undefined;
    const timer = setTimeout(() => setOld(value), OUTAGE_SHOWN_MS);
    return () => clearTimeout(timer);
  }, [value]);
  return value === old ? null : value;
}
