import { Button } from "../../components/button.js";
import { Dialog } from "../../components/dialog.js";
import { ErrorNote } from "../../components/error.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";

/**
 * A form whose act may fail: then it stays open and says why.
 * @param {{ title: string, action: string, isEnabled: boolean, onAct: () => Promise<void>, onClose: () => void, children?: any }} props
 */
export function ActDialog({ title, action, isEnabled, onAct, onClose, children }) {
  const [isBusy, setBusy] = useState(false);
  const [error, setError] = useState(/** @type {any} */ (null));
  const act = async () => {
    setBusy(true);
    setError(null);
    try {
      await onAct();
    } catch (failed) {
      setError(failed);
    } finally {
      setBusy(false);
    }
  };
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (isEnabled && !isBusy) act();
  };
  const close = () => isBusy || onClose(); // what the act made would be shown to nobody
  const footer = html`<${Button} onClick=${close}>${TEXTS.common.cancel}<//>
    <${Button} kind="primary" isBusy=${isBusy} disabled=${!isEnabled} onClick=${act}>${action}<//>`;
  return html`<${Dialog} title=${title} onClose=${close} footer=${footer}>
    <form onSubmit=${submit}>${children}<button type="submit" hidden></button></form>
    ${error && html`<${ErrorNote} error=${error} />`}
  <//>`;
}
