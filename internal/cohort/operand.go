package cohort

import (
	"fmt"
	"math/bits"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/pool"
)

// operandCheck is the bit of an operand, which names a page or a dictionary in fewer, that
// makes the number of its set bits odd while it lies in the pool.
//
// The checksum of a page says at Load that its operand is not what it was. Release sees no
// page: it would give back a reference of somebody else's page, whose handle is then given
// out anew while a page table still has it. That is the one way in which one damaged
// bit could bring a wrong page into a guest.
const operandCheck = 1 << 31

const _ = uint(31 - RefBits) // a Ref leaves the bit free

var errOperand = fmt.Errorf("operand fails its check: %w", ErrDamaged)

// sealed returns enc as it is put into the pool.
func sealed(enc codec.Encoded) codec.Encoded {
	if enc.Kind.HasOperand() && bits.OnesCount32(enc.Operand)&1 == 0 {
		enc.Operand |= operandCheck
	}
	return enc
}

// unsealed is the inverse of sealed.
func unsealed(enc codec.Encoded) (codec.Encoded, error) {
	if enc.Kind.HasOperand() {
		if bits.OnesCount32(enc.Operand)&1 == 0 {
			return enc, errOperand
		}
		enc.Operand &^= operandCheck
	}
	return enc, nil
}

// view is reader.View with the operand checked.
// Preconditions: reader is pinned.
func view(reader *pool.Reader, h pool.Handle) (codec.Encoded, error) {
	enc, err := reader.View(h)
	if err != nil {
		return enc, err
	}
	return unsealed(enc)
}
