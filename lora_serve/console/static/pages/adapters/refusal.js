import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

const TENSOR = /[A-Za-z0-9_]+(?:\.[A-Za-z0-9_*]+){2,}/g; // base_model.model.layers.0.q_proj.lora_A.weight

/** Each reason of a 422 by itself, the tensor that it names set apart. @param {{reasons: string[], requestId: string|null}} props */
export function Refusal({ reasons, requestId }) {
  const words = TEXTS.adapters;
  return html`<div class="error-note" role="alert">
    <strong>${words.refused}: ${words.reasons(reasons.length)}</strong>
    <ul class="reasons">
      ${reasons.map((reason, at) => html`<li key=${at}>${marked(reason)}</li>`)}
    </ul>
    ${requestId ? html`<p class="request-id">${TEXTS.common.requestId(requestId)}</p>` : null}
  </div>`;
}

/** A text's parts, names of tensors as code. @param {string} reason */
function marked(reason) {
  const names = reason.match(TENSOR) ?? [];
  const parts = reason.split(TENSOR);
  return parts.map((part, at) => html`${part}${at < names.length ? html`<code>${names[at]}</code>` : null}`);
}
