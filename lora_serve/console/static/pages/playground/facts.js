/** Who answered: adapter, version, digest and server, as the answer's headers say. */

import { html } from "../../vendor/preact.js";
import { colourOf } from "../../lib/colour.js";
import { shortDigest } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";

const T = TEXTS.playground;
const BASE = "base"; // the base model's in place of a digest

/** @param {{ run: import("./run.js").Run }} props */
export function Facts({ run }) {
  const { headers, answer } = run;
  if (!headers) return null;
  const each = (/** @type {string} */ name) => (headers.get(name) ?? "").split(",").filter(Boolean);
  const [versions, digests, scales] = [each("X-Adapter-Version"), each("X-Adapter-Digest"), each("X-Adapter-Scale")];
  const adapters = each("X-Adapter-Id").map((id, at) => ({ id: named(id), version: versions[at], digest: digests[at], scale: scales[at] }));
  return html`<dl class="answered-by">
    <div>
      <dt>${T.answeredBy}</dt>
      <dd>
        ${adapters.map(
          ({ id, version, digest, scale }) =>
            html`<span key=${digest} class="by" data-adapter=${id} data-digest=${digest} title=${digest}><span class="dot" style=${{ background: colourOf(digest) }}></span
              >${digest === BASE ? id : `${id}@${version}`} <span class="muted">${digest === BASE ? T.base : shortDigest(digest)}${scale ? ` × ${scale}` : ""}</span></span>`,
        )}
        ${!adapters.length && html`<span class="by" data-adapter=""><span class="dot" style=${{ background: colourOf("base") }}></span>${answer.model || T.base}</span>`}
      </dd>
    </div>
    ${fact(T.servedBy, headers.get("X-Served-By"))} ${fact(T.fallback, headers.get("X-Adapter-Fallback"))}
    ${fact(T.ended, answer.finish && (T.reasons[answer.finish] ?? answer.finish))} ${fact(T.request, requestId(headers.get("X-Request-Id")))}
  </dl>`;
}

/**
 * @param {string} name
 * @param {any} value
 */
function fact(name, value) {
  return value ? html`<div><dt>${name}</dt><dd>${value}</dd></div>` : null;
}

/** @param {string | null} id */
function requestId(id) {
  return id && html`<code class="request-id one-line" title=${id}>${id}</code>`;
}

/** @param {string} id */
function named(id) {
  try {
    return decodeURIComponent(id);
  } catch {
    return id;
  }
}
