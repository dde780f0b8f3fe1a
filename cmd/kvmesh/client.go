package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// client asks a running kvmesh.
type client struct{ server, token string }

func (c *client) add(flags *pflag.FlagSet) {
	flags.StringVar(&c.server, "server", "http://127.0.0.1:8090", "URL of the kvmesh to ask")
	flags.StringVar(&c.token, "token", "", "bearer token")
}

// call makes a request and copies the reply's JSON, indented, to out.
func (c *client) call(ctx context.Context, out io.Writer, method, path string, body any) error {
	var reader io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return err
		}
		reader = bytes.NewReader(data)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(c.server, "/")+path, reader)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 400 {
		var failure struct {
			Error string `json:"error"`
		}
		if json.Unmarshal(data, &failure) == nil && failure.Error != "" {
			return errors.New(failure.Error)
		}
		return fmt.Errorf("%s %s: %s", method, path, resp.Status)
	}
	var pretty bytes.Buffer
	if json.Indent(&pretty, data, "", "  ") == nil {
		data = pretty.Bytes()
	}
	_, err = out.Write(append(bytes.TrimRight(data, "\n"), '\n'))
	return err
}

func clientCommands() []*cobra.Command {
	return []*cobra.Command{workersCommand(), queryCommand(), plainGet("dump", "Print all blocks of all workers", "/dump"),
		digestCommand(), registerCommand(), unregisterCommand()}
}

func newClientCommand(use, short string, run func(c *client, cmd *cobra.Command, args []string) error) *cobra.Command {
	c := &client{}
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, args []string) error {
		if err := settle(cmd); err != nil {
			return err
		}
		return run(c, cmd, args)
	}}
	c.add(cmd.Flags())
	return cmd
}

func plainGet(use, short, path string) *cobra.Command {
	return newClientCommand(use, short, func(c *client, cmd *cobra.Command, _ []string) error {
		return c.call(cmd.Context(), cmd.OutOrStdout(), http.MethodGet, path, nil)
	})
}

func workersCommand() *cobra.Command {
	var model, group string
	cmd := newClientCommand("workers", "Print the workers and how they are", func(c *client, cmd *cobra.Command, _ []string) error {
		q := url.Values{}
		if model != "" {
			q.Set("model_name", model)
		}
		if group != "" {
			q.Set("routing_group", group)
		}
		return c.call(cmd.Context(), cmd.OutOrStdout(), http.MethodGet, "/workers?"+q.Encode(), nil)
	})
	cmd.Flags().StringVar(&model, "model", "", "of this model only")
	cmd.Flags().StringVar(&group, "routing-group", "", "of this routing group only")
	return cmd
}

func queryCommand() *cobra.Command {
	var model, group, lora, salt string
	cmd := newClientCommand("query TOKEN_IDS", "Print who holds how much of a prompt", func(c *client, cmd *cobra.Command, args []string) error {
		text := args[0]
		if text == "-" {
			data, err := io.ReadAll(os.Stdin)
			if err != nil {
				return err
			}
			text = string(data)
		}
		ids := []uint32{}
		for _, field := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(", \t\r\n[]", r) }) {
			id, err := strconv.ParseUint(field, 10, 32)
			if err != nil {
				return fmt.Errorf("%q is no token id: want integers from 0 to %d, separated by commas or spaces", field, uint32(math.MaxUint32))
			}
			ids = append(ids, uint32(id))
		}
		body := map[string]any{"model_name": model, "routing_group": group, "token_ids": ids}
		if lora != "" {
			body["lora_name"] = lora
		}
		if salt != "" {
			body["cache_salt"] = salt
		}
		return c.call(cmd.Context(), cmd.OutOrStdout(), http.MethodPost, "/query", body)
	})
	cmd.Args = func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("want one argument, the token ids of the prompt, such as 1,2,3, or - to read them; there are %d", len(args))
		}
		return nil
	}
	cmd.Example = "  kvmesh query --model my-model 1,2,3,4,5,6,7,8\n  kvmesh query --model my-model - < token_ids.json"
	cmd.Flags().StringVar(&model, "model", "default", "model of the prompt")
	cmd.Flags().StringVar(&group, "routing-group", "default", "routing group")
	cmd.Flags().StringVar(&lora, "lora", "", "LoRA adapter")
	cmd.Flags().StringVar(&salt, "cache-salt", "", "cache salt")
	return cmd
}

func registerCommand() *cobra.Command {
	f := &workerFlags{}
	cmd := newClientCommand("register", "Register workers", func(c *client, cmd *cobra.Command, _ []string) error {
		workers, err := f.parse(cmd.Flags())
		if err != nil {
			return err
		}
		if len(workers) == 0 {
			return errors.New("no --worker given: want instance[:rank]=endpoint[,replay=endpoint][,topic=t][,owner=auto|id]")
		}
		for _, w := range workers {
			body := map[string]any{
				"instance_id": w.Instance, "dp_rank": w.Rank, "endpoint": w.Endpoint, "model_name": w.Model, "routing_group": w.Group,
				"block_size": w.BlockSize, "topic": w.Topic, "engine": w.Engine,
			}
			if len(w.Labels) > 0 {
				body["labels"] = w.Labels
			}
			if w.TTL > 0 {
				body["ttl_seconds"] = int64(w.TTL / time.Second)
			}
			if w.ReplayEndpoint != "" {
				body["replay_endpoint"] = w.ReplayEndpoint
			}
			out := io.Discard
			if w.CacheOwner != "" {
				body["cache_owner"], out = w.CacheOwner, cmd.OutOrStdout()
			}
			if err := c.call(cmd.Context(), out, http.MethodPost, "/register", body); err != nil {
				return fmt.Errorf("%s: %w", w.Instance, err)
			}
		}
		return nil
	})
	f.add(cmd.Flags())
	return cmd
}

func unregisterCommand() *cobra.Command {
	var instance, model, group string
	rank := -1
	cmd := newClientCommand("unregister", "Unregister a worker", func(c *client, cmd *cobra.Command, _ []string) error {
		if instance == "" {
			return errors.New("no --instance given")
		}
		body := map[string]any{"instance_id": instance, "model_name": model}
		if group != "" {
			body["routing_group"] = group
		}
		if rank >= 0 {
			body["dp_rank"] = rank
		}
		return c.call(cmd.Context(), io.Discard, http.MethodPost, "/unregister", body)
	})
	cmd.Flags().StringVar(&instance, "instance", "", "instance id")
	cmd.Flags().StringVar(&model, "model", "default", "its model")
	cmd.Flags().StringVar(&group, "routing-group", "", "its routing group; empty: any")
	cmd.Flags().IntVar(&rank, "rank", -1, "one rank of it; -1: all")
	return cmd
}
