// Package restores measures what getting pages back costs those who wait for them: the
// benchmark behind `agentzip bench restore`.
//
// One measurement has up to five parts, each in fresh sandboxes, in this order:
//
//	pair      the main job without and with compression (package bench): latency, stall, saved,
//	          the distributions of all restores, and how long a call waits for a pass to stop
//	ablation  short runs of the same job, one without each prefetcher, one without any
//	storm     compressed sandboxes that all get the same command at the same instant
//	idle      what compressed sandboxes cost that nobody uses, everything on the host included
//
// The package measures and prints; sandboxes come through the Host interface, which a
// higher layer fulfils. Parts run one after another on the caller's goroutine; nothing here
// has locks that are held across calls into a Host.
package restores
