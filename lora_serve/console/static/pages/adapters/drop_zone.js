import { Button } from "../../components/button.js";
import { TEXTS } from "../../texts.js";
import { html, useRef, useState } from "../../vendor/preact.js";
import { chosenFiles } from "./dropped.js";

/**
 * The place to drop on, with buttons that choose the same. Drops themselves are the page's.
 * @param {{chosen: import("./dropped.js").Chosen|null, error: string, onChosen: (found: import("./register.js").Dropped) => void}} props
 */
export function DropZone({ chosen, error, onChosen }) {
  const words = TEXTS.adapters;
  const [isOver, setOver] = useState(false);
  return html`<div
    class=${`drop-zone ${isOver ? "over" : ""}`}
    role="group"
    aria-label=${words.drop}
    onDragEnter=${() => setOver(true)}
    onDragLeave=${() => setOver(false)}
    onDrop=${() => setOver(false)}
  >
    ${chosen ? html`<strong>${summary(chosen)}</strong>` : html`<strong>${words.drop}</strong>`}
    ${chosen?.leftOut.length ? html`<p class="hint">${words.leftOut(chosen.leftOut)}</p>` : null}
    ${error ? html`<p class="field-error" role="alert">${error}</p>` : null}
    <div class="row">
      <${Chooser} label=${words.chooseFolder} isFolder=${true} onChosen=${onChosen} />
      <${Chooser} label=${words.chooseArchive} isFolder=${false} onChosen=${onChosen} />
    </div>
    <p class="hint">${words.dropHint}</p>
  </div>`;
}

/** @param {{label: string, isFolder: boolean, onChosen: (found: import("./register.js").Dropped) => void}} props */
function Chooser({ label, isFolder, onChosen }) {
  const input = useRef(/** @type {HTMLInputElement|null} */ (null));
  const take = () => {
    const files = [...(input.current?.files ?? [])];
    if (!files.length) return;
    try {
      onChosen({ chosen: chosenFiles(files.map((file) => ({ path: file.webkitRelativePath || file.name, file }))), error: "" });
    } catch (error) {
      onChosen({ chosen: null, error: error instanceof Error ? error.message : String(error) });
    }
  };
  return html`<${Button} onClick=${() => input.current?.click()}>${label}<//>
    <input ref=${input} type="file" hidden aria-label=${label} webkitdirectory=${isFolder} accept=${isFolder ? undefined : ".tar,.gz,.tgz,.zip"} onChange=${take} />`;
}

/** @param {import("./dropped.js").Chosen} chosen */
function summary(chosen) {
  const words = TEXTS.adapters;
  return chosen.archive ? words.chosenArchive(chosen.name, chosen.size) : words.chosenFolder(chosen.name, chosen.files.length, chosen.size);
}
