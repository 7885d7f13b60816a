package codec

import (
	"sync"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

func TestADictionaryMayBeClosedWhileItIsInUse(t *testing.T) {
	was := live.Load()
	for range 20 {
		dict, err := NewDictionary(3, trained(t))
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				e, d := NewEncoder(Options{}), NewDecoder()
				defer e.Close()
				defer d.Close()
				page := textPage(newRand(uint64(i)))
				for range 30 {
					enc, ok := e.Encode(page, nil, dict)
					if !ok {
						t.Error("text does not shrink")
						return
					}
					var got units.Page
					if err := d.Decode(&got, enc, nil, dict); err == nil && got != *page {
						t.Error("decodes to another page")
					}
				}
			})
		}
		dict.Close()
		wg.Wait()
	}
	if got := live.Load(); got != was {
		t.Errorf("%d dictionaries are not freed", got-was)
	}
}
