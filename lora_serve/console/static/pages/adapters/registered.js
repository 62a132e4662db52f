import { Button } from "../../components/button.js";
import { Dialog } from "../../components/dialog.js";
import { link } from "../../lib/router.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/** The end of a registration: its version, what the probe showed, its warnings. @param {{card: any, onAnother: () => void, onClose: () => void}} props */
export function Registered({ card, onAnother, onClose }) {
  const words = TEXTS.adapters;
  const newest = card.versions.reduce((/** @type {any} */ one, /** @type {any} */ other) => (other.version > one.version ? other : one));
  const footer = html`<${Button} onClick=${onAnother}>${words.another}<//>
    <a class="button primary" href=${link("adapters", card.id)} onClick=${onClose}>${words.openCard}</a>`;
  return html`<${Dialog} title=${words.registered} onClose=${onClose} footer=${footer}>
    <p>${words.registeredText(card.id, newest.version, newest.version === card.version)}</p>
    ${newest.probe ? html`<p>${words.probeText(newest.probe.max_logit_change, newest.probe.max_logit)}</p>` : null}
    <${Warnings} warnings=${[...new Set([...card.warnings, ...newest.warnings])]} />
  <//>`;
}

/** @param {{warnings: string[]}} props */
export function Warnings({ warnings }) {
  if (!warnings.length) return null;
  return html`<ul class="notice warnings" aria-label=${TEXTS.adapters.warnings}>
    ${warnings.map((one) => html`<li key=${one}>${one}</li>`)}
  </ul>`;
}
