// Package prefetch guesses which pages a tool call will touch, from the order in which pages
// were touched before: in this sandbox, and in its siblings.
//
// It is pure bookkeeping over frames: it restores nothing, reads no clock, and a wrong guess
// costs time, never a byte.
//
//	           pages to restore ahead         what follows a fault
//	Predictor  Begin ------------+            Faulted
//	           |                 |            |
//	sources    recent, hot set   |            temporal, cohort temporal, stride
//	           |                 |            |
//	           calibration <-- leave some out, see whether they are touched
//
// A Predictor belongs to one sandbox and remembers its calls as a heatmap: for each page a
// heat of 0..7, which a touch raises and a call that did not touch it lowers. A History
// belongs to a cohort and remembers the same for each kind of call and for the k-th call, so
// that a sandbox knows what comes before it has done it itself. How likely a page of a certain
// heat is touched is not assumed but measured (calibration.go), on pages of which it is known
// for certain: those that were not restored. One in HoldOut pages that would be restored is
// therefore left out, others in each call; a page that was restored and of which nothing was
// seen counts neither as useful nor as useless. A source that is wrong is turned down by that
// measure, goes on guessing, and is believed again when its guesses, none of them restored,
// turn out right.
//
// Two classes of pages are told apart. Evicted pages are waited for when they are touched.
// Shared pages (zeros, or the template's) are mapped and wait for nobody; those that will be
// written may be copied ahead, if End promised so and they were therefore not mapped.
//
// Locks: History.mu, then nothing. A Predictor has none: one goroutine uses it at a time.
package prefetch
