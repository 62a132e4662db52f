/**
 * Calls of the server's API. The key goes into a header, never into a URL.
 *
 * @typedef {object} Signer  Gives the headers that carry the key, and is told when the server refuses it.
 * @property {() => Record<string, string>} headers
 * @property {(reason: string) => void} end
 *
 * @typedef {object} StreamEvent
 * @property {string} event  "message" where the stream names none.
 * @property {any} data  Parsed JSON, or the text where it is none ("[DONE]").
 */

import { TEXTS } from "../texts.js";

const DOTS = /(^|[/\\])(\.|%2e){1,2}([/\\]|$)/i; // a browser takes such parts for steps to other paths

/** An answer that is no success. `status` 0: the server was not reached. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string|null, param?: string|null, retryAfter?: number|null,
   *          requestId?: string|null, body?: any}} [facts]
   */
  constructor(message, facts = {}) {
    super(message);
    this.name = "ApiError";
    this.status = facts.status ?? 0;
    this.code = facts.code ?? null;
    this.param = facts.param ?? null;
    this.retryAfter = facts.retryAfter ?? null; // seconds
    this.requestId = facts.requestId ?? null;
    this.body = facts.body ?? null;
  }

  /** True if the server was not reached at all. */
  get isLost() {
    return this.status === 0;
  }
}

/** The server's API below `base`, as the signer's key may use it. */
export class Api {
  /**
   * @param {URL|string} base  Ends with a slash.
   * @param {Signer} signer
   * @param {(isReached: boolean) => void} [onReach]  Told after each call whether the server answered.
   */
  constructor(base, signer, onReach = () => {}) {
    this.base = new URL(base);
    this.signer = signer;
    this.onReach = onReach;
  }

  /**
   * The address of a call. Parts of a path are the caller's to encode (`segment`). Raises ApiError for one that leads
   * elsewhere: the key would go to another route, or to another program behind the same proxy.
   * @param {string} path  Without a slash at its beginning.
   * @param {Record<string, any>} [query]  undefined, null and "" are left out.
   */
  url(path, query = {}) {
    if (DOTS.test(path)) throw new ApiError(TEXTS.common.noSuchName, { status: 404 });
    const url = new URL(path.replace(/^\//, ""), this.base);
    for (const [name, value] of Object.entries(query)) {
      if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, String(value));
    }
    return url;
  }

  /**
   * The parsed answer of a GET.
   * @param {string} path
   * @param {Record<string, any>} [query]
   * @param {{signal?: AbortSignal}} [options]
   */
  async get(path, query, options = {}) {
    return (await this.call("GET", path, { query, ...options })).data;
  }

  /** @param {string} path @param {any} [body] @param {{signal?: AbortSignal}} [options] */
  async post(path, body, options = {}) {
    return (await this.call("POST", path, { body, ...options })).data;
  }

  /** @param {string} path @param {any} [body] @param {{signal?: AbortSignal}} [options] */
  async put(path, body, options = {}) {
    return (await this.call("PUT", path, { body, ...options })).data;
  }

  /** @param {string} path @param {any} [body] @param {{signal?: AbortSignal}} [options] */
  async patch(path, body, options = {}) {
    return (await this.call("PATCH", path, { body, ...options })).data;
  }

  /** @param {string} path @param {Record<string, any>} [query] @param {{signal?: AbortSignal}} [options] */
  async delete(path, query, options = {}) {
    return (await this.call("DELETE", path, { query, ...options })).data;
  }

  /**
   * Any call: the answer's data (JSON parsed, else text) and its response, for the headers.
   * @param {string} method
   * @param {string} path
   * @param {{query?: Record<string, any>, body?: any, signal?: AbortSignal, headers?: Record<string, string>}} [options]
   * @returns {Promise<{data: any, response: Response}>}
   */
  async call(method, path, options = {}) {
    const headers = this.signer.headers();
    const response = await this.#fetch(method, path, options);
    const text = await this.#text(response);
    if (!response.ok) throw this.#refused(response.status, text, response.headers, headers);
    return { data: isJson(response.headers) ? parsed(text) : text, response };
  }

  /**
   * Server-sent events over fetch, as an EventSource sends no header. Returns at the stream's end.
   * @param {string} path
   * @param {{onEvent: (event: StreamEvent) => void, query?: Record<string, any>, signal?: AbortSignal,
   *          method?: string, body?: any, onOpen?: (response: Response) => void, onBytes?: () => void}} options
   *   `onBytes`: told of whatever comes, comments as well.
   */
  async stream(path, options) {
    if (!canStream()) throw new ApiError(TEXTS.common.noStreams, { status: -1 });
    const headers = this.signer.headers();
    const response = await this.#fetch(options.method ?? "GET", path, options);
    if (!response.ok) throw this.#refused(response.status, await this.#text(response), response.headers, headers);
    options.onOpen?.(response);
    if (response.body === null) return;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventParser(options.onEvent);
    try {
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        options.onBytes?.();
        events.take(value);
      }
    } catch (error) {
      throw this.#lost(error);
    } finally {
      reader.cancel().catch(() => {});
    }
  }

