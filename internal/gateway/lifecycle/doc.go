// Package lifecycle keeps the sandboxes that clients know, each in one state of
// one machine:
//
//	              create         created
//	absent ------------> creating ----------> running <---- copy done ---- copying
//	                        |                 ^ |  |  ------- copy --------->  ^
//	          create failed |    pause failed | |  | pause
//	                        v                 | |  v                    pause done
//	                      gone               pausing -----------------------------> paused
//	                        ^                                                        |  ^
//	                        | killed               resume done                       |  | resume failed
//	                     killing <-- kill      running <---------------- resuming <--+--+
//	                                 (from every state but gone)          (resume)
//
// A VM that ends by itself (died) takes running, copying and pausing to gone.
// The table is the variable transitions; nothing changes a state but by it.
//
// What a client sees: creating, killing, gone: nothing (404). running, copying:
// "running". pausing, paused, resuming: "paused". Each operation takes effect at
// one moment between its begin and its end, the change of the state under
// Box.mu: pause when it enters pausing (a kill that comes between finds a paused
// sandbox), resume when it reaches running, kill when it enters killing. The
// tests check histories of concurrent operations against a sequential model.
//
// A long operation (create, pause, resume, copy) runs in its caller's goroutine,
// on a context that the caller's leaving does not end: a client that hangs up
// changes nothing. Kill cancels it and waits for it.
//
// The time to live is a timer per running box. At its end the box pauses or is
// killed, as its record says.
//
// Lock order: Fleet.mu, then Box.mu, then nothing. Neither is held across a call
// to the backend or the store's disk.
package lifecycle
