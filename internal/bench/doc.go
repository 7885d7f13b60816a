// Package bench replays agents in sandboxes and measures what compression
// saves and costs: the main job.
//
// A measurement is a pair of runs of the same trajectories in fresh sandboxes,
// one without compression and one with it:
//
//	fleet made --clone all--> ready --replay, sample--> done --counters--> closed
//
// In a run every sandbox replays its trajectory on its own goroutine, call by
// call, and waits the (scaled) think time after each call. One more goroutine
// samples the fleet's memory about five times a second. When both runs are
// over, every call's stdout, stderr and exit code of the second is compared
// with the first after normalising what depends on time (normalise.go), the
// memory samples are averaged over time from the first call's start to the last
// call's end, and the result goes to package report.
//
// The sandboxes come through the Fleet interface, which a lower layer fulfils.
// The package has no locks held across calls into a Fleet.
package bench
