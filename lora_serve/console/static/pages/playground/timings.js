/** The bar of an answer's time, and the figures beside it. */

import { html } from "../../vendor/preact.js";
import { ms, number } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { firstTokenMs, partsOf, tokensPerSecond } from "./timing.js";

const T = TEXTS.playground;

/** @param {{ run: import("./run.js").Run }} props */
export function Timings({ run }) {
  if (!run.headers) return null;
  const parts = partsOf(run.told, run.times);
  const total = parts.reduce((sum, part) => sum + (part.ms ?? 0), 0) || 1;
  const words = parts.map((part) => `${T.parts[part.name]} ${ms(part.ms)}${part.isMeasured ? ` (${T.measured})` : ""}`);
  return html`<div class="timings">
    <div class="timing-bar" role="img" aria-label=${words.join(", ")}>
      ${parts.map(({ name, ms: took }) => html`<span key=${name} data-part=${name} title=${`${T.parts[name]} ${ms(took)}`} style=${{ flexGrow: (took ?? 0) / total }}></span>`)}
    </div>
    <ul class="timing-parts">
      ${parts.map(
        ({ name, ms: took, isMeasured }) =>
          html`<li key=${name} data-part=${name}><span class="swatch"></span>${T.parts[name]} <b class="figure">${ms(took)}</b>${isMeasured && html` <span class="muted">${T.measured}</span>`}</li>`,
      )}
    </ul>
    <dl class="figures">
      <div><dt>${T.firstToken}</dt><dd data-figure="first-token">${ms(firstTokenMs(run.times))}</dd></div>
      <div><dt>${T.speed}</dt><dd data-figure="speed">${number(tokensPerSecond(run.times))} ${T.tokensPerSecond}</dd></div>
      <div><dt>${T.tokens}</dt><dd data-figure="tokens">${number(run.times.numTokens)}</dd></div>
      ${run.answer.usage && html`<div><dt>${T.promptTokens}</dt><dd>${number(run.answer.usage.prompt_tokens)}${cached(run.answer.usage)}</dd></div>`}
    </dl>
  </div>`;
}

/** @param {any} usage */
function cached(usage) {
  const num = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return num ? ` (${T.cached(number(num))})` : "";
}
