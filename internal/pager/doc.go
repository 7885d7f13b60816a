// Package pager keeps the private pages of sandboxes right while it compresses and
// restores them. One wrong guest byte is the worst bug this project can have, so
// everything that decides over a page's content is in this package and follows the
// rules below. docs/architecture.md has the picture.
//
// # States
//
// The page table of a sandbox has one word for each guest page: a tag and, for
// Evicted, Clean and Loose, a cohort.Ref: what the cohort keeps of the page, in whatever way.
//
//	state       if the page is mapped in the VMM        if it is not mapped
//	Template    the mapping is the truth                content is the image's page; a hole is zeros
//	Zero        the mapping is the truth                content is zeros
//	Kept(c)     the mapping is the truth                content is the image's page (never happens, see rule 4)
//	Ahead(c)    the mapping is the truth                never happens, see rule 4
//	Busy        write-protected, being encoded          cannot be
//	Evicted(r)  only between publish and drop           content is what ref r names
//	Clean(r)    write-protected, equal to what r names       cannot be
//	Loose(r)    was equal to what r names when it was        never happens, see rule 4
//	            mapped; the mapping is the truth
//
// "Mapped" may be the image's own page (read-only, by CONTINUE), the zero page (by
// ZEROPAGE) or a private page. A write to the first two makes a private copy inside
// the kernel without any event, so Template and Zero say nothing about which it is:
// the mapping is the truth. Kept is Template plus the memory that the content with the
// checksum c did not shrink, so that an unchanged page is not encoded in every pass. Ahead is
// Template plus the memory that Restore installed the page writable with the checksum c, so that
// the next pass knows whether the write came. Loose is Template plus the entry that the page
// came back from: writes take no fault, and the pass that takes it in hand decodes the entry
// and compares; a page that was not written is not encoded again. (With write protection
// instead, Clean, 197 of a call's 323 faults were first writes to pages that had come back.)
//
//	Template/Zero/Kept/Ahead --protect, read--> Busy --publish, drop--> Evicted(r)
//	Busy --equal to the image's page, publish, drop--> Template
//	Busy --all zeros, publish, drop--> Zero                       (both: mapped back, see mapback.go)
//	Busy --does not shrink, unprotect--> Kept
//	Busy --pass cancelled after its encoding was verified, unprotect--> Loose(r)
//	Loose(r) --protect, read--> Busy --equal to what r names, publish, drop--> Evicted(r)
//	                            Busy --else, as above, release r-->
//	Busy --pass given up, unprotect--> what it was
//	Busy --write fault, unprotect--> Template                     (cancelled)
//	Evicted(r) --read fault, fault on a neighbour, or Restore: install writable--> Loose(r)
//	Evicted(r) --write fault: install writable, release r--> Template
//	Evicted(r) --Restore for writing: install writable, release r--> Ahead(c)
//	Template/Zero, not mapped --Restore for writing: install a private copy--> Ahead(c)
//	Busy --snapshot: leave protected--> Clean(r)                  (and with Options.ProtectRestored, in place of Loose)
//	Clean(r) --write fault, unprotect, release r--> Template
//	Clean(r) --pass, publish, drop--> Evicted(r)                  (nothing to encode)
//	any but Busy --reported free: release r, publish, drop--> Zero  (see below)
//
// # Faults
//
// The kernel reports an access as MISSING (not mapped, hole in the image), MINOR (not
// mapped, the image has a page) or WP (mapped and write-protected). MISSING and MINOR
// are handled alike, as "absent": whether the image has a page is asked of the image,
// because the kernel may fill a hole with a page of zeros. Events can be stale: between
// the access and its service, under the mutex, the page may have changed state.
//
//	state       absent, read              absent, write             WP (always a write)
//	Template    CONTINUE or ZEROPAGE      the same; the kernel      stale: unprotect
//	            with neighbours; mapped   copies at the retry
//	            already: WAKE
//	Kept, Ahead as Template               as Template               stale: unprotect
//	and Loose
//	Zero        ZEROPAGE with neighbours; the same                  stale: unprotect
//	            mapped already: WAKE
//	Busy        stale: WAKE               stale: WAKE               unprotect -> Template (cancelled)
//	Evicted(r)  COPY writable             COPY writable, release    the page went after the event:
//	            -> Loose(r)               -> Template               as "absent, write"
//	Clean(r)    stale: WAKE               stale: WAKE (comes back   unprotect, release -> Template
//	                                      as WP)
//
// Each handled event ends with a wake: COPY, CONTINUE, ZEROPAGE and unprotect wake for
// what they did; where they did nothing there is an explicit WAKE. A thread that was
// woken too early faults again.
//
// # Reports
//
// A guest with free page reporting says which pages it does not use, and the VMM keeps it
// from using them until the Server has answered. Their content is nobody's then, so they are
// dropped without being read, and their entries released: discard.go has the table. With the
// guest's init_on_free the content was zeros anyway and stays zeros, which that guest relies on.
//
// # Rules
//
//  1. Every change of a word, and the ioctl or drop that belongs to it, happens under
//     Pager.mu. Reading, encoding, verifying and decoding ahead happen outside it.
//  2. A word is published before the physical page is dropped.
//  3. A page is dropped only if it has been write-protected since before it was read,
//     still has the state this pass gave it, and what the cohort keeps of it (from this pass, or of a Loose page from before) was decoded
//     and compared equal with all 4096 bytes that were read (cohort.Store). A Clean page was so. Or: the
//     guest has reported it free and has not been answered.
//  4. A page in Busy, Clean, Kept, Ahead or Loose is mapped; in Busy and Clean it is also protected. Nothing but
//     a drop by this package unmaps a page of the guest: the shim takes over what the VMM
//     would drop by itself.
//  5. CONTINUE is issued only for Template (and Kept) where the image has a page, ZEROPAGE only
//     for Zero and for Template where it has none, both under the mutex, whoever maps: a fault
//     with neighbours, a Restore, or a pass that maps shared pages back. So a stale
//     template page can never cover an evicted one. COPY is issued for Evicted with the page
//     that r names, and for Template and Zero with what the first table says that a page that is
//     not mapped contains; the kernel refuses it where a page is mapped. It too is issued under
//     the mutex, after a look at the word: for Evicted, mapped is then a wrong state and fatal,
//     for the others it is the truth.
//  6. Dropping a protected page leaves a write-protect marker in the page table of the VMM
//     (mm/memory.c, zap_install_uffd_wp_if_needed). ZEROPAGE takes it for a mapped page and
//     PAGEMAP_SCAN for one in swap. So each drop is followed, under the same lock, by an
//     unprotect of the same ranges.
//  7. An error nobody expected is fatal to the sandbox, named, and leaves the guest's
//     threads waiting: a guest that waits is killed, a guest that runs on is corrupt.
//
// # Locks
//
// Lock order: Pager.life (read), Pager.passes, Pager.mu, then the locks inside pool,
// cohort and guestmem.Shim. Server's entry lock comes before Pager.mu. Evict, Restore,
// Usage, Stats and DrainTouched may be called from any goroutine; faults are handled by
// the Server's threads. Close comes last.
package pager
