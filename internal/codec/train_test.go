package codec

import (
	"errors"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

func TestTrainRefusesPolitely(t *testing.T) {
	text := *textPage(newRand(1))
	same := make([]units.Page, 300)
	for i := range same {
		same[i] = text
	}
	for _, c := range []struct {
		name  string
		pages []units.Page
		must  bool // be refused; else a dictionary that works is as good
	}{
		{"nothing", nil, true},
		{"too few", same[:MinSamples-1], true},
		{"300 times one page", same, false},
		{"300 zero pages", make([]units.Page, 300), false},
	} {
		raw, err := Train(c.pages, 16<<10)
		switch {
		case err == nil && c.must:
			t.Errorf("%s: a dictionary of %d bytes", c.name, len(raw))
		case err != nil && !errors.Is(err, ErrSamples):
			t.Errorf("%s: %v, want ErrSamples", c.name, err)
		case err == nil:
			d, err := NewDictionary(1, raw)
			if err != nil {
				t.Errorf("%s: the dictionary is refused: %v", c.name, err)
				continue
			}
			d.Close()
		}
	}
	if _, err := Train(same, 1); err == nil || errors.Is(err, ErrSamples) {
		t.Errorf("a dictionary of one byte: %v", err)
	}
}
