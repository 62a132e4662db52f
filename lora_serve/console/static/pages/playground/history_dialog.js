import { Button } from "../../components/button.js";
import { Dialog } from "../../components/dialog.js";
import { CheckField } from "../../components/field.js";
import { ago } from "../../lib/format.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { fromText } from "./settings.js";

/** @typedef {import("./types.js").Play} Play */

const T = TEXTS.playground;

/**
 * What was run in this browser, to be run again.
 * @param {{ history: import("./history.js").History, onPick: (play: Play) => void, onClose: () => void }} props
 */
export function HistoryDialog({ history, onPick, onClose }) {
  const [, setRound] = useState(0);
  const again = () => setRound((round) => round + 1);
  const { entries } = history;
  const keep = (/** @type {boolean} */ isOn) => {
    history.isOn = isOn;
    again();
  };
  const clear = () => {
    history.clear();
    again();
  };
  const footer = html`<${Button} kind="danger" disabled=${!entries.length} onClick=${clear}>${T.clearHistory}<//>`;
  return html`<${Dialog} title=${T.history} onClose=${onClose} footer=${footer}>
    <${CheckField} label=${T.keepHistory} hint=${T.keepHistoryHint} checked=${history.isOn} onChange=${keep} />
    ${entries.length
      ? html`<ol class="history">
          ${entries.map(({ time, text }) => {
            const play = /** @type {Play} */ (fromText(text));
            return html`<li key=${time}><button type="button" onClick=${() => onPick(play)}>
              <span class="history-prompt">${play.prompt || T.emptyPrompt}</span>
              <span class="muted">${ago(time / 1000)}, ${T.numColumns(play.columns.length)}</span>
            </button></li>`;
          })}
        </ol>`
      : html`<p class="muted">${T.noHistory}</p>`}
  <//>`;
}
