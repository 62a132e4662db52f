import { useLoad } from "../../lib/load.js";
import { useApi } from "../../lib/session.js";
import { useState } from "../../vendor/preact.js";

/**
 * What a GET answers, asked for again by `reload` and whenever the query changes.
 * @param {string} path
 * @param {Record<string, any>} [query]
 */
export function useLoaded(path, query = {}) {
  const api = useApi();
  return useLoad((signal) => api.get(path, query, { signal }), [api, path, JSON.stringify(query)]);
}

/**
 * A list that comes page by page, with what its pager needs.
 * @param {string} path
 * @param {Record<string, any>} query
 */
export function usePages(path, query) {
  const [before, setBefore] = useState(/** @type {string[]} */ ([])); // `after` of the pages so far
  const loaded = useLoaded(path, { ...query, after: before.at(-1) });
  const { data, isBusy } = loaded;
  const onPrevious = before.length ? () => setBefore(before.slice(0, -1)) : null;
  const onNext = data?.has_more ? () => setBefore([...before, data.last_id]) : null;
  return { ...loaded, rows: data?.data ?? [], pager: { onPrevious, onNext, isBusy } };
}
