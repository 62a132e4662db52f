import { Button } from "../../components/button.js";
import { AreaField, SelectField } from "../../components/field.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";

/** @typedef {import("./types.js").Play} Play */

const T = TEXTS.playground;

/**
 * The prompt that all columns share, with the buttons that run and stop them.
 * @param {{ play: Play, isBusy: boolean, onChange: (news: Partial<Play>) => void, onRun: () => void, onStop: () => void, children?: any }} props
 */
export function PromptForm({ play, isBusy, onChange, onRun, onStop, children }) {
  const isChat = play.mode === "chat";
  const onKeyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    onRun();
  };
  const choices = [
    { value: "chat", label: T.chat },
    { value: "completion", label: T.completion },
  ];
  return html`<section class="panel prompt-form" aria-label=${T.prompt}>
    <${SelectField} label=${T.mode} isHidden=${true} value=${play.mode} choices=${choices} onChange=${(/** @type {any} */ mode) => onChange({ mode })} />
    ${isChat && html`<${AreaField} label=${T.system} rows=${1} value=${play.system} placeholder=${T.systemHint} onInput=${(/** @type {string} */ system) => onChange({ system })} onKeyDown=${onKeyDown} />`}
    <${AreaField} label=${T.prompt} rows=${3} value=${play.prompt} hint=${T.runHint} onInput=${(/** @type {string} */ prompt) => onChange({ prompt })} onKeyDown=${onKeyDown} />
    <div class="buttons">
      <${Button} kind="primary" onClick=${onRun}>${T.run}<//>
      <${Button} disabled=${!isBusy} onClick=${onStop}>${T.stopAll}<//>
      ${children}
    </div>
  </section>`;
}
