//go:build race

package cohort

// slow is by how much less the tests do under the race detector.
const slow = 8
