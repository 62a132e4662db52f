import { TEXTS } from "../texts.js";
import { html, useState } from "../vendor/preact.js";
import { Button } from "./button.js";
import { Dialog } from "./dialog.js";
import { ErrorNote } from "./error.js";
import { TextField } from "./field.js";

/**
 * Asks before an act that cannot be taken back. Stays open, with the error in words, if the act fails.
 * @param {{title: string, text: any, action: string, onConfirm: () => Promise<void>|void, onClose: () => void,
 *          expected?: string, isDanger?: boolean, children?: any}} props  `expected`: must be typed first.
 */
export function Confirm({ title, text, action, onConfirm, onClose, expected = "", isDanger = true, children }) {
  const [typed, setTyped] = useState("");
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState(/** @type {any} */ (null));
  const act = async () => {
    setBusy(true);
    try {
      await onConfirm();
      onClose();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  };
  const footer = html`<${Button} onClick=${onClose}>${TEXTS.common.cancel}<//>
    <${Button} kind=${isDanger ? "danger" : "primary"} isBusy=${isBusy} disabled=${typed !== expected} onClick=${act}>${action}<//>`;
  return html`<${Dialog} title=${title} onClose=${onClose} footer=${footer}>
    <p>${text}</p>
    ${expected ? html`<${TextField} label=${TEXTS.common.typeToConfirm(expected)} value=${typed} onInput=${setTyped} />` : null}
    ${children} ${error ? html`<${ErrorNote} error=${error} />` : null}
  <//>`;
}
