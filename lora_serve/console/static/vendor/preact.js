import htm from "./htm.js";
import { h } from "./preact-core.js";

export * from "./preact-core.js";
export * from "./preact-hooks.js";
export const html = htm.bind(h);
