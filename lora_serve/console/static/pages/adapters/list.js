import { Button } from "../../components/button.js";
import { Empty, Loading } from "../../components/empty.js";
import { ErrorNote } from "../../components/error.js";
import { SelectField, TextField } from "../../components/field.js";
import { Pager } from "../../components/pager.js";
import { Table } from "../../components/table.js";
import { useLoad } from "../../lib/load.js";
import { go, link } from "../../lib/router.js";
import { useSession } from "../../lib/session.js";
import { TEXTS } from "../../texts.js";
import { html, useEffect, useMemo, useRef, useState } from "../../vendor/preact.js";
import { ORDERS, columnsFor } from "./columns.js";

const PAGE = 50; // rows: the server orders and cuts, so ten thousand cost the page no more than fifty
const EVERY_MS = 3000;
const TYPING_MS = 150;

/** All adapters, with search, order and pages, which the address keeps. @param {{query: Record<string, string>, onRegister: () => void}} props */
export function AdapterList({ query, onRegister }) {
  const words = TEXTS.adapters;
  const { api, caller, role } = useSession();
  const asked = askedOf(query);
  const { data, error, reload } = useLoad(
    (signal) => api.get("admin/adapters", { ...asked, fields: "summary", limit: PAGE }, { signal }),
    [JSON.stringify(asked)],
    { everyMs: EVERY_MS },
  );
  const turn = (/** @type {Record<string, any>} */ changes) => go(link("adapters", "", { ...query, offset: "", ...changes }), { isReplaced: true });
  useEffect(() => {
    const isBeyond = data && data.total > 0 && data.data.length === 0;
    if (isBeyond) turn({ offset: PAGE * Math.floor((data.total - 1) / PAGE) || "" });
  }, [data]);
  const columns = useMemo(() => columnsFor(role === "admin" ? "" : (caller?.tenant ?? "")), [role, caller]);
  const sortKey = Object.keys(ORDERS).find((key) => ORDERS[key] === asked.sort) ?? "id";
  const open = (/** @type {any} */ row) => go(link("adapters", row.id));
  const isFiltered = Boolean(query.search || query.state);
  return html`<div class="page-head">
      <h1>${words.title}</h1>
      <div class="row adapter-filters">
        <${Search} value=${query.search ?? ""} onSearch=${(/** @type {string} */ search) => turn({ search })} />
        <${SelectField} label=${words.state} isHidden=${true} value=${query.state ?? ""} choices=${stateChoices()} onChange=${(/** @type {string} */ state) => turn({ state })} />
        <${Button} kind="primary" onClick=${onRegister}>${words.register}<//>
      </div>
    </div>
    ${error ? html`<${ErrorNote} error=${error} onRetry=${reload} />` : null}
    ${data
      ? html`<${Table}
            caption=${words.list}
            columns=${columns}
            rows=${data.data}
            keyOf=${(/** @type {any} */ row) => row.id}
            dataOf=${(/** @type {any} */ row) => ({ "data-adapter": row.id })}
            sort=${{ key: sortKey, isDescending: asked.order === "desc" }}
            onSort=${(/** @type {any} */ sort) => turn({ sort: ORDERS[sort.key], order: sort.isDescending ? "desc" : "asc" })}
            onOpen=${open}
            empty=${html`<${Nothing} isFiltered=${isFiltered} />`}
          />
          <${Pages} data=${data} offset=${asked.offset} onTurn=${turn} />`
      : error
        ? null
        : html`<${Loading} />`}`;
}

/** @param {Record<string, string>} query  Of the address; anybody may have typed it. */
function askedOf({ search = "", state = "", sort = "name", order = "", offset = "0" }) {
  const known = Object.values(ORDERS).includes(sort) ? sort : "name";
  const isDescending = order === "desc" || (order === "" && known !== "name");
  return { search, state, sort: known, order: isDescending ? "desc" : "asc", offset: Math.max(0, Number.parseInt(offset, 10) || 0) };
}

/** @param {{value: string, onSearch: (text: string) => void}} props */
function Search({ value, onSearch }) {
  const [text, setText] = useState(value);
  const latest = useRef(onSearch);
  const asked = useRef(value);
  latest.current = onSearch;
  useEffect(() => {
    if (text === asked.current) return undefined;
    const timer = setTimeout(() => latest.current((asked.current = text)), TYPING_MS);
    return () => clearTimeout(timer);
  }, [text]);
  useEffect(() => {
    if (value === asked.current) return;
    setText((asked.current = value)); // the address was changed, not the text
  }, [value]);
  const words = TEXTS.adapters;
  return html`<${TextField} label=${words.search} isHidden=${true} type="search" placeholder=${words.searchHint} value=${text} onInput=${setText} />`;
}

function stateChoices() {
  const { states, anyState } = TEXTS.adapters;
  const shown = ["on_device", "on_host", "fetching", "registered"].map((value) => ({ value, label: /** @type {any} */ (states)[value] }));
  return [{ value: "", label: anyState }, ...shown];
}

/** @param {{isFiltered: boolean}} props */
function Nothing({ isFiltered }) {
  const words = TEXTS.adapters;
  return isFiltered
    ? html`<${Empty} title=${words.nothingFound} text=${words.nothingFoundText} />`
    : html`<${Empty} title=${words.none} text=${words.noneText} />`;
}

/** @param {{data: any, offset: number, onTurn: (changes: Record<string, any>) => void}} props */
function Pages({ data, offset, onTurn }) {
  const text = TEXTS.adapters.range(offset + 1, offset + data.data.length, data.total);
  const back = offset > 0 ? () => onTurn({ offset: offset > PAGE ? offset - PAGE : "" }) : null;
  return html`<${Pager} text=${text} onPrevious=${back} onNext=${data.has_more ? () => onTurn({ offset: offset + PAGE }) : null} />`;
}
