/**
 * What the playground's files hand to one another. Numbers of the sampling are kept as they were typed; "" is left out.
 *
 * @typedef {{ id: string, scale: number }} Member
 * @typedef {{ temperature: string, top_p: string, max_tokens: string, seed: string }} Sampling
 * @typedef {{ key: number, kind: "model" | "composition", model: string, version: string, members: Member[], sampling: Sampling, schema: string, tools: string }} Column
 * @typedef {{ mode: "chat" | "completion", system: string, prompt: string, columns: Column[] }} Play
 * @typedef {{ path: string, body: Record<string, any> }} Ask
 * @typedef {{ text: string, logprob: number }} Alternative
 * @typedef {{ text: string, logprob: number | null, alternatives: Alternative[], channel: "content" | "reasoning" }} Token
 * @typedef {{ name: string, arguments: string }} ToolCall
 */

export {};
