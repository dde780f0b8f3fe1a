package main

import (
	"log/slog"

	"github.com/spf13/cobra"
)

// benchNATSCommand is a NATS server in a process of its own, so that what the
// log costs can be told from what its users do.
func benchNATSCommand() *cobra.Command {
	var flags natsFlags
	var dir, pprof string
	cmd := &cobra.Command{
		Use:    "nats",
		Short:  "Run a NATS server with JetStream, for other benchmarks",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			stop, err := serveProfiles(pprof)
			if err != nil {
				return err
			}
			defer stop()
			s, err := flags.embed(dir, slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), &slog.HandlerOptions{Level: slog.LevelWarn})))
			if err != nil {
				return err
			}
			<-cmd.Context().Done()
			s.Shutdown()
			s.WaitForShutdown()
			return nil
		},
	}
	cmd.Flags().StringVar(&flags.listen, "listen", "127.0.0.1:4222", "address on which it takes clients")
	cmd.Flags().StringVar(&dir, "data-dir", "kvmesh-data", "its directory")
	cmd.Flags().StringVar(&pprof, "pprof", "", "address to serve profiles on")
	return cmd
}
