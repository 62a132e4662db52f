/** An answer, token by token: coloured by log-probability, with what else might have come on hover and by the arrow keys. */

import { html, useMemo, useRef, useState } from "../../vendor/preact.js";
import { percent } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { levelOf } from "./shade.js";

/** @typedef {import("./types.js").Token} Token */

const T = TEXTS.playground;
const BLOCK = 64; // tokens; a whole block is made once

/**
 * The tokens of one channel of an answer, one stop of the tab key.
 * @param {{ id: string, label: string, tokens: Token[], isShaded: boolean }} props
 */
export function Tokens({ id, label, tokens, isShaded }) {
  const [active, setActive] = useState(/** @type {HTMLElement | null} */ (null));
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const token = active && tokens[Number(active.dataset.at)];
  const show = (/** @type {any} */ event) => setActive(event.target.closest("[data-at]"));
  const hide = () => setActive(null);
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => move(event, box.current, hide);
  const blocks = [];
  for (let at = 0; at < tokens.length; at += BLOCK) {
    const part = tokens.slice(at, at + BLOCK);
    blocks.push(html`<${Block} key=${at} first=${at} tokens=${part} num=${part.length} isShaded=${isShaded} tip="${id}-tip" />`);
  }
  return html`<div class="answer-tokens" ref=${box} role="group" aria-label=${label} onPointerOver=${show} onPointerLeave=${hide}
    onFocusIn=${show} onFocusOut=${hide} onKeyDown=${onKeyDown}>
    ${blocks}
    <div id="${id}-tip" role="tooltip" class="token-tip" hidden=${!token} style=${place(active, box.current)}>${token && html`<${Odds} token=${token} />`}</div>
  </div>`;
}

/** @param {{ first: number, tokens: Token[], num: number, isShaded: boolean, tip: string }} props */
function Block({ first, tokens, num, isShaded, tip }) {
  return useMemo(
    () =>
      tokens.map(({ text, logprob }, index) => {
        const level = isShaded ? levelOf(logprob) : 0;
        return html`<span key=${index} class="token" data-at=${first + index} data-level=${level} tabindex=${first + index ? -1 : 0} aria-describedby=${tip}>${text}</span>`;
      }),
    [num, isShaded],
  );
}

/** The token's probability, and the likeliest ones in its place. @param {{ token: Token }} props */
function Odds({ token }) {
  if (token.logprob === null) return html`<p>${T.noLogprob}</p>`;
  return html`<p><b>${spelled(token.text)}</b> ${odds(token.logprob)}</p>
    <ol>
      ${token.alternatives.map((one, at) => html`<li key=${at}><span>${spelled(one.text)}</span><span class="figure">${odds(one.logprob)}</span></li>`)}
    </ol>`;
}

/** @param {number} logprob */
function odds(logprob) {
  const part = Math.exp(logprob);
  return `${part < 1e-4 ? T.hardly : percent(part)} (${logprob.toFixed(2)})`;
}

/**
 * A token's text with its blanks visible.
 * @param {string} text
 */
function spelled(text) {
  return JSON.stringify(text);
}

/**
 * @param {HTMLElement | null} token
 * @param {HTMLElement | null} box
 */
function place(token, box) {
  if (!token || !box) return {};
  const left = Math.max(0, Math.min(token.offsetLeft, box.clientWidth - 240));
  return { left: `${left}px`, top: `${token.offsetTop + token.offsetHeight + 4}px` };
}

/**
 * @param {KeyboardEvent} event
 * @param {HTMLElement | null} box
 * @param {() => void} hide
 */
function move(event, box, hide) {
  if (event.key === "Escape") return hide();
  const all = /** @type {HTMLElement[]} */ ([...(box?.querySelectorAll("[data-at]") ?? [])]);
  const at = all.indexOf(/** @type {HTMLElement} */ (document.activeElement));
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (to === undefined || !all[to]) return undefined;
  event.preventDefault();
  return all[to].focus();
}
