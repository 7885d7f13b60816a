//go:build race

package pager

const raceEnabled = true
