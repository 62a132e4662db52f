/**
 * @file The shapes of the stream `GET /admin/engine/stream`, and of what the page makes of them.
 *
 * @typedef {{name: string, version: number, digest: string, scale: number}} AdapterUse
 * @typedef {"running" | "waiting" | "loading" | "compiling" | "preempted" | "finished"} State
 * @typedef {"prefill" | "decode" | "draft" | "pool"} Kind
 * @typedef {{replica: string, number: number, time: number, ms: number, is_gap: boolean,
 *   rows: [id: string, kind: Kind, tokens: number, got?: number][]}} Step
 * @typedef {Omit<Step, "rows"> & {rows?: Step["rows"]}} ToldStep
 * @typedef {{id: string, replica: string, tenant: string, adapters: AdapterUse[], state: State, num_prompt: number,
 *   num_computed: number, num_output: number, num_cached: number, arrived: number, first_token_ms: number | null,
 *   reason: string | null}} RequestInfo
 * @typedef {{replica: string, index: number, name: string, digest: string, bytes: number, num_rows: number,
 *   pinned: boolean, version: number, also: string[]}} Slot
 * @typedef {{bytes: number | null, budget: number, items: number | null, hits: number, misses: number, loads: number,
 *   evictions: number}} Tier
 * @typedef {{digest: string, name: string, from: string, to: string, ms: number}} Move
 * @typedef {{p50: number | null, p95: number | null}} Percentiles
 * @typedef {{first_token_ms: number | null, inter_token_ms: number | null}} Targets
 * @typedef {{version: string, started: number, model: string, rate: number, scope: string | null, engine: string,
 *   max_num_seqs: number, block_size: number, targets: Targets}} Hello
 * @typedef {{time: number, number: number, steps: ToldStep[], requests: RequestInfo[], num_waiting: number,
 *   num_running: number, queue: Record<string, {waiting: number, running: number}>, slots: Slot[],
 *   max_loras?: number, loading?: string[], tiers?: Record<string, Tier>, moves?: Move[],
 *   blocks?: {total: number, free: number, cached: number | null},
 *   tokens_per_second?: {prompt: number, output: number},
 *   latency?: {first_token_ms: Percentiles, inter_token_ms: Percentiles},
 *   limits?: {max_num_seqs: number, max_num_batched_tokens: number, window_ms: number, reason: string},
 *   preemptions?: number, restarts?: number}} Frame
 */

/** The kinds of a row in a step; a cell keeps its kind's index. */
export const KINDS = /** @type {Kind[]} */ (["prefill", "decode", "draft", "pool"]);

/** The states in which a request stands in the queue and no row of it runs. */
export const QUEUED = new Set(/** @type {State[]} */ (["waiting", "loading", "compiling"]));
