import { TEXTS } from "../texts.js";
import { html } from "../vendor/preact.js";

/**
 * @typedef {object} Column
 * @property {string} key  Of the row's value, and of the sort.
 * @property {string} label
 * @property {(row: any) => any} [render]  Default: the value of `key` as text.
 * @property {boolean} [isSortable]
 * @property {boolean} [isNumber]  Right-aligned, tabular figures.
 * @property {string} [className]
 *
 * @typedef {{key: string, isDescending: boolean}} Sort
 */

/**
 * A table whose heads sort by click and keyboard. Wide ones scroll within themselves. With `onOpen` each row's first
 * cell is a button, and the whole row can be clicked.
 * @param {{caption: string, columns: Column[], rows: any[], keyOf: (row: any) => string, sort?: Sort|null,
 *          onSort?: (sort: Sort) => void, onOpen?: (row: any) => void, dataOf?: (row: any) => Record<string, string>,
 *          isSelected?: (row: any) => boolean, empty?: any}} props  `dataOf`: data-* attributes of a row.
 */
export function Table({ caption, columns, rows, keyOf, sort = null, onSort, onOpen, dataOf = () => ({}), isSelected = () => false, empty = null }) {
  if (!rows.length && empty) return empty;
  return html`<div class="table-box" tabindex="0" role="region" aria-label=${caption}>
    <table class="table">
      <caption class="hidden">
        ${caption}
      </caption>
      <thead>
        <tr>
          ${columns.map((column) => html`<${Head} key=${column.key} ...${{ column, sort, onSort }} />`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row) => html`<tr
            key=${keyOf(row)}
            class=${`${onOpen ? "open" : ""} ${isSelected(row) ? "selected" : ""}`}
            onClick=${onOpen ? () => onOpen(row) : undefined}
            ...${dataOf(row)}
          >
            ${columns.map((column, at) => cell(column, row, at === 0 ? onOpen : undefined))}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** @param {Column} column @param {any} row @param {((row: any) => void)|undefined} onOpen */
function cell(column, row, onOpen) {
  const shown = column.render ? column.render(row) : row[column.key];
  const name = `${column.isNumber ? "number" : ""} ${column.className ?? ""}`;
  if (!onOpen) return html`<td class=${name}>${shown}</td>`;
  const open = (/** @type {Event} */ event) => {
    event.stopPropagation();
    onOpen(row);
  };
  return html`<th scope="row" class=${name}><button type="button" class="cell-button" onClick=${open}>${shown}</button></th>`;
}

/** @param {{column: Column, sort: Sort|null, onSort?: (sort: Sort) => void}} props */
function Head({ column, sort, onSort }) {
  const isSorted = sort?.key === column.key;
  const name = column.isNumber ? "number" : "";
  if (!column.isSortable || !onSort) return html`<th scope="col" class=${name}>${column.label}</th>`;
  const turn = () => onSort({ key: column.key, isDescending: isSorted ? !sort.isDescending : Boolean(column.isNumber) });
  const order = isSorted ? (sort.isDescending ? "descending" : "ascending") : "none";
  const mark = isSorted ? (sort.isDescending ? "↓" : "↑") : "";
  const words = isSorted ? (sort.isDescending ? TEXTS.common.sortedDown : TEXTS.common.sortedUp) : "";
  return html`<th scope="col" class=${name} aria-sort=${order}>
    <button type="button" class="head-button" title=${words} onClick=${turn}>
      ${column.label} <span aria-hidden="true" class="sort-mark">${mark}</span>
    </button>
  </th>`;
}

/** Rows in a sort's order; numbers by size, texts by the alphabet, what is missing last. @param {any[]} rows @param {Sort|null} sort @param {(row: any, key: string) => any} [valueOf] */
export function sorted(rows, sort, valueOf = (row, key) => row[key]) {
  if (!sort) return rows;
  const direction = sort.isDescending ? -1 : 1;
  return [...rows].sort((left, right) => {
    const [one, other] = [valueOf(left, sort.key), valueOf(right, sort.key)];
    if (one === other) return 0;
    if (one === null || one === undefined) return 1;
    if (other === null || other === undefined) return -1;
    if (typeof one === "string" && typeof other === "string") return direction * one.localeCompare(other);
    return one < other ? -direction : direction;
  });
}
