/** Which part of an answer's text is which token's. The two come apart: a text may wait, and some tokens have none. */

/** @typedef {import("./types.js").Token} Token */
/** @typedef {{ text: string, channel: "content" | "reasoning" }} Segment */
/** @typedef {{ text: string, logprob: number | null, alternatives: import("./types.js").Alternative[] }} Waiting */

/**
 * Moves what can be told from `texts` and `waiting` to the end of `tokens`; no letter of a text is lost or doubled.
 * @param {Segment[]} texts
 * @param {Waiting[]} waiting
 * @param {Token[]} tokens
 */
export function placed(texts, waiting, tokens) {
  /** @type {Waiting | null} */
  let skipped = null; // the last token whose text was not found, such as a part of a character
  for (;;) {
    const [segment, token] = [texts[0], waiting[0]];
    if (!segment || !token) break;
    const text = spelled(token.text, segment.text);
    const at = text ? segment.text.indexOf(text) : -1;
    if (at < 0 && text.startsWith(segment.text)) break; // the rest of it is still to come
    waiting.shift();
    if (at < 0 || (at > 0 && !skipped)) {
      skipped = token;
      continue;
    }
    if (at > 0 && skipped) tokens.push(made(skipped, segment.text.slice(0, at), segment));
    skipped = null;
    tokens.push(made(token, text, segment));
    segment.text = segment.text.slice(at + text.length);
    if (!segment.text) texts.shift();
  }
  if (skipped && !waiting.length) waiting.push(skipped);
}

/**
 * A token's text as the answer has it: some tokenizers leave out an answer's first blank.
 * @param {string} token
 * @param {string} answer
 */
function spelled(token, answer) {
  return answer.startsWith(token.trimStart()) && !answer.includes(token) ? token.trimStart() : token;
}

/**
 * @param {Waiting} token
 * @param {string} text
 * @param {Segment} segment
 * @returns {Token}
 */
function made(token, text, segment) {
  return { text, logprob: token.logprob, alternatives: token.alternatives, channel: segment.channel };
}
