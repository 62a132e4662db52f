/** A request as a program of openai-python. The key is an environment variable, never itself. */

/** @typedef {import("./types.js").Ask} Ask */

const OWN = { chat: ["adapters"], completion: ["adapters", "response_format"] }; // what openai-python has no argument for
const STEP = "    ";

/**
 * The program, complete: it prints the answer.
 * @param {Ask} ask
 * @param {string} base the API's own URL, with /v1
 */
export function pythonOf({ path, body }, base) {
  const isChat = path.endsWith("chat/completions");
  const names = OWN[isChat ? "chat" : "completion"];
  const own = Object.fromEntries(Object.entries(body).filter(([name]) => names.includes(name)));
  const known = Object.entries(body).filter(([name]) => !names.includes(name));
  const given = Object.keys(own).length ? [...known, ["extra_body", own]] : known;
  const fields = given.map(([name, value]) => `${STEP}${name}=${literal(value, 1)},`);
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(base, 0)}, api_key=os.environ.get("LORA_SERVE_KEY", "none"))`,
    `answer = client.${isChat ? "chat." : ""}completions.create(`,
    ...fields,
    ")",
    ...shown(isChat, "tools" in body),
    "",
  ].join("\n");
}

/**
 * @param {boolean} isChat
 * @param {boolean} hasTools
 */
function shown(isChat, hasTools) {
  if (!isChat) return ["print(answer.choices[0].text)"];
  if (!hasTools) return ["print(answer.choices[0].message.content)"];
  return [
    "message = answer.choices[0].message",
    "for call in message.tool_calls or []:",
    `${STEP}print(call.function.name, call.function.arguments)`,
    'print(message.content or "")',
  ];
}

/**
 * A value of JSON as Python writes it. A JSON text is a Python text too.
 * @param {any} value
 * @param {number} depth
 * @returns {string}
 */
function literal(value, depth) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = Array.isArray(value)
    ? value.map((one) => literal(one, depth + 1))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const short = `${open}${inner.join(", ")}${close}`;
  if (short.length + STEP.length * depth <= 88 && !short.includes("\n")) return short;
  const indent = STEP.repeat(depth + 1);
  return `${open}\n${inner.map((one) => `${indent}${one},\n`).join("")}${STEP.repeat(depth)}${close}`;
}
