/** A field that finds a model by parts of its name, among what the caller may use. */

import { html, useRef, useState } from "../../vendor/preact.js";
import { colourOf } from "../../lib/colour.js";
import { TEXTS } from "../../texts.js";

/** @typedef {import("./models.js").Model} Model */

const T = TEXTS.playground;
const MAX_SHOWN = 50;

/**
 * The models whose names hold all words of a text, those that begin with it first.
 * @param {Model[]} models
 * @param {string} text
 */
export function matching(models, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = models.filter(({ id }) => words.every((word) => id.toLowerCase().includes(word)));
  const first = words[0] ?? "";
  const begins = (/** @type {Model} */ model) => (model.id.toLowerCase().startsWith(first) ? 0 : 1);
  return found.sort((one, other) => begins(one) - begins(other));
}

/**
 * A combobox (https://www.w3.org/WAI/ARIA/apg/patterns/combobox/): what is typed stands, whether it is in the list or not.
 * @param {{ id: string, label: string, models: Model[], value: string, onPick: (name: string) => void }} props
 */
export function Picker({ id, label, models, value, onPick }) {
  const [text, setText] = useState(/** @type {string | null} */ (null)); // null: nobody searches
  const [at, setAt] = useState(0);
  const list = useRef(/** @type {HTMLElement | null} */ (null));
  const found = text === null ? [] : matching(models, text);
  const shown = found.slice(0, MAX_SHOWN);
  const pick = (/** @type {string} */ name) => {
    setText(null);
    if (name !== value) onPick(name);
  };
  const move = (/** @type {number} */ to) => {
    const next = Math.max(0, Math.min(shown.length - 1, to));
    setAt(next);
    list.current?.children[next]?.scrollIntoView({ block: "nearest" });
  };
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape" && text !== null) setText(null);
    else if (event.key === "Enter" && text !== null) pick(shown[at]?.id ?? text.trim());
    else if (event.key === "ArrowDown") text === null ? setText("") : move(at + 1);
    else if (event.key === "ArrowUp" && text !== null) move(at - 1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  const onInput = (/** @type {any} */ event) => {
    setText(event.currentTarget.value);
    setAt(0);
  };
  const onClick = () => text === null && setText("");
  const onBlur = () => text !== null && pick(text.trim() || value);
  const isOpen = shown.length > 0;
  return html`<div class="picker">
    <input id=${id} type="text" role="combobox" aria-label=${label} aria-autocomplete="list" aria-expanded=${isOpen} aria-controls="${id}-list"
      aria-activedescendant=${isOpen ? `${id}-${at}` : undefined} autocomplete="off" spellcheck=${false} placeholder=${value || T.search}
      value=${text ?? value} onFocus=${(/** @type {any} */ event) => event.currentTarget.select()} onClick=${onClick} onInput=${onInput} onKeyDown=${onKeyDown} onBlur=${onBlur} />
    <ul id="${id}-list" ref=${list} role="listbox" aria-label=${label} hidden=${!isOpen}>
      ${shown.map(
        (model, index) => html`<li id="${id}-${index}" key=${model.id} role="option" aria-selected=${index === at} data-model=${model.id}
          onPointerDown=${(/** @type {Event} */ event) => (event.preventDefault(), pick(model.id))}>
          <span class="dot" style=${{ background: colourOf(model.parent ? model.digest : "base") }}></span>${model.id}
        </li>`,
      )}
      ${found.length > shown.length && html`<li class="muted" role="option" aria-selected="false" aria-disabled="true">${T.more(found.length - shown.length)}</li>`}
    </ul>
  </div>`;
}
