package restores

import (
	"context"
	"errors"

	"github.com/agentzip/agentzip/internal/bench"
)

// Config is what Measure does.
type Config struct {
	Main bench.Config // the paired run
}

// Measure runs the parts one after another and returns what they showed. With
// bench.ErrIntegrity there is a report too; with any other error there is none. When it
// returns, nothing that it started is left.
//
// The caller adds to the main run what only it knows: machine, template, where the
// trajectories come from.
func Measure(ctx context.Context, cfg Config) (*Report, error) {
	main, err := bench.Measure(ctx, cfg.Main)
	if err != nil && !errors.Is(err, bench.ErrIntegrity) {
		return nil, err
	}
	rep := &Report{Schema: Schema, Main: main, Where: whereOf(main.Runs), Notes: []string{}}
	return rep, err
}
