import { html, useId, useRef } from "../vendor/preact.js";

/**
 * Tabs, by mouse and arrow keys; the panel holds what belongs to the selected one.
 * @param {{label: string, tabs: {id: string, label: any}[], selected: string, onSelect: (id: string) => void, children?: any}} props
 */
export function Tabs({ label, tabs, selected, onSelect, children }) {
  const id = useId();
  const list = useRef(/** @type {HTMLDivElement|null} */ (null));
  const move = (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = tabs.findIndex((one) => one.id === selected);
    const next = tabs[(at + step + tabs.length) % tabs.length];
    if (!next) return;
    onSelect(next.id);
    /** @type {HTMLElement|null|undefined} */ (list.current?.querySelector(`[data-tab="${CSS.escape(next.id)}"]`))?.focus();
  };
  return html`<div class="tabs">
    <div class="tab-list" role="tablist" aria-label=${label} ref=${list} onKeyDown=${move}>
      ${tabs.map(
        (one) => html`<button
          key=${one.id}
          type="button"
          role="tab"
          id=${`${id}-${one.id}`}
          data-tab=${one.id}
          aria-selected=${String(one.id === selected)}
          aria-controls=${`${id}-panel`}
          tabindex=${one.id === selected ? 0 : -1}
          onClick=${() => onSelect(one.id)}
        >
          ${one.label}
        </button>`,
      )}
    </div>
    <div role="tabpanel" id=${`${id}-panel`} aria-labelledby=${`${id}-${selected}`}>${children}</div>
  </div>`;
}
