/** An answer as it grows: chunks of a stream, folded into tokens with their log-probabilities. */

import { placed } from "./placing.js";

/** @typedef {import("./types.js").Token} Token */
/** @typedef {import("./types.js").ToolCall} ToolCall */
/** @typedef {import("./placing.js").Waiting} Waiting */
/** @typedef {import("./placing.js").Segment} Segment */

/** Takes an answer's chunks, of a chat or of a completion. What it shows is the text as it was sent, to the letter. */
export class Answer {
  constructor() {
    /** @type {Token[]} */
    this.tokens = [];
    /** @type {ToolCall[]} */
    this.calls = [];
    this.model = "";
    this.finish = "";
    /** @type {{ prompt_tokens: number, completion_tokens: number, prompt_tokens_details?: { cached_tokens: number } } | null} */
    this.usage = null;
    this.numTokens = 0;
    /** @type {{ message: string } | null} */
    this.error = null;
    /** @type {Segment[]} */
    this._texts = [];
    /** @type {Waiting[]} */
    this._waiting = [];
    this._decoder = new TextDecoder();
  }

  /** The answer's text, without what the model thought before it. */
  get text() {
    return this.tokens.map((token) => (token.channel === "content" ? token.text : "")).join("");
  }

  /**
   * Takes in one chunk.
   * @param {any} chunk
   */
  add(chunk) {
    if (chunk.error) this.error = chunk.error;
    if (chunk.model) this.model = chunk.model;
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices ?? []) {
      this._addTexts(choice);
      this._addEntries(choice.logprobs);
      if (choice.finish_reason) this.finish = choice.finish_reason;
    }
    if (this.numTokens) placed(this._texts, this._waiting, this.tokens);
    else this._show(); // a neighbour's answer may come without log-probabilities
  }

  /** Ends the answer: a text that no token explains is shown without a log-probability. */
  end() {
    this._show();
    this._waiting = [];
  }

  _show() {
    for (const { text, channel } of this._texts) this.tokens.push({ text, logprob: null, alternatives: [], channel });
    this._texts = [];
  }

  /** @param {any} choice */
  _addTexts(choice) {
    const delta = choice.delta ?? { content: choice.text };
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this._addText(thought, "reasoning");
    if (delta.content) this._addText(delta.content, "content");
    for (const call of delta.tool_calls ?? []) {
      const known = (this.calls[call.index] ??= { name: "", arguments: "" });
      known.name += call.function?.name ?? "";
      known.arguments += call.function?.arguments ?? "";
    }
  }

  /**
   * @param {string} text
   * @param {"content" | "reasoning"} channel
   */
  _addText(text, channel) {
    const last = this._texts.at(-1);
    if (last && last.channel === channel) last.text += text;
    else this._texts.push({ text, channel });
  }

  /** @param {any} logprobs */
  _addEntries(logprobs) {
    const entries = logprobs?.content ? logprobs.content.map(this._ofChat, this) : ofCompletion(logprobs);
    this.numTokens += entries.length;
    this._waiting.push(...entries);
  }

  /**
   * @param {any} entry
   * @returns {Waiting}
   */
  _ofChat(entry) {
    // A character may be spread over several tokens: it shows with the last of them.
    const text = this._decoder.decode(Uint8Array.from(entry.bytes ?? []), { stream: true });
    const alternatives = entry.top_logprobs.map((/** @type {any} */ one) => ({ text: one.token, logprob: one.logprob }));
    return { text, logprob: entry.logprob, alternatives };
  }
}

/**
 * @param {any} logprobs
 * @returns {Waiting[]}
 */
function ofCompletion(logprobs) {
  return (logprobs?.tokens ?? []).map((/** @type {string} */ text, /** @type {number} */ index) => {
    const top = Object.entries(logprobs.top_logprobs?.[index] ?? {});
    const alternatives = top.map(([one, logprob]) => ({ text: one, logprob: Number(logprob) }));
    return { text, logprob: logprobs.token_logprobs[index], alternatives };
  });
}
