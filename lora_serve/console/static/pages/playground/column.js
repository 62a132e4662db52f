import { Button } from "../../components/button.js";
import { ErrorNote } from "../../components/error.js";
import { useChanges } from "../../lib/changes.js";
import { TEXTS } from "../../texts.js";
import { html } from "../../vendor/preact.js";
import { Tokens } from "./answer.js";
import { CodeForms } from "./code_forms.js";
import { Facts } from "./facts.js";
import { FieldError, nameOf } from "./request.js";
import { SettingsFields } from "./settings_fields.js";
import { Target } from "./target.js";
import { Timings } from "./timings.js";

/** @typedef {import("./types.js").Column} Column */
/** @typedef {import("./types.js").Play} Play */
/** @typedef {import("./run.js").Run} Run */

const T = TEXTS.playground;

/**
 * One column: whom it asks and how, and what came.
 * @param {{ number: number, play: Play, column: Column, models: import("./models.js").Model[], run: Run | null, error: Error | null, isShaded: boolean,
 *   onChange: (news: Partial<Column>) => void, onRemove: (() => void) | null, onCopy: (() => void) | null }} props
 */
export function ColumnCard({ number, play, column, models, run, error, isShaded, onChange, onRemove, onCopy }) {
  const label = T.column(number);
  return html`<section class="panel column" aria-label=${label} data-column=${number} data-model=${titleOf(column)}>
    <header>
      <h2>${label}</h2>
      <div class="buttons">
        ${onCopy && html`<${Button} kind="quiet" label=${T.copyColumn(number)} onClick=${onCopy}>${T.duplicate}<//>`}
        ${onRemove && html`<${Button} kind="quiet" label=${T.removeColumn(number)} onClick=${onRemove}>${T.remove}<//>`}
      </div>
    </header>
    <${Target} column=${column} number=${number} models=${models} onChange=${onChange} />
    <${SettingsFields} column=${column} isChat=${play.mode === "chat"} onChange=${onChange} />
    ${error && html`<${ErrorNote} error=${inWords(error)} />`} ${run && html`<${Outcome} key=${run} ...${{ run, number, isShaded }} />`}
    <${CodeForms} play=${play} column=${column} />
  </section>`;
}

/** @param {{ run: Run, number: number, isShaded: boolean }} props */
function Outcome({ run, number, isShaded }) {
  useChanges(run);
  const { tokens, calls } = run.answer;
  const thoughts = tokens.filter((token) => token.channel === "reasoning");
  const said = thoughts.length ? tokens.filter((token) => token.channel === "content") : tokens;
  const id = `answer-${number}`;
  return html`<div class="outcome" data-state=${run.state}>
    <div class="outcome-head">
      <span role="status">${T.states[run.state]}</span>
      ${!run.isOver && html`<${Button} label=${T.stopColumn(number)} onClick=${() => run.stop()}>${T.stop}<//>`}
    </div>
    ${thoughts.length > 0 &&
    html`<details class="thoughts"><summary>${T.thoughts}</summary><${Tokens} id="${id}-thoughts" label=${T.thoughts} tokens=${thoughts} isShaded=${isShaded} /></details>`}
    ${said.length > 0 && html`<${Tokens} id=${id} label=${T.answerOf(number)} tokens=${said} isShaded=${isShaded} />`}
    ${calls.map((call, at) => html`<p key=${at} class="tool-call" data-call=${call.name}><b>${call.name}</b> <code>${call.arguments}</code></p>`)}
    ${run.isOver && !run.error && !said.length && !calls.length && html`<p class="muted">${T.nothing}</p>`} ${run.error && html`<${ErrorNote} error=${run.error} />`}
    <${Timings} run=${run} /><${Facts} run=${run} />
  </div>`;
}

/** @param {Column} column */
function titleOf(column) {
  return column.kind === "model" ? nameOf(column) : column.members.map((member) => member.id).join("+");
}

/** @param {Error} error */
function inWords(error) {
  const words = error instanceof FieldError ? T.fieldErrors[error.code] : undefined;
  return words && error instanceof FieldError ? new Error(words(T.fields[error.field] ?? error.field)) : error;
}
