import { Button } from "../../components/button.js";
import { CopyButton } from "../../components/command.js";
import { Dialog } from "../../components/dialog.js";
import { AreaField } from "../../components/field.js";
import { TEXTS } from "../../texts.js";
import { html, useState } from "../../vendor/preact.js";
import { fromText, toText } from "./settings.js";

/** @typedef {import("./types.js").Play} Play */

const T = TEXTS.playground;

/**
 * The prompt and its columns as text, to send to somebody, or to take over from somebody.
 * @param {{ play: Play, onLoad: (play: Play) => void, onClose: () => void }} props
 */
export function ShareDialog({ play, onLoad, onClose }) {
  const own = toText(play);
  const [text, setText] = useState(own);
  const [error, setError] = useState("");
  const load = () => {
    const found = fromText(text);
    if (found?.columns.length) onLoad(found);
    else setError(T.notSettings);
  };
  const footer = html`<${CopyButton} text=${text} /> <${Button} kind="primary" disabled=${text === own} onClick=${load}>${T.load}<//>`;
  return html`<${Dialog} title=${T.share} isWide=${true} onClose=${onClose} footer=${footer}>
    <p>${T.shareHint}</p>
    <${AreaField} label=${T.settingsText} isCode=${true} rows=${14} value=${text} error=${error} onInput=${setText} />
  <//>`;
}
