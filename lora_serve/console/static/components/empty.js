import { TEXTS } from "../texts.js";
import { html } from "../vendor/preact.js";

/** The words where there is nothing to show. @param {{title: string, text?: any, children?: any}} props */
export function Empty({ title, text = "", children }) {
  return html`<div class="empty">
    <h2>${title}</h2>
    ${text ? html`<p>${text}</p>` : null} ${children}
  </div>`;
}

/** A place where something is being fetched. @param {{label?: string}} props */
export function Loading({ label = TEXTS.common.loading }) {
  return html`<div class="loading" role="status"><span class="spinner" aria-hidden="true"></span>${label}</div>`;
}
