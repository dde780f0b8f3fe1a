// Command kvmesh is the index that LLM routers ask which worker holds the longest
// part of a prompt in its KV cache.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := root().ExecuteContext(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "kvmesh:", err)
		os.Exit(1)
	}
}

// root returns the command line.
func root() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "kvmesh",
		Short: "Which worker holds the longest part of this prompt in its KV cache?",
		Long: `kvmesh dials the KV-cache event sockets of LLM engines (vLLM, SGLang, TensorRT-LLM) once,
repairs and normalises their streams, keeps them as a log in NATS JetStream, and answers
exactly, over HTTP and NATS, which worker holds how much of a prompt.

Every flag can also be given in the environment (--data-dir is KVMESH_DATA_DIR) and in the
file that --config names (data-dir: ...). A flag on the command line wins over the
environment, and that over the file.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version(),
	}
	cmd.AddCommand(serveCommand(), bridgeCommand(), indexerCommand(), mockCommand(), benchCommand(), healthCommand(), checkCommand(), reshardCommand(), versionCommand(), docsCommand(), ownerCommand())
	cmd.AddCommand(clientCommands()...)
	completeValues(cmd)
	cmd.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return fmt.Errorf("%w; %s --help lists the flags", err, c.CommandPath())
	})
	return cmd
}
