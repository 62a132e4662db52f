export const signIn = {
  title: "Sign in",
  lead: "With a key of this server: the admin's, a tenant admin's, or one for inference.",
  key: "Key",
  keyHint: "It is sent to this server alone, in a header, and forgotten with the page.",
  keep: "Keep it until this tab closes",
  submit: "Sign in",
  empty: "Enter a key.",
  notAscii: "A key holds only printable ASCII characters, without spaces.",
  wrong: "This server does not know that key. Keys are shown once, when they are made: `lora-serve keys create`.",
  ended: "That key was revoked, or has expired.",
  /** @param {number|null} seconds */
  tooMany: (seconds) =>
    `Too many wrong keys came from this address. ${seconds ? `Try again in ${seconds} s.` : "Try again in a minute."}`,
  lost: "The server was not reached. Is it running, and is the network there?",
  metrics: "That key is for /metrics only: it opens none of these pages.",
  withoutKey: "Go on without a key",
  withoutKeyHint: "This server asks for no key to use its models.",
  whereIsTheKey: "The admin key stands in the file admin_key of the server's store.",
};
