import { TEXTS } from "../texts.js";
import { html, useEffect, useId, useRef } from "../vendor/preact.js";

/**
 * A modal dialog: the browser's own, which keeps the focus inside and gives it back at the end. Escape closes it.
 * It is open as long as it is rendered.
 * @param {{title: string, onClose: () => void, footer?: any, isWide?: boolean, children?: any}} props
 */
export function Dialog({ title, onClose, footer, isWide = false, children }) {
  const element = useRef(/** @type {HTMLDialogElement|null} */ (null));
  const id = useId();
  useEffect(() => {
    const dialog = element.current;
    const before = document.activeElement;
    if (dialog && !dialog.open) dialog.showModal();
    return () => {
      dialog?.close();
      if (before instanceof HTMLElement) before.focus();
    };
  }, []);
  return html`<dialog
    ref=${element}
    class=${isWide ? "dialog wide" : "dialog"}
    aria-labelledby=${id}
    onCancel=${(/** @type {Event} */ event) => {
      event.preventDefault();
      onClose();
    }}
  >
    <header>
      <h2 id=${id}>${title}</h2>
      <button class="button quiet" type="button" aria-label=${TEXTS.common.close} onClick=${onClose}>×</button>
    </header>
    <div class="dialog-body">${children}</div>
    ${footer ? html`<footer>${footer}</footer>` : null}
  </dialog>`;
}
