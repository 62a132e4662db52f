export const tenants = {
  title: "Tenants",
  name: "Tenant",
  keys: "Keys",
  adapters: "Adapters",
  adapter: "Adapter",
  usage: "Usage",
  audit: "Audit log",
  base: "Base model",
  offload: "Neighbours allowed",
  limits: "Limits",
  created: "Created",
  yes: "yes",
  no: "no",
  none: "There are no tenants yet",
  noneHint: "A tenant is a name with adapters, keys and limits.",
  create: "Create a tenant",
  change: "Change",
  save: "Save",
  all: "All tenants",
  delete: "Delete",
  /** @type {Record<string, string>} */
  tabs: { use: "Limits", keys: "Keys", usage: "Usage", audit: "Audit log" },
  /** @param {string} name */
  changeOf: (name) => `Change ${name}`,
  /** @param {string} name */
  deleteOf: (name) => `Delete ${name}`,
  /** @param {number} keys @param {number} adapters */
  deleteHint: (keys, adapters) =>
    `This ends ${keys} ${keys === 1 ? "key" : "keys"} and deletes ${adapters} ${adapters === 1 ? "adapter" : "adapters"}, with their weights on every tier. Requests that run finish. Records for billing and audit stay.`,
  /** @param {string} name @param {number} adapters */
  deleted: (name, adapters) => `${name} is deleted, with ${adapters} ${adapters === 1 ? "adapter" : "adapters"}.`,
  /** @param {string} time */
  since: (time) => `Since ${time}.`,
  usesBase: "It may use the base model itself.",
  noBase: "It may not use the base model itself.",
  noOffload: "Neighbours do not answer for it.",
  mayUseBase: "It may use the base model itself",
  mayOffload: "Neighbours may compute answers for it",
  offloadHint: "Where the server has neighbours (--overflow).",
  limitHint: "A number, or bytes as 512MiB. Empty: no limit.",
  noLimit: "no limit",
  noGuarantee: "none",
  notCounted: "not counted",
  /** @param {string} limit */
  of: (limit) => `limit ${limit}`,
  useHint: "Rows that run and requests that wait are this server's own. What has no limit per minute is not counted.",
  refresh: "Refresh",
  /** @type {Record<string, string>} */
  limitNames: {
    requests_per_minute: "Requests per minute",
    tokens_per_minute: "Tokens per minute",
    max_running: "Rows that run",
    max_queued: "Requests that wait",
    registrations_per_minute: "Registrations per minute",
    max_adapters: "Adapters",
    max_stored_bytes: "Stored bytes",
    device_bytes_guaranteed: "Device bytes, guaranteed",
    device_bytes_max: "Device bytes, at most",
  },
  keyId: "Id",
  label: "Label",
  labelHint: "A note for people.",
  role: "Role",
  /** @type {Record<string, string>} */
  roles: {
    inference: "inference: asks models",
    "tenant-admin": "tenant admin: its adapters and keys too",
    metrics: "metrics: reads /metrics",
    admin: "admin: everything, of every tenant",
  },
  state: "State",
  lastUsed: "Last used",
  active: "active",
  /** @param {string} time */
  activeUntil: (time) => `active until ${time}`,
  /** @param {string} time */
  revoked: (time) => `revoked ${time}`,
  /** @param {string} time */
  expired: (time) => `expired ${time}`,
  noKeys: "This tenant has no keys",
  createKey: "Create a key",
  /** @param {string} tenant */
  createKeyOf: (tenant) => `Create a key of ${tenant}`,
  expires: "Ends after",
  /** @type {Record<string, string>} */
  spans: { "": "never", "12h": "12 hours", "30d": "30 days", "90d": "90 days", "365d": "a year" },
  revoke: "Revoke",
  /** @param {string} id */
  revokeOf: (id) => `Revoke the key ${id}`,
  revokeHint: "It is refused from now on, on every server within a second. Requests that run finish.",
  secret: "The new key",
  secretHint: "It is shown this once: the server keeps only its digest. Copy it now.",
  secretKept: "I have copied it",
  period: "Period",
  /** @type {Record<string, string>} */
  periods: { 1: "today (UTC)", 7: "7 days", 30: "30 days", 90: "90 days", 365: "a year" },
  groupBy: "By",
  byAdapter: "adapter",
  byTenant: "tenant",
  figure: "Figure",
  /** @type {Record<string, string>} */
  figures: {
    requests: "Requests",
    prompt_tokens: "Prompt tokens",
    cached_tokens: "Cached tokens",
    generated_tokens: "Generated tokens",
    queue_seconds: "In the queue",
    load_seconds: "Waiting for adapters",
    compute_seconds: "Computing",
    residency_byte_seconds: "Device memory held (bytes × seconds)",
  },
  day: "day",
  /** @param {string} figure */
  chart: (figure) => `${figure} by day`,
  others: "all others",
  csv: "Download CSV",
  noUsage: "Nothing was used in this time",
  notComplete: "Other servers of the fleet cannot be asked at present: this is what this server knows.",
  time: "Time",
  key: "Key",
  by: "By",
  action: "Act",
  subject: "Subject",
  outcome: "Outcome",
  line: "Line",
  noAudit: "Nothing was changed yet",
  /** @param {string} id */
  requestId: (id) => `Request ${id}`,
  checkChain: "Check the chain",
  stop: "Stop",
  /** @param {string} count */
  reading: (count) => `${count} lines read …`,
  /** @param {string} count */
  chainWhole: (count) => `${count} lines checked here: each follows from the one before.`,
  /** @param {string} count */
  chainGaps: (count) =>
    `${count} more follow on lines that cannot be seen here; the server checks its whole log when it starts, and says in its own log where it is broken.`,
  /** @param {string} count @param {number} line @param {string} replica */
  chainBroken: (count, line, replica) =>
    `${count === "1" ? "1 line does" : `${count} lines do`} not follow from the one before; the first is line ${line} of server ${replica}. The log was changed.`,
  noDigest: "This browser gives pages no SHA-256 over plain http from another machine: open the console over https, or on the server's own machine, to check the log's chain.",
};
