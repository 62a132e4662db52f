import { Button } from "../../components/button.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { BOUNDS } from "./shade.js";

const T = TEXTS.playground;

/**
 * Turns the colours of tokens on and off, and says what they mean.
 * @param {{ isShaded: boolean, onChange: (isShaded: boolean) => void }} props
 */
export function Legend({ isShaded, onChange }) {
  return html`<div class="legend">
    <${Button} kind="quiet" pressed=${isShaded} title=${T.shadeHint} onClick=${() => onChange(!isShaded)}>${T.shade}<//>
    ${isShaded && [...BOUNDS, 0].map((bound, level) => html`<span key=${level} class="token" data-level=${level}>${bound ? T.atLeast(bound) : T.less}</span>`)}
  </div>`;
}
