import { html, useId } from "../vendor/preact.js";

/**
 * @typedef {object} Labelled
 * @property {string} label
 * @property {any} [hint]  Below the field.
 * @property {string} [error]  In words; the field is marked.
 * @property {boolean} [isHidden]  The label is for screen readers alone.
 * @property {boolean} [disabled]
 * @property {string} [name]
 */

/** @param {Labelled & {id: string, children?: any}} props */
function Frame({ id, label, hint, error, isHidden, children }) {
  return html`<div class="field">
    <label for=${id} class=${isHidden ? "hidden" : ""}>${label}</label>
    ${children} ${hint ? html`<p class="hint" id=${`${id}-hint`}>${hint}</p>` : null}
    ${error ? html`<p class="field-error" id=${`${id}-error`}>${error}</p>` : null}
  </div>`;
}

/** @param {string} id @param {Labelled} props */
function describedBy(id, { hint, error }) {
  return [hint ? `${id}-hint` : "", error ? `${id}-error` : ""].filter(Boolean).join(" ") || undefined;
}

/**
 * A line of text, a number or a secret.
 * @param {Labelled & {value: string|number, onInput: (value: string) => void, type?: string, placeholder?: string,
 *         min?: number, max?: number, step?: number|string, required?: boolean, autocomplete?: string, list?: string[],
 *         isFocused?: boolean}} props  `list`: suggestions.
 */
export function TextField(props) {
  const id = useId();
  const { value, onInput, type = "text", placeholder, min, max, step, required, autocomplete = "off", list, disabled, name, error } = props;
  return html`<${Frame} ...${props} id=${id}>
    <input
      ...${{ id, type, value, placeholder, min, max, step, required, autocomplete, disabled, name }}
      autofocus=${props.isFocused}
      spellcheck=${false}
      list=${list ? `${id}-list` : undefined}
      aria-invalid=${error ? "true" : undefined}
      aria-describedby=${describedBy(id, props)}
      onInput=${(/** @type {any} */ event) => onInput(event.currentTarget.value)}
    />
    ${list ? html`<datalist id=${`${id}-list`}>${list.map((one) => html`<option key=${one} value=${one} />`)}</datalist>` : null}
  <//>`;
}

/**
 * Several lines of text.
 * @param {Labelled & {value: string, onInput: (value: string) => void, rows?: number, placeholder?: string,
 *         isCode?: boolean, onKeyDown?: (event: KeyboardEvent) => void}} props
 */
export function AreaField(props) {
  const id = useId();
  const { value, onInput, rows = 4, placeholder, isCode = false, disabled, name, error, onKeyDown } = props;
  return html`<${Frame} ...${props} id=${id}>
    <textarea
      ...${{ id, value, rows, placeholder, disabled, name, onKeyDown }}
      class=${isCode ? "code" : ""}
      spellcheck=${false}
      aria-invalid=${error ? "true" : undefined}
      aria-describedby=${describedBy(id, props)}
      onInput=${(/** @type {any} */ event) => onInput(event.currentTarget.value)}
    ></textarea>
  <//>`;
}

/**
 * One of some choices.
 * @param {Labelled & {value: string, onChange: (value: string) => void, choices: {value: string, label: string}[]}} props
 */
export function SelectField(props) {
  const id = useId();
  const { value, onChange, choices, disabled, name } = props;
  return html`<${Frame} ...${props} id=${id}>
    <select
      ...${{ id, value, disabled, name }}
      aria-describedby=${describedBy(id, props)}
      onChange=${(/** @type {any} */ event) => onChange(event.currentTarget.value)}
    >
      ${choices.map((one) => html`<option key=${one.value} value=${one.value} selected=${one.value === value}>${one.label}</option>`)}
    </select>
  <//>`;
}

/** Yes or no. @param {Labelled & {checked: boolean, onChange: (checked: boolean) => void}} props */
export function CheckField({ label, hint, checked, onChange, disabled, name }) {
  const id = useId();
  return html`<div class="field check">
    <input
      ...${{ id, type: "checkbox", checked, disabled, name }}
      aria-describedby=${hint ? `${id}-hint` : undefined}
      onChange=${(/** @type {any} */ event) => onChange(event.currentTarget.checked)}
    />
    <label for=${id}>${label}</label>
    ${hint ? html`<p class="hint" id=${`${id}-hint`}>${hint}</p>` : null}
  </div>`;
}

/**
 * A number between two, by hand or arrow keys; `show` writes it out.
 * @param {Labelled & {value: number, onInput: (value: number) => void, min: number, max: number, step?: number,
 *         show?: (value: number) => string}} props
 */
export function RangeField(props) {
  const id = useId();
  const { value, onInput, min, max, step = 1, show = String, disabled, name } = props;
  return html`<${Frame} ...${props} id=${id}>
    <div class="range">
      <input
        ...${{ id, type: "range", value, min, max, step, disabled, name }}
        aria-valuetext=${show(value)}
        aria-describedby=${describedBy(id, props)}
        onInput=${(/** @type {any} */ event) => onInput(Number(event.currentTarget.value))}
      />
      <output for=${id}>${show(value)}</output>
    </div>
  <//>`;
}
