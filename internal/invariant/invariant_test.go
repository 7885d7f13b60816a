package invariant

import "testing"

func TestAFailedCheckPanicsOnlyInTaggedBuilds(t *testing.T) {
	defer func() {
		if got := recover() != nil; got != Enabled {
			t.Errorf("panicked %v, want %v", got, Enabled)
		}
	}()
	Check(true, "never")
	Check(false, "always")
}
