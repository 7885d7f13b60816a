package codec

import (
	"sync"
	"testing"

	"github.com/agentzip/agentzip/internal/units"
)

var trainOnce = sync.OnceValues(func() ([]byte, error) {
	var pages []units.Page
	for _, s := range madePages(42, 40) {
		if s.template == nil && !IsZero(s.page) {
			pages = append(pages, *s.page)
		}
	}
	for _, s := range madePages(43, 40) {
		if s.template == nil && !IsZero(s.page) {
			pages = append(pages, *s.page)
		}
	}
	return Train(pages, 32<<10)
})

// trained returns a dictionary trained on made pages, the same for all tests.
func trained(tb testing.TB) []byte {
	tb.Helper()
	raw, err := trainOnce()
	if err != nil {
		tb.Fatal(err)
	}
	return raw
}

func testDictionary(tb testing.TB) *Dictionary {
	tb.Helper()
	d, err := NewDictionary(5, trained(tb))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(d.Close)
	return d
}
