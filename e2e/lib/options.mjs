// The flags of run.mjs, handed to the test files (each a process of its own)
// through the environment. Everything has a default, so that a single file can be
// run with `node --test tests/files.test.mjs` beside a server that is up.

// True for the cut that `make test` runs.
export const short = process.env.AGENTZIP_E2E_SHORT === '1';

// Template of all sandboxes that need no other.
export const template = process.env.AGENTZIP_E2E_TEMPLATE || 'base';

// Rounds of the pause/resume property test.
export const cycles = Number(process.env.AGENTZIP_E2E_CYCLES || (short ? 10 : 100));

// Seed of everything random in the suite; printed, so that a failure can be repeated.
export const seed = Number(process.env.AGENTZIP_E2E_SEED || 1);