  /**
   * A streamed chat: `onChunk` gets every chunk. Returns the response, for its headers, at the end.
   * An error in the midst of the stream is an ApiError.
   * @param {any} body  Of /v1/chat/completions; `stream` is added.
   * @param {{onChunk: (chunk: any) => void, signal?: AbortSignal, onOpen?: (response: Response) => void}} options
   */
  async chat(body, { onChunk, signal, onOpen }) {
    /** @type {Response|null} */
    let opened = null;
    await this.stream("v1/chat/completions", {
      method: "POST",
      body: { ...body, stream: true },
      signal,
      onOpen: (response) => {
        opened = response;
        onOpen?.(response);
      },
      onEvent: ({ data }) => {
        if (data?.error) throw new ApiError(data.error.message, { status: 500, code: data.error.code, body: data });
        if (data !== "[DONE]") onChunk(data);
      },
    });
    return opened;
  }

  /**
   * A PUT with its progress, which fetch does not tell. An archive (tar, tar.gz, tgz, zip) goes as the body with the
   * fields in the query; several files go as a form, each as the part of its name (adapter_config.json, ...).
   * @param {string} path
   * @param {Blob|{name: string, file: Blob}[]} content
   * @param {Record<string, any>} [fields]  tenant, pin, metadata, allow_noop, activate.
   * @param {(sent: number, total: number) => void} [onProgress]
   * @param {{signal?: AbortSignal, mediaType?: string}} [options]  `mediaType`: of an archive.
   * @returns {Promise<any>}
   */
  upload(path, content, fields = {}, onProgress = () => {}, options = {}) {
    const request = new XMLHttpRequest();
    const isArchive = content instanceof Blob;
    request.open("PUT", this.url(path, isArchive ? fields : {}));
    if (isArchive) request.setRequestHeader("Content-Type", options.mediaType ?? mediaTypeOf(content));
    const signed = this.signer.headers();
    for (const [name, value] of Object.entries(signed)) request.setRequestHeader(name, value);
    request.upload.onprogress = (event) => onProgress(event.loaded, event.total);
    options.signal?.addEventListener("abort", () => request.abort());
    return new Promise((resolve, reject) => {
      request.onload = () => {
        this.onReach(true);
        const headers = { get: (/** @type {string} */ name) => request.getResponseHeader(name) };
        if (request.status >= 200 && request.status < 300) resolve(parsed(request.responseText));
        else reject(this.#refused(request.status, request.responseText, headers, signed));
      };
      request.onerror = () => reject(this.#lost(new TypeError("upload")));
      request.onabort = () => reject(new DOMException("aborted", "AbortError"));
      request.send(isArchive ? content : formOf(content, fields));
    });
  }

  /**
   * @param {string} method
   * @param {string} path
   * @param {{query?: Record<string, any>, body?: any, signal?: AbortSignal, headers?: Record<string, string>}} options
   */
  async #fetch(method, path, { query, body, signal, headers = {} }) {
    const sent = { ...this.signer.headers(), ...headers };
    if (body !== undefined) sent["Content-Type"] = "application/json";
    try {
      const response = await fetch(this.url(path, query), {
        method,
        headers: sent,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        credentials: "omit",
        cache: "no-store",
        redirect: "error",
      });
      this.onReach(true);
      return response;
    } catch (error) {
      throw this.#lost(error);
    }
  }

  /** @param {Response} response */
  async #text(response) {
    try {
      return await response.text();
    } catch (error) {
      throw this.#lost(error);
    }
  }

