/** @type {(word: string) => string} */
const isNoNumber = (field) => `${field} is no number that a request can hold.`;

export const playground = {
  title: "Playground",
  prompt: "Prompt",
  system: "System message",
  systemHint: "None",
  mode: "Ask as",
  chat: "Chat",
  completion: "Text to continue",
  run: "Run",
  runHint: "Ctrl+Enter runs all columns.",
  stop: "Stop",
  stopAll: "Stop all",
  addColumn: "Add a column",
  history: "History",
  share: "Settings as text",
  remove: "Remove",
  duplicate: "Duplicate",
  /** @param {number} number */
  column: (number) => `Column ${number}`,
  /** @param {number} number */
  copyColumn: (number) => `Duplicate column ${number}`,
  /** @param {number} number */
  removeColumn: (number) => `Remove column ${number}`,
  /** @param {number} number */
  stopColumn: (number) => `Stop column ${number}`,
  /** @param {number} number */
  answerOf: (number) => `Answer of column ${number}`,
  /** @param {number} number */
  modelOf: (number) => `Model of column ${number}`,
  shade: "Colours",
  shadeHint: "Tokens are coloured by their probability: the stronger, the less likely",
  /** @param {number} bound */
  atLeast: (bound) => `≥ ${100 * bound}%`,
  less: "less",
  hardly: "< 0.01%",
  kind: "Who answers",
  oneModel: "One model",
  composition: "Adapters, added up",
  search: "Search models",
  /** @param {number} count */
  more: (count) => `and ${count} more: type on`,
  version: "Version",
  versionHint: "version",
  /** @param {number} number */
  member: (number) => `Adapter ${number} of the sum`,
  /** @param {number} number */
  memberModel: (number) => `Adapter ${number}`,
  /** @param {number} number */
  removeMember: (number) => `Remove adapter ${number}`,
  addMember: "Add an adapter",
  scale: "Scale",
  exactScale: "Scale as a number",
  settings: "Settings",
  asServer: "default",
  schemaHint: "A JSON schema that the answer obeys",
  toolsHint: "A JSON list of tools, in OpenAI's form",
  /** @type {Record<string, string>} */
  fields: {
    temperature: "Temperature",
    top_p: "Top p",
    max_tokens: "Max tokens",
    seed: "Seed",
    schema: "JSON schema",
    tools: "Tools",
    model: "The model",
    members: "The sum",
  },
  /** @type {Record<string, (field: string) => string>} */
  fieldErrors: {
    number: isNoNumber,
    json: (field) => `${field}: this is no JSON.`,
    object: (field) => `${field} must be a JSON object.`,
    list: (field) => `${field} must be a JSON list.`,
    model: () => "Choose a model for this column.",
    members: () => "Add an adapter to this column's sum.",
  },
  /** @type {Record<string, string>} */
  states: { waiting: "Waiting for the first token", streaming: "Answering", done: "Done", stopped: "Stopped", failed: "Failed" },
  nothing: "The answer is empty.",
  thoughts: "Reasoning",
  noLogprob: "The answer came without this token's probability.",
  /** @type {Record<string, string>} */
  parts: { queue: "Queue", load: "Load", prefill: "Prefill", decode: "Decode" },
  measured: "measured here",
  firstToken: "First token",
  speed: "Speed",
  tokensPerSecond: "tokens/s",
  tokens: "Tokens",
  promptTokens: "Prompt tokens",
  /** @param {string} count */
  cached: (count) => `${count} cached`,
  answeredBy: "Answered by",
  base: "Base model",
  servedBy: "Served by",
  fallback: "Fell back to",
  ended: "Ended",
  request: "Request",
  /** @type {Record<string, string>} */
  reasons: { stop: "by itself", length: "at max tokens", tool_calls: "with a call of a tool" },
  openaiPython: "openai-python",
  keepHistory: "Keep prompts and settings in this browser",
  keepHistoryHint: "Answers and keys are never kept. Without the tick what was kept is forgotten.",
  clearHistory: "Clear the history",
  noHistory: "Nothing was run here yet.",
  emptyPrompt: "(empty prompt)",
  /** @param {number} count */
  numColumns: (count) => (count === 1 ? "1 column" : `${count} columns`),
  shareHint: "The prompt and the columns, without answers and without a key. Somebody else can paste them here.",
  settingsText: "Settings",
  load: "Use these settings",
  notSettings: "This text holds no settings of a playground.",
};
