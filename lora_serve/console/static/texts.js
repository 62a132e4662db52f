/** Every text of the page, in English, by page. Nothing else holds words that people read. */

import { adapters } from "./texts/adapters.js";
import { common } from "./texts/common.js";
import { engine } from "./texts/engine.js";
import { live } from "./texts/live.js";
import { playground } from "./texts/playground.js";
import { signIn } from "./texts/sign_in.js";
import { tenants } from "./texts/tenants.js";

export const TEXTS = { adapters, common, engine, live, playground, signIn, tenants };
