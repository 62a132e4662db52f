/** A registration as it happens: bytes that were sent, then what the server tells of it, then its end. */

import { useCallback, useEffect, useRef, useState } from "../../vendor/preact.js";
import { useSession } from "../../lib/session.js";
import { optionFields, perform, registerAct, uploadPath } from "./acts.js";

const EVERY_MS = 200;
/** @type {Record<string, number>} */
const STEPS = { receiving: 0, fetching: 0, examining: 1, probing: 2 };

/**
 * @typedef {object} Running
 * @property {"running"|"done"|"failed"} state
 * @property {boolean} isUpload
 * @property {number} step  0: bytes come, 1: examination, 2: probe.
 * @property {number} sent
 * @property {number|null} total
 * @property {any} card  Of the adapter, at the end.
 * @property {any} error
 */

/** The running registration (null: none), and what starts and stops one. */
export function useRegistration() {
  const { api, tenant } = useSession();
  const [running, setRunning] = useState(/** @type {Running|null} */ (null));
  const aborted = useRef(new AbortController());
  const change = useCallback((/** @type {Partial<Running>} */ some) => setRunning((known) => (known ? { ...known, ...some } : known)), []);
  useEffect(() => () => aborted.current.abort(), []);

  const run = async (/** @type {string} */ id, /** @type {boolean} */ isUpload, /** @type {(signal: AbortSignal) => Promise<any>} */ work) => {
    aborted.current = new AbortController();
    setRunning({ state: "running", isUpload, step: 0, sent: 0, total: null, card: null, error: null });
    const ended = new AbortController();
    watch(id, isUpload, ended.signal);
    try {
      const card = await work(aborted.current.signal);
      change({ state: "done", step: 3, card });
    } catch (error) {
      change({ state: "failed", error });
    } finally {
      ended.abort();
    }
  };
  /** Asks again so long after each answer: one that is slow holds the next question up, and no other overtakes it. */
  const watch = async (/** @type {string} */ id, /** @type {boolean} */ isUpload, /** @type {AbortSignal} */ signal) => {
    for (;;) {
      await new Promise((wake) => setTimeout(wake, EVERY_MS));
      if (signal.aborted) return;
      const { data } = await api.get("admin/registrations", {}, { signal }).catch(() => ({ data: [] }));
      const row = data.find((/** @type {any} */ one) => one.id === id || one.id === `${tenant}/${id}`);
      if (row) reach(STEPS[row.stage] ?? 0, isUpload ? {} : { sent: row.bytes, total: row.total_bytes });
    }
  };
  /** The steps go forth only: what the server told may be older than what was seen here. */
  const reach = (/** @type {number} */ step, /** @type {Partial<Running>} */ some) =>
    setRunning((known) => (known?.state === "running" ? { ...known, ...some, step: Math.max(known.step, step) } : known));
  const upload = (/** @type {import("./acts.js").Options} */ options, /** @type {import("./dropped.js").Chosen} */ chosen) =>
    run(options.id, true, (signal) => {
      const note = (/** @type {number} */ sent, /** @type {number} */ total) => reach(sent === total ? 1 : 0, { sent, total });
      return api.upload(uploadPath(options.id), chosen.archive ?? chosen.files, optionFields(options), note, { signal });
    });
  const register = (/** @type {import("./acts.js").Options} */ options, /** @type {string} */ source) =>
    run(options.id, false, () => perform(api, registerAct(options, source)));
  const reset = useCallback(() => setRunning(null), []);
  return { running, upload, register, reset, stop: () => aborted.current.abort() };
}
