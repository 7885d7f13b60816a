package codec

import (
	"errors"
	"testing"
)

func TestAPageThatIsKeptAsItIsComesBack(t *testing.T) {
	d := NewDecoder()
	defer d.Close()
	for _, s := range madePages(31, 2) {
		enc := Raw(s.page)
		enc.Sum = Checksum(s.page)
		got := *textPage(newRand(5))
		if err := d.Decode(&got, enc, nil, nil); err != nil || got != *s.page {
			t.Errorf("%s: %v", s.name, err)
		}
		for name, broken := range map[string]Encoded{
			"short":           {Kind: KindRaw, Operand: enc.Operand, Sum: enc.Sum, Data: enc.Data[1:]},
			"another byte":    {Kind: KindRaw, Operand: enc.Operand ^ 1, Sum: enc.Sum, Data: enc.Data},
			"an odd operand":  {Kind: KindRaw, Operand: enc.Operand | 0x100, Sum: enc.Sum, Data: enc.Data},
			"another content": {Kind: KindRaw, Operand: enc.Operand, Sum: enc.Sum + 1, Data: enc.Data},
		} {
			if err := d.Decode(&got, broken, nil, nil); !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s, %s: %v, want ErrCorrupt", s.name, name, err)
			}
		}
	}
}

func FuzzDecodeRaw(f *testing.F) { fuzzDecoder(f, KindRaw) }
