package pool

import "sync"

// Size classes. An entry takes the smallest slot that holds its header and
// bytes.
//
// Entries of a guest (header included): a tenth up to 32 B, half up to 320 B,
// then a tail to 3,600 B. So slots grow by the granule of 16 B (the step of
// handles; on average 8 B lost) up to fineMost, where 16 B are 3 %; above, by
// 1/24 (on average 2 % lost), each rounded up to what divides a segment evenly, so
// that little is lost at its end: 64 KiB hold 18 slots of 3,632 B, and 4 KiB
// pages would hold one. More classes would lose less in slots and more in segments that are
// partly filled: a class holds on average half a page that is in memory
// without need (its segments fill from the front), 80 classes 160 KiB.
const (
	fineMost    = 512
	segmentSize = 64 << 10
	segmentHead = 16
	usable      = segmentSize - segmentHead
	mostEntry   = headerDict + lengthMask
	numClasses  = 80
)

// slotSizes of the classes, ascending, and the class of an entry by its length
// in granules, rounded up.
var slotSizes, classOf = makeClasses()

func makeClasses() (sizes [numClasses]int, of [mostEntry/granule + 2]uint8) {
	n := 0
	for size := granule; ; {
		sizes[n] = size
		n++
		if size >= mostEntry {
			break
		}
		if size < fineMost {
			size += granule
			continue
		}
		slots := usable / (size + size/24)
		for size >= usable/slots&^(granule-1) {
			slots--
		}
		size = usable / slots &^ (granule - 1)
	}
	if n != numClasses {
		panic("pool: numClasses is wrong")
	}
	c := 0
	for g := range of {
		for sizes[c] < min(g*granule, mostEntry) {
			c++
		}
		of[g] = uint8(c)
	}
	return sizes, of
}

// A class owns the segments that hold entries of its size.
type class struct {
	index int // immutable
	size  int // immutable; bytes of a slot
	slots int // immutable; slots of a segment

	mu      sync.Mutex
	partial int // guarded by mu; first of the list of segments with a free slot, -1 if none
}

func (c *class) init(i int) {
	c.index, c.size = i, slotSizes[i]
	c.slots = usable / c.size
	c.partial = -1
}
