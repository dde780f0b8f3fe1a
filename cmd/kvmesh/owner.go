package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer/event"
)

func ownerCommand() *cobra.Command {
	w := event.Worker{Source: event.Source{Instance: "-"}}
	var labels []string
	cmd := &cobra.Command{
		Use:   "owner",
		Short: "Print a cache owner's id and topic, to start an engine with",
		Long: `Prints what --cache-owner auto makes of a worker: the id of its cache owner, which is
derived from model, block size, routing group, endpoint, rank and the label dc, and the topic
that its engine has to publish under. With --cache-owner ID it prints the topic of that id.`,
		Example: "  kvmesh owner --endpoint tcp://node-1:5557 --model my-model --block-size 16",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := settle(cmd); err != nil {
				return err
			}
			var err error
			if w.Labels, err = parseLabels(labels); err != nil {
				return fmt.Errorf("--label: %w", err)
			}
			if err := w.Validate(); err != nil {
				return err
			}
			w.Complete()
			out := json.NewEncoder(cmd.OutOrStdout())
			out.SetIndent("", "  ")
			return out.Encode(struct {
				CacheOwner string `json:"cache_owner"`
				Topic      string `json:"topic"`
			}{w.CacheOwner, w.Topic})
		},
	}
	f := cmd.Flags()
	f.StringVar(&w.Endpoint, "endpoint", "", "the engine's PUB socket, as it will be registered")
	f.Uint32Var(&w.Rank, "rank", 0, "data-parallel rank")
	f.StringVar(&w.Model, "model", "default", "model")
	f.StringVar(&w.Group, "routing-group", "default", "routing group")
	f.Uint32Var(&w.BlockSize, "block-size", 16, "block size, in tokens")
	f.StringArrayVar(&labels, "label", nil, "labels, such as dc=west")
	f.StringVar(&w.CacheOwner, "cache-owner", event.AutoOwner, "auto, or an id")
	return cmd
}
