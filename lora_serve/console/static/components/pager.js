import { TEXTS } from "../texts.js";
import { html } from "../vendor/preact.js";
import { Button } from "./button.js";

/**
 * Steps through a long list, which the API gives page by page (`after`).
 * @param {{text?: string, onPrevious?: (() => void)|null, onNext?: (() => void)|null, isBusy?: boolean}} props
 *   `text`: which part is shown; null in place of a function: there is no such page.
 */
export function Pager({ text = "", onPrevious = null, onNext = null, isBusy = false }) {
  return html`<nav class="pager" aria-label=${TEXTS.common.pages}>
    <${Button} disabled=${!onPrevious || isBusy} onClick=${onPrevious ?? undefined}>${TEXTS.common.previous}<//>
    <span aria-live="polite">${text}</span>
    <${Button} disabled=${!onNext || isBusy} onClick=${onNext ?? undefined}>${TEXTS.common.next}<//>
  </nav>`;
}
