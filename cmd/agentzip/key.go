package main

import (
	"errors"
	"fmt"
	"log/slog"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentzip/agentzip/internal/gateway"
	"github.com/agentzip/agentzip/internal/gateway/keys"
)

func newKeyCmd() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "key",
		Short: "Create, list and revoke API keys of agentzip serve",
		Long: `API keys open the sandboxes of their team. Only their hash is kept. The commands work
whether a server runs or not.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().StringVar(&dir, "dir", envOr("AGENTZIP_DIR", ""), "folder of the gateway's records (default: gateway below the state folder)")
	cmd.AddCommand(newKeyCreateCmd(&dir), newKeyListCmd(&dir), newKeyRevokeCmd(&dir))
	return cmd
}

func withKeys(dir string, do func(gateway.KeyStore) error) (err error) {
	k, err := gateway.OpenKeys(gatewayDir(dir), slog.Default())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, k.Close()) }()
	return do(k)
}

func newKeyCreateCmd(dir *string) *cobra.Command {
	var team string
	cmd := &cobra.Command{
		Use:   "create [NAME]",
		Short: "Make a key and print it, this once",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := "key"
			if len(args) == 1 {
				name = args[0]
			}
			return withKeys(*dir, func(k gateway.KeyStore) error {
				secret, _, err := k.Create(name, team)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintln(cmd.OutOrStdout(), secret)
				return err
			})
		},
	}
	cmd.Flags().StringVar(&team, "team", keys.DefaultTeam, "team whose sandboxes it opens")
	return cmd
}

func newKeyListCmd(dir *string) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the keys",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return withKeys(*dir, func(k gateway.KeyStore) error {
				list, err := k.List()
				if err != nil {
					return err
				}
				if asJSON {
					return printJSON(cmd.OutOrStdout(), list)
				}
				w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 4, 2, ' ', 0)
				fmt.Fprintln(w, "ID\tNAME\tTEAM\tKEY\tCREATED\tREVOKED")
				for _, key := range list {
					revoked := "-"
					if !key.Revoked.IsZero() {
						revoked = key.Revoked.Format(time.DateTime)
					}
					fmt.Fprintf(w, "%s\t%s\t%s\t...%s\t%s\t%s\n", key.ID, key.Name, key.Team, key.Hint, key.Created.Format(time.DateTime), revoked)
				}
				return w.Flush()
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newKeyRevokeCmd(dir *string) *cobra.Command {
	return &cobra.Command{
		Use:   "revoke ID",
		Short: "End a key, at once",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return withKeys(*dir, func(k gateway.KeyStore) error { return k.Revoke(args[0]) })
		},
	}
}
