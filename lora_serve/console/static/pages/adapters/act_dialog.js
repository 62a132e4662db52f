import { Command } from "../../components/command.js";
import { Confirm } from "../../components/confirm.js";
import { toast } from "../../components/toast.js";
import { useApi } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { commandsOf, perform } from "./acts.js";

/**
 * @typedef {object} Asked  An act that waits for its confirmation.
 * @property {string} name  Of the button.
 * @property {string} text  What will be.
 * @property {import("./acts.js").Act} act
 * @property {boolean} [isDanger]
 * @property {string} [expected]  Must be typed first.
 */

/**
 * Says what an act will do, shows it as curl and as a command, then does it.
 * @param {{asked: Asked, onClose: () => void, onDone: (answer: any) => void}} props
 */
export function ActDialog({ asked, onClose, onDone }) {
  const api = useApi();
  const act = async () => {
    const answer = await perform(api, asked.act);
    toast(TEXTS.adapters.done(asked.name), "good");
    onDone(answer);
  };
  return html`<${Confirm}
    title=${asked.name}
    text=${asked.text}
    action=${asked.name}
    isDanger=${asked.isDanger ?? false}
    expected=${asked.expected ?? ""}
    onConfirm=${act}
    onClose=${onClose}
  >
    <${Command} ...${commandsOf(asked.act)} isOpen=${true} />
  <//>`;
}
