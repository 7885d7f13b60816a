package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/cohort"
	"github.com/agentzip/agentzip/internal/daemon"
	"github.com/agentzip/agentzip/internal/gateway"
	"github.com/agentzip/agentzip/internal/gateway/keys"
	"github.com/agentzip/agentzip/internal/units"
)

func newServeCmd() *cobra.Command {
	var file string
	var printConfig bool
	config := gateway.Default()
	given := gateway.Default() // what flags say
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve sandboxes to the E2B SDKs on one local port",
		Long: `Serves the E2B API and the traffic to its sandboxes on one port of this machine, and
prints what to export for the unmodified SDKs. Sandboxes are compressed while nobody
uses them.

Each setting can be a flag, an environment variable (AGENTZIP_ and its name), or stand
in a TOML file (--config, else ` + gateway.DefaultConfigFile + `): the first of these that says
anything counts. At the end (SIGTERM, ctrl-C) running sandboxes are paused or killed
(--on-exit); paused ones are there again after the next start. Pause, fork and snapshots
are not possible yet: what cannot be paused is killed.`,
		Example: `  agentzip serve
  agentzip serve --print-config > /etc/agentzip/serve.toml
  agentzip serve --port 0 --on-exit kill --template tornado`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := config.Load(gateway.ConfigFile(file), os.Getenv); err != nil {
				return usageError(err)
			}
			from, to := given.Settings(), config.Settings()
			for i, s := range from {
				if f := cmd.Flags().Lookup(s.Flag()); f.Changed {
					if err := to[i].Set(f.Value.String()); err != nil {
						return usageError(err)
					}
				}
			}
			if err := config.Check(); err != nil {
				return usageError(err)
			}
			if printConfig {
				return config.Print(cmd.OutOrStdout())
			}
			if err := requireRoot(cmd, nil); err != nil {
				return err
			}
			return serve(cmd, config)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&file, "config", os.Getenv("AGENTZIP_CONFIG"), "TOML file with settings")
	fl.BoolVar(&printConfig, "print-config", false, "print the settings in force as a commented TOML file and exit")
	for _, s := range given.Settings() {
		switch p := s.Value.(type) {
		case *string:
			fl.StringVar(p, s.Flag(), *p, s.Help)
		case *int:
			fl.IntVar(p, s.Flag(), *p, s.Help)
		case *bool:
			fl.BoolVar(p, s.Flag(), *p, s.Help)
		case *float64:
			fl.Float64Var(p, s.Flag(), *p, s.Help)
		case *time.Duration:
			fl.DurationVar(p, s.Flag(), *p, s.Help)
		}
	}
	return cmd
}

// gatewayDir is where the gateway keeps its records.
func gatewayDir(configured string) string {
	if configured != "" {
		return configured
	}
	return filepath.Join(stateDir(), "gateway")
}

func serve(cmd *cobra.Command, config *gateway.Config) (err error) {
	config.Dir = gatewayDir(config.Dir)
	isolation, err := cohort.ParseIsolation(config.Isolation)
	if err != nil {
		return usageError(err)
	}
	d, err := daemon.Open(daemon.Options{
		StateDir: stateDir(), LibDir: libDir(), Log: slog.Default(),
		PoolLimit: units.Bytes(config.PoolMiB) * units.MiB,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	backend := d.NewBackend(daemon.BackendOptions{Isolation: isolation, Compression: config.Compression, Warm: config.Warm})
	defer func() { err = errors.Join(err, backend.Close()) }()
	s, err := gateway.Open(gateway.Options{Config: config, Backend: backend, Agent: daemon.AgentVersion, Metrics: backend.Collectors(), Log: slog.Default()})
	if err != nil {
		return err
	}
	if err := s.Listen(cmd.Context()); err != nil {
		return errors.Join(err, s.Close())
	}
	if base, ok := s.Base(); ok {
		go func() {
			if err := backend.Prewarm(cmd.Context(), keys.DefaultTeam+"/", base); err != nil {
				slog.Warn("keep sandboxes ready", "err", err)
			}
		}()
	}
	if err := greet(cmd.OutOrStdout(), s, config.APIKey); err != nil {
		return errors.Join(err, s.Close())
	}
	return s.Run(cmd.Context())
}

// greet prints what a shell must export. A key is made when there is none at
// all; later the user has it, and we have only its hash.
func greet(w io.Writer, s *gateway.Server, lent string) error {
	key := lent
	if key == "" && s.Keys().Valid() == 0 {
		var err error
		if key, _, err = s.Keys().Create("first", keys.DefaultTeam); err != nil {
			return err
		}
	}
	text := "export E2B_API_KEY=" + key
	if key == "" {
		text = "export E2B_API_KEY=   # one of yours (agentzip key list), or: agentzip key create"
	}
	_, err := fmt.Fprintf(w, "%s\nexport E2B_API_URL=%s\nexport E2B_SANDBOX_URL=%s\n", text, s.URL(), s.URL())
	if err != nil {
		return fmt.Errorf("print what to export: %w", err)
	}
	return nil
}
