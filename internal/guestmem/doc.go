// Package guestmem holds a template's memory and one guest's memory.
//
// An Image is the memory all clones of a template share:
//
//	building --PunchZeroPages--> building --Seal--> sealed --Close--> closed
//	LoadImage ------------------------------------> sealed
//
// A sealed image never changes again: nobody can write, grow, shrink or punch it.
// Its pages may be loaded from in this process, except holes, which have none.
//
// A Shim is the daemon's end of the preloaded library in one VMM process:
//
//	AcceptShim --> waiting --Go--> serving --Close--> closed (the VMM exits)
//
// A Guest is that VMM's private mapping of an image, under userfaultfd from Attach
// on. Nothing in this process maps it; system calls alone touch it. The Guest knows
// nothing of page states: package pager decides what may be done to which page.
//
// From Attach on, only Drop unmaps a page of the guest. What the VMM would drop by itself
// (free pages that the guest reports to its balloon device) is a report, which whoever serves
// the Guest takes and answers; the VMM waits for that:
//
//	offered --Report--> taken --Answer--> done
//	offered --the shim has waited 20 ms--> given up; Report does not find it
//
// Locks: none but Shim.mu, which makes one drop request after the other; nothing is
// called while it is held.
package guestmem
