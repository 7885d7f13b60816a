//go:build invariants

// Package invariant checks what must be true, in builds with -tags invariants.
//
// Without the tag Enabled is a false constant and Check an empty function: the
// compiler removes the call, but not the work of computing its arguments. Guard
// a costly condition with `if invariant.Enabled`.
//
// A failed check panics: it means that the code is wrong, not the input.
package invariant

// Enabled says whether Check does anything in this build.
const Enabled = true

// Check panics with msg if cond is false.
func Check(cond bool, msg string) {
	if !cond {
		panic("invariant broken: " + msg)
	}
}
