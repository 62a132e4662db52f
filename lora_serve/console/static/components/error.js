import { ApiError } from "../lib/api.js";
import { TEXTS } from "../texts.js";
import { html } from "../vendor/preact.js";
import { Button } from "./button.js";

/**
 * An error in the server's own words, with what helps to find it in the log.
 * @param {{error: any, onRetry?: () => void, title?: string}} props
 */
export function ErrorNote({ error, onRetry, title }) {
  const words = error instanceof Error ? error.message : String(error);
  const id = error instanceof ApiError ? error.requestId : null;
  const wait = error instanceof ApiError ? error.retryAfter : null;
  return html`<div class="error-note" role="alert">
    ${title ? html`<strong>${title}</strong>` : null}
    <p>${words} ${wait ? TEXTS.common.retryAfter(wait) : ""}</p>
    ${id ? html`<p class="request-id">${TEXTS.common.requestId(id)}</p>` : null}
    ${onRetry ? html`<${Button} onClick=${onRetry}>${TEXTS.common.retry}<//>` : null}
  </div>`;
}
