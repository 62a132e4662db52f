import { Button } from "../../components/button.js";
import { Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { useRoute } from "../../lib/router.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useEffect, useMemo, useRef, useState } from "../../vendor/preact.js";
import { ColumnCard } from "./column.js";
import { History, storage } from "./history.js";
import { HistoryDialog } from "./history_dialog.js";
import { Legend } from "./legend.js";
import { useModels } from "./models.js";
import { PromptForm } from "./prompt.js";
import { MAX_COLUMNS, newColumn, requestOf, streamed } from "./request.js";
import { Run } from "./run.js";
import { fromText } from "./settings.js";
import { ShareDialog } from "./share_dialog.js";

/** @typedef {import("./types.js").Column} Column */
/** @typedef {import("./types.js").Play} Play */
/** @typedef {import("./models.js").Model} Model */

const T = TEXTS.playground;
const FIRST_COLUMNS = 3;

/** The page "Playground": one prompt to several columns at once. */
export function Page() {
  const { data: models, error, reload } = useModels();
  const { argument } = useRoute();
  if (error) return html`<${ErrorNote} error=${error} onRetry=${reload} />`;
  return models ? html`<${Board} key=${argument} models=${models} named=${argument} />` : html`<${Loading} />`;
}

/** @param {{ models: Model[], named: string }} props */
function Board({ models, named }) {
  const session = useSession();
  const past = useMemo(() => new History(session.tenant, storage()), [session.tenant]);
  const [play, setPlay] = useState(() => begun(models, named, past));
  const [runs, setRuns] = useState(/** @type {Record<number, Run>} */ ({}));
  const [errors, setErrors] = useState(/** @type {Record<number, Error>} */ ({}));
  const [dialog, setDialog] = useState("");
  const [numRunning, setNumRunning] = useState(0);
  const [isShaded, setShaded] = useState(true);
  const batch = useRef(0);
  const lastKey = useRef(0); // a removed column's is not given again: its answer is another's
  useEffect(() => () => Object.values(runs).forEach((run) => run.stop()), [runs]);

  const ask = (/** @type {Column[]} */ columns) => {
    const made = columns.map((column) => ({ key: column.key, ...outcome(() => new Run(session.api, streamed(requestOf(play, column)))) }));
    setErrors(Object.fromEntries(made.flatMap(({ key, error }) => (error ? [[key, error]] : []))));
    const begun = made.flatMap(({ key, value }) => (value ? [/** @type {[number, Run]} */ ([key, value])] : []));
    setRuns(Object.fromEntries(begun));
    setNumRunning(begun.length);
    const own = (batch.current += 1);
    for (const [, run] of begun) run.start().then(() => batch.current === own && setNumRunning((num) => num - 1));
    if (begun.length) past.add(play);
  };
  const stop = () => Object.values(runs).forEach((run) => run.stop());
  const change = (/** @type {number} */ key, /** @type {Partial<Column>} */ news) =>
    setPlay((old) => ({ ...old, columns: old.columns.map((one) => (one.key === key ? { ...one, ...news } : one)) }));
  const remove = (/** @type {number} */ key) => {
    runs[key]?.stop();
    lastKey.current = Math.max(lastKey.current, key);
    setPlay((old) => ({ ...old, columns: old.columns.filter((one) => one.key !== key) }));
  };
  const add = (/** @type {Column | null} */ like) => {
    const key = (lastKey.current = 1 + Math.max(lastKey.current, ...play.columns.map((one) => one.key)));
    const column = like ? { ...structuredClone(like), key } : newColumn(key, models[0]?.id ?? "");
    setPlay((old) => ({ ...old, columns: [...old.columns, column] }));
  };
  const load = (/** @type {Play} */ found) => {
    setRuns({});
    setErrors({});
    setPlay(found);
    setDialog("");
  };
  const mayAdd = play.columns.length < MAX_COLUMNS;
  return html`<div class="playground">
    <header class="page-head">
      <h1>${T.title}</h1>
      <div class="buttons">
        <${Button} onClick=${() => setDialog("history")}>${T.history}<//>
        <${Button} onClick=${() => setDialog("share")}>${T.share}<//>
      </div>
    </header>
    <${PromptForm} play=${play} isBusy=${numRunning > 0} onChange=${(/** @type {Partial<Play>} */ news) => setPlay((old) => ({ ...old, ...news }))} onRun=${() => ask(play.columns)} onStop=${stop}>
      <${Button} disabled=${!mayAdd} onClick=${() => add(null)}>${T.addColumn}<//>
      <${Legend} isShaded=${isShaded} onChange=${setShaded} />
    <//>
    <div class="columns">
      ${play.columns.map(
        (column, at) => html`<${ColumnCard} key=${column.key} number=${at + 1} play=${play} column=${column} models=${models} run=${runs[column.key] ?? null} error=${errors[column.key] ?? null} isShaded=${isShaded}
          onChange=${(/** @type {Partial<Column>} */ news) => change(column.key, news)} onRemove=${play.columns.length > 1 ? () => remove(column.key) : null}
          onCopy=${mayAdd ? () => add(column) : null} />`,
      )}
    </div>
    ${dialog === "history" && html`<${HistoryDialog} history=${past} onPick=${load} onClose=${() => setDialog("")} />`}
    ${dialog === "share" && html`<${ShareDialog} play=${play} onLoad=${load} onClose=${() => setDialog("")} />`}
  </div>`;
}

/**
 * The board as it is opened: beside the base model the adapter that the address names, else what was run last, else
 * the first few models.
 * @param {Model[]} models
 * @param {string} named
 * @param {History} past
 * @returns {Play}
 */
function begun(models, named, past) {
  const last = named ? null : fromText(past.entries[0]?.text ?? "");
  if (last?.columns.length) return last;
  const base = models.filter((model) => !model.parent).map((model) => model.id);
  const names = named ? [...base, named] : models.slice(0, FIRST_COLUMNS).map((model) => model.id);
  const columns = (names.length ? names : [""]).map((name, key) => withVersion(newColumn(key, name)));
  return { mode: "chat", system: "", prompt: "", columns };
}

/**
 * `acme/x@3` as its two fields.
 * @param {Column} column
 */
function withVersion(column) {
  const at = column.model.lastIndexOf("@");
  return at < 0 ? column : { ...column, model: column.model.slice(0, at), version: column.model.slice(at + 1) };
}

/**
 * @template V
 * @param {() => V} make
 * @returns {{ value?: V, error?: Error }}
 */
function outcome(make) {
  try {
    return { value: make() };
  } catch (error) {
    return { error: /** @type {Error} */ (error) };
  }
}
