import { html, useEffect, useState } from "../vendor/preact.js";

/** @typedef {{id: number, text: string, kind: "good"|"bad"|"plain"}} Note */

const SHOWN_MS = 6000;
/** @type {Set<(note: Note) => void>} */
const listeners = new Set();
let last = 0;

/** Says something for some seconds, wherever the person is. @param {string} text @param {"good"|"bad"|"plain"} [kind] */
export function toast(text, kind = "plain") {
  last += 1;
  for (const listener of listeners) listener({ id: last, text, kind });
}

/** The place where toasts appear; the shell has one. */
export function Toasts() {
  const [notes, setNotes] = useState(/** @type {Note[]} */ ([]));
  useEffect(() => {
    const add = (/** @type {Note} */ note) => {
      setNotes((known) => [...known.slice(-3), note]);
      setTimeout(() => setNotes((known) => known.filter((one) => one.id !== note.id)), SHOWN_MS);
    };
    listeners.add(add);
    return () => void listeners.delete(add);
  }, []);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${notes.map((note) => html`<p key=${note.id} class=${`toast ${note.kind}`}>${note.text}</p>`)}
  </div>`;
}
