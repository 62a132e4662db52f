import { CopyButton } from "../../components/command.js";
import { ago, bytes, moment, ms, number } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { stateName, tierName } from "./tiers.js";

/** The facts of an adapter. @param {{card: any, isAdmin: boolean}} props */
export function Facts({ card, isAdmin }) {
  const words = TEXTS.adapters;
  const { activity } = card;
  /** @type {[keyof typeof words.fact, any][]} */
  const rows = [
    ["tenant", card.tenant],
    ...(isAdmin ? [pair("state", stateName(card.state)), pair("tiers", card.tiers.map(tierName).join(", "))] : []),
    ["digest", html`<span class="mono">${card.digest}</span> <${CopyButton} text=${card.digest} />`],
    ["rank", number(card.rank)],
    ["kinds", card.kinds.join(", ") || words.plainLora],
    ["bytes", bytes(card.bytes)],
    ["targets", card.targets.join(", ")],
    ["source", card.source],
    ["created", moment(card.created)],
    ["pinned", card.pinned ? words.yes : words.no],
    ["shared_with", sharedText(card.shared_with)],
    ["requests", words.requestsText(activity.requests_per_minute, activity.requests, activity.window_seconds)],
    ["errors", words.errorsText(activity.errors, activity.requests)],
    ["last_used", lastUsed(activity.last_used)],
    ...(isAdmin ? [pair("hits", words.hitsText(card.hits, card.misses)), pair("last_load", loadText(card))] : []),
    ...(card.replicas ? [pair("replicas", replicasText(card.replicas))] : []),
    ["metadata", html`<code>${JSON.stringify(card.metadata)}</code>`],
  ];
  return html`<dl class="facts">
    ${rows.map(([name, value]) => html`<dt key=${`${name} name`}>${words.fact[name]}</dt><dd key=${name} data-fact=${name}>${value}</dd>`)}
  </dl>`;
}

/** When something was used; of a time before the server's start nothing is known. @param {number|null} time */
export function lastUsed(time) {
  return time === null ? html`<span title=${TEXTS.adapters.neverUsedHint}>${TEXTS.adapters.neverUsed}</span>` : ago(time);
}

/** @param {keyof typeof TEXTS.adapters.fact} name @param {any} value @returns {[keyof typeof TEXTS.adapters.fact, any]} */
function pair(name, value) {
  return [name, value];
}

/** Whom an adapter is shared with, in words. @param {string[]} names */
export function sharedText(names) {
  const words = TEXTS.adapters;
  return names.includes("*") ? words.everybody : names.join(", ") || words.nobody;
}

/** The engines of a fleet that hold an adapter. @param {any[]} replicas */
function replicasText(replicas) {
  const words = TEXTS.adapters;
  const one = (/** @type {any} */ place) => `${place.replica} (${[...place.tiers.map(tierName), ...(place.is_loading ? [words.loading] : [])].join(", ")})`;
  return replicas.map(one).join(", ") || words.nowhere;
}

/** @param {any} card */
function loadText(card) {
  if (!card.last_load) return null;
  const { tier } = card.last_load;
  return `${ms(card.last_load_ms)} ${tier === "none" ? "" : TEXTS.adapters.loadedFrom(tierName(tier))}`;
}
