/** @file Who runs and who waits, by tenant. */

import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/** @typedef {import("./present.js").Present} Present */

const WORDS = TEXTS.live.queue;
const MOST = 10;

/**
 * A bar for each tenant that has requests: running solid, waiting hatched.
 * @param {{present: Present}} props
 */
export function Queue({ present }) {
  const tenants = Object.entries(present.tenants)
    .map(([tenant, { running, waiting }]) => ({ tenant, running, waiting }))
    .filter((one) => one.running + one.waiting > 0)
    .sort((one, other) => other.running + other.waiting - one.running - one.waiting || one.tenant.localeCompare(other.tenant));
  const most = Math.max(8, ...tenants.map((one) => one.running + one.waiting));
  return html`<section class="panel live-queue" aria-label=${WORDS.heading}>
    <header class="live-panel-head"><h2>${WORDS.heading}</h2></header>
    ${tenants.length === 0 && html`<p class="muted">${WORDS.empty}</p>`}
    <ul>
      ${tenants.slice(0, MOST).map(
        ({ tenant, running, waiting }) => html`<li key=${tenant} data-tenant=${tenant}>
          <span class="live-adapter">${tenant}</span>
          <span class="live-queue-bar" role="img" aria-label=${WORDS.row(running, waiting)} title=${WORDS.row(running, waiting)}>
            <i class="running" style=${{ width: `${(100 * running) / most}%` }}></i><i class="waiting" style=${{ width: `${(100 * waiting) / most}%` }}></i>
          </span>
          <span class="live-queue-words">${running}${waiting ? html` <span class="muted">+${waiting}</span>` : ""}</span>
        </li>`,
      )}
    </ul>
    <ul class="live-key"><li><i class="running"></i>${WORDS.running}</li><li><i class="waiting"></i>${WORDS.waiting}</li></ul>
  </section>`;
}
