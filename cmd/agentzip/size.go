package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/agentzip/agentzip/internal/units"
)

// sizeFlag is an amount of memory or disk on the command line: a whole number
// with a binary unit. "512" alone is refused: bytes or MiB?
type sizeFlag struct{ bytes units.Bytes }

var sizeUnits = []struct {
	suffix string
	unit   units.Bytes
}{{"KiB", units.KiB}, {"MiB", units.MiB}, {"GiB", units.GiB}, {"K", units.KiB}, {"M", units.MiB}, {"G", units.GiB}}

// Set implements pflag.Value.
func (s *sizeFlag) Set(text string) error {
	for _, u := range sizeUnits {
		number, ok := strings.CutSuffix(text, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(number, 10, 64)
		if err != nil || n <= 0 || n > int64(units.GiB)*1024/int64(u.unit) {
			return fmt.Errorf("%q is not a size between 1KiB and 1024GiB", text)
		}
		s.bytes = units.Bytes(n) * u.unit
		return nil
	}
	return fmt.Errorf("%q has no unit: write 512MiB or 4GiB", text)
}

// String implements pflag.Value.
func (s *sizeFlag) String() string {
	if s.bytes == 0 {
		return ""
	}
	return s.bytes.String()
}

// Type implements pflag.Value; the word stands for the value in --help.
func (s *sizeFlag) Type() string { return "size" }
