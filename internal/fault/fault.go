// Package fault holds named points at which a test can make an operation fail.
//
// Product code declares a point once and asks it before the operation:
//
//	var copyPoint = fault.NewPoint("pager.copy")
//	...
//	if err := copyPoint.Err(); err != nil { return err }
//
// A point is in one of two states:
//
//	disarmed --Arm--> armed (skips `after` calls) --one failure--> disarmed
//	armed --Disarm--> disarmed
//
// A disarmed point costs one atomic load and nothing in the product arms one:
// only tests do. Everything here is safe for concurrent use.
//
// Lock order: registry.mu, then nothing. Err takes the lock only when armed.
package fault

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// A Point is one place that can be made to fail.
type Point struct {
	name  string      // immutable
	armed atomic.Bool // written under registry.mu
	after int         // guarded by registry.mu; calls that still succeed before the failure
	err   error       // guarded by registry.mu; what the failure returns
	hits  int         // guarded by registry.mu; failures delivered since the process started
}

// registry knows every point of the process by name.
var registry = struct {
	mu     sync.Mutex
	points map[string]*Point // guarded by mu
}{points: map[string]*Point{}}

// NewPoint declares a point; call it once, from a package variable.
//
// Preconditions: name is unused. A second use panics: two places with one name
// could not be told apart by the test that arms it.
func NewPoint(name string) *Point {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if registry.points[name] != nil {
		panic("fault: point declared twice: " + name)
	}
	p := &Point{name: name}
	registry.points[name] = p
	return p
}

// Err returns nil unless the point is armed and its turn has come; then it
// returns the armed error once and the point is disarmed.
func (p *Point) Err() error {
	if !p.armed.Load() {
		return nil
	}
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if !p.armed.Load() {
		return nil
	}
	if p.after > 0 {
		p.after--
		return nil
	}
	p.armed.Store(false)
	p.hits++
	return p.err
}

// Arm makes the named point fail once with err, after `after` further calls that
// succeed. It fails if no such point is declared in this process.
func Arm(name string, after int, err error) error {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	p := registry.points[name]
	if p == nil {
		return fmt.Errorf("arm fault point: no point named %q", name)
	}
	p.after, p.err = after, err
	p.armed.Store(true)
	return nil
}

// Disarm makes the named point succeed again. An unknown name is ignored.
func Disarm(name string) {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if p := registry.points[name]; p != nil {
		p.armed.Store(false)
	}
}

// Hits returns how many failures the named point has delivered, so that a test
// can prove that the branch it armed was really taken.
func Hits(name string) int {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if p := registry.points[name]; p != nil {
		return p.hits
	}
	return 0
}

// Names lists the declared points in alphabetical order.
func Names() []string {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	names := make([]string, 0, len(registry.points))
	for n := range registry.points {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}
