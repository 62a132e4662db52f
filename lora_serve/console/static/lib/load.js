/**
 * What a page shows of the API: fetched at once, again when asked, when a lost server answers again, and every so often
 * if that is wanted.
 */

import { useCallback, useEffect, useRef, useState } from "../vendor/preact.js";

/**
 * The result of `fetcher`, which is called again whenever one of `inputs` changes; an answer that is overtaken is dropped.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} fetcher
 * @param {any[]} inputs
 * @param {{everyMs?: number}} [options]  `everyMs`: again so long after the last answer, while the page is seen.
 * @returns {{data: T|null, error: any, isBusy: boolean, reload: () => void, setData: (data: T) => void}}
 */
export function useLoad(fetcher, inputs, { everyMs = 0 } = {}) {
  const [state, setState] = useState({ data: /** @type {T|null} */ (null), error: /** @type {any} */ (null), isBusy: true });
  const [count, setCount] = useState(0);
  const latest = useRef(fetcher);
  latest.current = fetcher;
  const reload = useCallback(() => setCount((known) => known + 1), []);
  useEffect(() => {
    addEventListener("serverback", reload);
    return () => removeEventListener("serverback", reload);
  }, []);
  useEffect(() => {
    const aborted = new AbortController();
    let timer = 0;
    const run = async () => {
      setState((known) => ({ ...known, isBusy: true }));
      try {
        const data = await latest.current(aborted.signal);
        if (!aborted.signal.aborted) setState({ data, error: null, isBusy: false });
      } catch (error) {
        if (!aborted.signal.aborted) setState((known) => ({ ...known, error, isBusy: false }));
      }
      if (everyMs && !aborted.signal.aborted) timer = setTimeout(() => (document.hidden ? wait() : run()), everyMs);
    };
    const wait = () => {
      timer = setTimeout(() => (document.hidden ? wait() : run()), everyMs);
    };
    run();
    return () => {
      aborted.abort();
      clearTimeout(timer);
    };
  }, [...inputs, count, everyMs]);
  const setData = useCallback((/** @type {T} */ data) => setState({ data, error: null, isBusy: false }), []);
  return { ...state, reload, setData };
}
