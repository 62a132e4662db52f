import { Command } from "../../components/command.js";
import { apiBase, curlOf } from "../../lib/cli.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { pythonOf } from "./code.js";
import { requestOf } from "./request.js";

/**
 * A column's request as curl and as a program of openai-python, to copy.
 * @param {{ play: import("./types.js").Play, column: import("./types.js").Column }} props
 */
export function CodeForms({ play, column }) {
  const ask = requested(play, column);
  if (!ask) return null;
  const base = apiBase();
  const curl = curlOf({ method: "POST", path: ask.path, body: ask.body }, base);
  const python = pythonOf(ask, new URL("v1", base).href);
  return html`<${Command} curl=${curl} more=${[{ label: TEXTS.playground.openaiPython, text: python }]} />`;
}

/**
 * @param {import("./types.js").Play} play
 * @param {import("./types.js").Column} column
 */
function requested(play, column) {
  try {
    return requestOf(play, column);
  } catch {
    return null; // the run says why
  }
}
