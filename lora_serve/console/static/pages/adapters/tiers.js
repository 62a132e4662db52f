import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/** The fastest tier that has an adapter, or that it is being loaded; to a tenant, none. @param {{state: string, tiers: string[]}} props */
export function Tier({ state, tiers }) {
  const words = TEXTS.adapters;
  if (state === "fetching") return html`<span class="tag warn">${words.loading}</span>`;
  const order = ["device", "host", "disk", "redis"];
  const fastest = order.find((one) => tiers.includes(one));
  if (!fastest) return html`<span class="muted">${stateName(state)}</span>`;
  const others = tiers.filter((one) => one !== fastest).map(tierName);
  return html`<span class=${`tag ${fastest === "device" ? "good" : ""}`} title=${others.join(", ")}>${tierName(fastest)}</span>`;
}

/** @param {string} tier */
export function tierName(tier) {
  return /** @type {Record<string, string>} */ (TEXTS.adapters.tiers)[tier] ?? tier;
}

/** @param {string} state */
export function stateName(state) {
  return /** @type {Record<string, string>} */ (TEXTS.adapters.states)[state] ?? state;
}
