package pool

import "github.com/agentzip/agentzip/internal/units"

// Stats is an account of a pool. Footprint = Live + Meta + Slack.
type Stats struct {
	Entries   int64
	Live      units.Bytes // encoded bytes
	Meta      units.Bytes // entry headers, the handle table's pages, tables on the Go heap, readers, this process's lowest page tables of the file
	Slack     units.Bytes // arena memory that is neither: dead entries, rounding, unused ends of segments and pages
	Resident  units.Bytes // pages in memory, of arena and handle table: what fstat(2) says of the memory file
	Footprint units.Bytes // Resident and the tables outside the file
}

// Stats returns the account: exact while no call is changing the pool, else each
// figure is right for some moment of the call.
func (p *Pool) Stats() Stats {
	s := Stats{
		Entries: p.entries.Load(),
		Live:    units.Bytes(p.live.Load()),
	}
	table, tables := units.Bytes(p.inTable.Load()), units.Bytes(p.tables.Load())
	s.Resident = units.Bytes(p.inArena.Load()) + table
	s.Footprint = s.Resident + tables
	s.Meta = units.Bytes(p.headers.Load()) + table + tables
	s.Slack = s.Footprint - s.Live - s.Meta
	return s
}

// Footprint returns the memory held because of the pool: what the limit limits.
func (p *Pool) Footprint() units.Bytes {
	return units.Bytes(p.inArena.Load() + p.inTable.Load() + p.tables.Load())
}
