import { bytes, number, percent, plural } from "../lib/format.js";

export const adapters = {
  title: "Adapters",
  search: "Search",
  searchHint: "Id, tenant, alias or digest",
  state: "State",
  anyState: "Any state",
  states: { on_device: "on the device", on_host: "in host memory", fetching: "loading", registered: "stored", failed: "failed" },
  list: "Adapters",
  register: "Register",
  newVersion: "New version",
  none: "No adapter is registered yet",
  noneText: "Drop a folder that PEFT saved, or name one on the hub.",
  nothingFound: "No adapter is like that",
  nothingFoundText: "Fewer words find more.",
  /** @param {number} first @param {number} last @param {number} total */
  range: (first, last, total) => (total ? `${number(first)}–${number(last)} of ${number(total)}` : "0"),
  columns: {
    id: "Adapter",
    tier: "Tier",
    version: "Version",
    digest: "Digest",
    rank: "Rank",
    kinds: "Kind",
    bytes: "Size",
    requests: "Req/min",
    last_used: "Last use",
    created: "Created",
  },
  plainLora: "LoRA",
  /** @param {string} owner */
  sharedBy: (owner) => `shared by ${owner}`,
  pinned: "pinned",
  shared: "shared",
  /** @param {number} version @param {number} share */
  canaryTag: (version, share) => `v${version}: ${share}%`,
  /** @param {number} count */
  ofVersions: (count) => plural(count, "version", "versions"),
  tiers: { device: "device", host: "host", disk: "disk", redis: "Redis" },
  loading: "loading",
  neverUsed: "not since start",
  neverUsedHint: "Uses are counted from the server's start on: what was before is not known here.",

  back: "All adapters",
  facts: "Facts",
  fact: {
    id: "Id",
    tenant: "Tenant",
    state: "State",
    tiers: "Tiers",
    version: "Version",
    digest: "Digest",
    rank: "Rank",
    kinds: "Kind",
    bytes: "Size",
    targets: "Modules",
    source: "Source",
    created: "Registered",
    pinned: "Pinned",
    shared_with: "Shared with",
    aliases: "Aliases",
    requests: "Requests",
    errors: "Errors",
    last_used: "Last use",
    hits: "Hits / misses",
    last_load: "Last load",
    probe: "Largest change of a logit",
    warnings: "Warnings",
    base_fingerprint: "Base",
    replicas: "Replicas",
    metadata: "Metadata",
  },
  nowhere: "none",
  yes: "yes",
  no: "no",
  nobody: "nobody",
  everybody: "all tenants",
  /** @param {number} minute @param {number} window @param {number} seconds */
  requestsText: (minute, window, seconds) => `${number(minute)} in the last minute, ${number(window)} in ${number(seconds / 60)} min`,
  /** @param {number} errors @param {number} requests */
  errorsText: (errors, requests) => (requests ? `${number(errors)} (${percent(errors / requests)})` : number(errors)),
  /** @param {number} hits @param {number} misses */
  hitsText: (hits, misses) => `${number(hits)} / ${number(misses)}`,
  /** @param {string} tier */
  loadedFrom: (tier) => `from ${tier}`,
  warnings: "Warnings",
  metadata: "Metadata",

  versions: "Versions",
  versionsTable: "Versions side by side",
  differs: "They differ",
  field: "Field",
  /** @param {number} version */
  versionName: (version) => `v${version}`,
  current: "active",
  canary: "canary",
  activate: "Activate",
  remove: "Delete",

  canaryTitle: "Canary",
  canaryText: "A share of the users gets another version. The same user always gets the same one.",
  oneVersion: "There is one version. Register another one without activating it to try it on a share of the traffic.",
  canaryVersion: "Version to try",
  canaryShare: "Share of the users",
  canaryApply: "Set the canary",
  canaryEnd: "End the canary",
  canaryPromote: "Activate the canary's version",
  noCanary: "All users get the active version.",
  liveShare: "Live share",
  errorRate: "Errors",
  /** @param {number} minutes */
  liveWindow: (minutes) => `Answers that this share chose, of the last ${minutes} minutes, of this server`,
  /** @param {number} requests @param {number|null} share */
  shareText: (requests, share) => `${plural(requests, "answer", "answers")}${share === null ? "" : `, ${percent(share)}`}`,
  noAnswers: "No answers yet.",

  aliases: "Aliases",
  aliasText: "Other names that mean this adapter, or one of its versions.",
  aliasName: "New alias",
  aliasTarget: "It means",
  aliasAdd: "Add the alias",
  /** @param {string} alias */
  aliasRemove: (alias) => `Delete alias ${alias}`,
  noAliases: "No aliases.",
  metadataText: "What is known of the adapter beside its weights. Defaults of requests (sampling, response_format) hold from now on.",
  metadataApply: "Change metadata",
  sharing: "Sharing",
  sharingText: "Tenants that may use the adapter beside its owner.",
  sharingField: "Tenants, with commas between them",
  sharingHint: "* shares it with all; empty, with nobody.",
  sharingApply: "Change sharing",

  act: {
    pin: "Pin",
    unpin: "Unpin",
    prefetch: "Prefetch",
    evict: "Evict",
    rollback: "Roll back",
    delete: "Delete",
  },
  ask: {
    /** @param {string} id */
    pin: (id) => `${id} is loaded onto the device and stays there, over restarts too.`,
    /** @param {string} id */
    unpin: (id) => `${id} may leave the device again when others need the room.`,
    /** @param {string} id */
    prefetch: (id) => `${id} is loaded before a request asks for it.`,
    /** @param {string} id */
    evict: (id) => `${id} leaves device and host memory once no row holds it. It stays registered; its next request waits for a load.`,
    /** @param {string} id */
    rollback: (id) => `${id} goes back: its canary ends or, without one, it means the version before.`,
    /** @param {string} id @param {number} version */
    activate: (id, version) => `${id} means version ${version} from now on. A canary ends.`,
    /** @param {string} id @param {number} version @param {number} share */
    canary: (id, version, share) => `${share}% of the users of ${id} get version ${version} from now on.`,
    /** @param {string} id */
    canaryEnd: (id) => `All users of ${id} get the active version again.`,
    /** @param {string} id */
    delete: (id) => `${id} and all of its versions are removed. New requests get a 404, running ones finish. This cannot be undone.`,
    /** @param {string} id @param {number} version */
    deleteVersion: (id, version) => `Version ${version} of ${id} is removed. This cannot be undone.`,
    /** @param {string} alias @param {string} target */
    alias: (alias, target) => `${alias} means ${target} from now on.`,
    /** @param {string} alias */
    aliasRemove: (alias) => `${alias} means nothing any more.`,
    /** @param {string} id */
    metadata: (id) => `The metadata of ${id} is this from now on, for all of its versions.`,
    /** @param {string} id @param {string} who */
    share: (id, who) => `${id} may be used by its owner and ${who}; by nobody else any more.`,
  },
  /** @param {string} name */
  done: (name) => `${name}: done`,

  registerTitle: "Register an adapter",
  ways: { upload: "From this computer", source: "From a path, the hub or a URL" },
  drop: "Drop a folder, a tar or a zip here",
  or: "or",
  chooseFolder: "Choose a folder",
  chooseArchive: "Choose an archive",
  dropHint: "adapter_config.json and adapter_model.safetensors; a tokenizer and a chat template beside them count too.",
  source: "Source",
  sourceHint: "A folder in an --adapter-root of the server, hf://org/repo, s3://bucket/key, or https://… of a tar or zip",
  id: "Id",
  idHint: "tenant/name",
  owner: "Tenant",
  ownerHint: "Left out: the id's first part",
  pin: "Keep it on the device",
  activateField: "The id means this version from now on",
  allowNoop: "Take it even if it changes no logit",
  metadataField: "Metadata (JSON)",
  metadataWrong: "This is no JSON object.",
  metadataInexact: "It holds a whole number beyond 9007199254740991, whose last digits this page would lose: use the API or the command line.",
  /** @param {string} name @param {number} files @param {number} size */
  chosenFolder: (name, files, size) => `${name}: ${plural(files, "file", "files")}, ${bytes(size)}`,
  /** @param {string} name @param {number} size */
  chosenArchive: (name, size) => `${name}, ${bytes(size)}`,
  /** @param {string[]} names */
  leftOut: (names) => `Not sent: ${names.slice(0, 6).join(", ")}${names.length > 6 ? `, and ${names.length - 6} more` : ""}`,
  nothingDropped: "Nothing that can be read was dropped.",
  noArchive: "This is neither a folder nor a tar, tar.gz, tgz or zip.",
  noConfig: "The folder holds no adapter_config.json.",
  noWeights: "There is no adapter_model.safetensors beside adapter_config.json. Save it with safe_serialization=True.",
  /** @param {number} count */
  severalAdapters: (count) => `${count} adapters are in there: drop the folder of one.`,
  tooManyFiles: "The folder holds too many files to be an adapter's.",
  steps: { send: "Upload", fetch: "Fetch", examine: "Examination", probe: "Probe" },
  stepText: {
    examine: "Files, names, shapes and values against the base model",
    probe: "A forward pass shows what it changes",
  },
  /** @param {number} sent @param {number} total */
  sent: (sent, total) => `${bytes(sent)} of ${bytes(total)}`,
  /** @param {number} count */
  fetched: (count) => bytes(count),
  stepState: { waiting: "waits", running: "runs", done: "done", failed: "failed" },
  stop: "Stop",
  stopped: "The upload was stopped.",
  registered: "Registered",
  /** @param {string} id @param {number} version @param {boolean} isActive */
  registeredText: (id, version, isActive) => `${id} is version ${version}${isActive ? "" : ", not active yet"}.`,
  /** @param {string} id @param {number} version */
  wasThere: (id, version) => `This content was there already: ${id}, version ${version}.`,
  /** @param {number} change @param {number} scale */
  probeText: (change, scale) => `The probe changed a logit by ${number(change)}; the base model's largest was ${number(scale)}.`,
  openCard: "Open its page",
  another: "Register another one",
  refused: "The adapter cannot be served",
  /** @param {number} count */
  reasons: (count) => plural(count, "reason", "reasons"),
};
