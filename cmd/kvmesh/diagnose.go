package main

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/cmd/kvmesh/check"
)

// errCheck: `kvmesh check` found something that has to be mended.
var errCheck = errors.New("something has to be mended, see above")

func checkCommand() *cobra.Command {
	var o check.Options
	var auth natsAuth
	var workers workerFlags
	var file string
	var asJSON, strict bool
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Look at a deployment, and say what is wrong and how to mend it",
		Long: `Looks at NATS (is it reached, JetStream and its limits, the stream of the log, clocks), at the
bridges that are running, at the engines that are registered or given by --worker (do their
sockets answer, do their ports collide with more ranks), and with --server at an indexer.
Changes nothing. Exits with 1 if something has to be mended.`,
		Example: `  kvmesh check --nats nats://nats-1:4222 --replicas 3 --server http://127.0.0.1:8090
  kvmesh check --nats '' --worker w0=tcp://10.0.0.5:5557,replay=tcp://10.0.0.5:5558 --ranks 2`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := settle(cmd); err != nil {
				return err
			}
			var err error
			if o.Workers, err = workers.parse(cmd.Flags()); err != nil {
				return err
			}
			if o.Connect, err = auth.options(); err != nil {
				return err
			}
			o.Domain = auth.domain
			found := check.Run(cmd.Context(), o)
			if asJSON {
				encoder := json.NewEncoder(cmd.OutOrStdout())
				encoder.SetIndent("", "  ")
				err = encoder.Encode(found)
			} else {
				err = check.Print(cmd.OutOrStdout(), found)
			}
			worst := check.Worst(found)
			if worst == check.Fail || strict && worst == check.Warn {
				err = errors.Join(err, errCheck)
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.NATS, "nats", "nats://127.0.0.1:4222", "URL of the NATS servers; empty: leave them out")
	auth.add(f)
	f.IntVar(&o.Replicas, "replicas", 1, "how many NATS servers are to keep the log")
	f.IntVar(&o.Shards, "log-shards", 0, "how many streams the log is to be in; 0: as many as it is in")
	f.StringVar(&o.Server, "server", "", "URL of an indexer to look at; empty: none")
	f.StringVar(&o.Token, "token", "", "its bearer token")
	f.IntVar(&o.Ranks, "ranks", 0, "data-parallel ranks that engines will have; 0: those that are registered")
	f.DurationVar(&o.Timeout, "timeout", 3*time.Second, "how long to wait for an answer")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	f.BoolVar(&strict, "strict", false, "exit with 1 also if there are only warnings")
	f.StringVar(&file, "config", "", "configuration file, a mapping of flags to values")
	workers.add(f)
	return cmd
}
