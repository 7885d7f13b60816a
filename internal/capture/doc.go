// Package capture keeps what the sandboxes of one cohort held in memory, gap by gap, in a
// folder, so that page sets can be replayed without virtual machines.
//
// A capture is made beside its final name and appears there whole:
//
//	absent --Create--> .NAME.tmp-* --Template, Gap...--> .NAME.tmp-* --Commit--> NAME
//	                        \--Abort, or the next Create after its process died--> absent
//
// # Format 1
//
//	capture.json            Info: template, machine, siblings, every gap with its counts
//	memory.zst, root.zst    the template's memory and root image, zeros left out
//	sibling-000.pages.zst   a zstd frame for each gap of a sibling, at the offset that Info gives
//
// What is inside a zstd frame is a record (numbers are unsigned LEB128 varints):
//
//	"AZCAP1" kind('M' memory, 'R' root, 'G' gap)  frames  [gap only: sibling, call]
//	runs in ascending order, each:  skip<<2 | op   length   [op 2: length pages of 4096 bytes]
//	0
//
// skip is the number of frames between the end of the run before and this one. op 1: private
// and unchanged since the sibling's gap before; 2: private, with its content; 3: gone, no
// longer private. In memory and root image only op 2 occurs; a page of the root image is a
// block of 4 KiB. Every frame has zstd's checksum, memory and root image a SHA-256 of their
// own (as in a template's manifest), and the counts in Info must come out.
//
// What a capture is not: a snapshot of one moment. A gap is read page by page, each page in
// one system call, while the guest idles; pages it writes meanwhile are of later moments
// than their neighbours. For measuring encoders that does not matter.
//
// A capture is untrusted input: every length is bounded before anything is allocated for it.
//
// A Writer's Gap may be called from several goroutines, for different siblings. A Set is
// immutable and may be used from any goroutine. There is one lock, Writer.mu, which is a
// leaf and not held across any call.
package capture