  /**
   * @param {number} status
   * @param {string} text
   * @param {{get(name: string): string|null}} headers
   * @param {Record<string, string>} signed  The headers that carried the key: another may be in use meanwhile.
   */
  #refused(status, text, headers, signed) {
    const body = parsed(text);
    const error = body?.error ?? {};
    const retryAfter = Number(headers.get("Retry-After"));
    const said = new ApiError(error.message ?? TEXTS.common.noWords(status), {
      status,
      code: error.code,
      param: error.param,
      retryAfter: Number.isFinite(retryAfter) && retryAfter > 0 ? retryAfter : null,
      requestId: headers.get("X-Request-Id"),
      body,
    });
    if (status === 401 && signed.Authorization === this.signer.headers().Authorization) this.signer.end(said.message);
    return said;
  }

  /** @param {unknown} error */
  #lost(error) {
    if (error instanceof ApiError) return error;
    if (error instanceof DOMException && error.name === "AbortError") return error;
    if (!(error instanceof TypeError) && !(error instanceof DOMException)) return error;
    this.onReach(false);
    return new ApiError(TEXTS.common.notReached);
  }
}

/** Cuts the text of a stream into events: https://html.spec.whatwg.org/multipage/server-sent-events.html */
export class EventParser {
  #rest = "";
  #event = "";
  /** @type {string[]} */
  #data = [];

  /** @param {(event: StreamEvent) => void} onEvent */
  constructor(onEvent) {
    this.onEvent = onEvent;
  }

  /** @param {string} text  Any part of the stream. */
  take(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop() ?? "";
    for (const line of lines) this.#line(line.endsWith("\r") ? line.slice(0, -1) : line);
  }

  /** @param {string} line */
  #line(line) {
    if (line === "") {
      if (this.#data.length) this.onEvent({ event: this.#event || "message", data: parsed(this.#data.join("\n")) });
      this.#event = "";
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#event = value;
    if (name === "data") this.#data.push(value);
  }
}

/** True if this browser can read an answer while it comes. */
export function canStream() {
  return typeof ReadableStream === "function" && typeof TextDecoderStream === "function" && "body" in Response.prototype;
}

/** One part of a path: `acme/x` -> `acme/x` with all else encoded, as ids may hold slashes. @param {string} id */
export function segment(id) {
  return id.split("/").map(encodeURIComponent).join("/");
}

/** @param {{get(name: string): string|null}} headers */
function isJson(headers) {
  return (headers.get("Content-Type") ?? "").startsWith("application/json");
}

/** @param {string} text @returns {any} */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** @param {Blob} archive */
function mediaTypeOf(archive) {
  const name = archive instanceof File ? archive.name.toLowerCase() : "";
  if (name.endsWith(".zip")) return "application/zip";
  return name.endsWith(".gz") || name.endsWith(".tgz") ? "application/gzip" : "application/x-tar";
}

/** @param {{name: string, file: Blob}[]} files @param {Record<string, any>} fields */
function formOf(files, fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    if (value !== undefined && value !== null && value !== "") form.append(name, String(value));
  }
  for (const { name, file } of files) form.append(name, file, name);
  return form;
}
