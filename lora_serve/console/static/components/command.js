import { TEXTS } from "../texts.js";
import { html, useState } from "../vendor/preact.js";
import { Button } from "./button.js";
import { toast } from "./toast.js";

/**
 * An act as it is typed into a terminal, to copy.
 * @param {{curl?: string, cli?: string, more?: {label: string, text: string}[], isOpen?: boolean}} props  `more`: other forms.
 */
export function Command({ curl, cli, more = [], isOpen = false }) {
  const forms = [
    ...(curl ? [{ label: TEXTS.common.asCurl, text: curl }] : []),
    ...(cli ? [{ label: TEXTS.common.asCli, text: cli }] : []),
    ...more,
  ];
  return html`<details class="command" open=${isOpen}>
    <summary>${TEXTS.common.commands}</summary>
    <p class="hint">${TEXTS.common.commandKeys}</p>
    ${forms.map(({ label, text }) => html`<${Line} key=${label} ...${{ label, text }} />`)}
  </details>`;
}

/** @param {{label: string, text: string}} props */
function Line({ label, text }) {
  return html`<div class="command-line">
    <span class="command-name">${label}</span>
    <pre tabindex="0" role="region" aria-label=${label}><code>${text}</code></pre>
    <${CopyButton} text=${text} />
  </div>`;
}

/** A button that copies a text. @param {{text: string, label?: string}} props */
export function CopyButton({ text, label = TEXTS.common.copy }) {
  const [isDone, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setDone(true);
      setTimeout(() => setDone(false), 2000);
    } catch {
      toast(TEXTS.common.notCopied, "bad");
    }
  };
  return html`<${Button} kind="quiet" onClick=${copy}>${isDone ? TEXTS.common.copied : label}<//>`;
}
