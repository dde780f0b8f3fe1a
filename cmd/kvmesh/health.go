package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/spf13/cobra"
)

// probe is what `kvmesh health` asks.
type probe struct {
	client  client
	nats    string
	auth    natsAuth
	ready   bool
	timeout time.Duration
}

func healthCommand() *cobra.Command {
	p := &probe{}
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Succeed if a kvmesh, or a NATS server, is well",
		Long: `Asks a running kvmesh, or with --nats a NATS server, how it is, and exits with 0 if it is
well. It is what health checks and probes call where there is no shell and no curl.`,
		Example: "  kvmesh health --server http://127.0.0.1:8090 --ready\n  kvmesh health --nats nats://127.0.0.1:4222",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := settle(cmd); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), p.timeout)
			defer cancel()
			if p.nats != "" {
				return p.askNATS(ctx)
			}
			return p.askHTTP(ctx)
		},
	}
	f := cmd.Flags()
	p.client.add(f)
	f.BoolVar(&p.ready, "ready", false, "well is only what answers truly: ask /ready instead of /health")
	f.StringVar(&p.nats, "nats", "", "URL of NATS servers to ask instead: JetStream has to answer")
	p.auth.add(f)
	f.DurationVar(&p.timeout, "timeout", 3*time.Second, "how long to wait for the answer")
	return cmd
}

func (p *probe) askHTTP(ctx context.Context) error {
	path := "/health"
	if p.ready {
		path = "/ready"
	}
	url := strings.TrimRight(p.client.server, "/") + path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if p.client.token != "" {
		req.Header.Set("Authorization", "Bearer "+p.client.token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	var why struct {
		Error   string   `json:"error"`
		Reasons []string `json:"reasons"`
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err == nil && json.Unmarshal(body, &why) == nil {
		if reasons := strings.Join(append(why.Reasons, why.Error), "; "); strings.Trim(reasons, "; ") != "" {
			return fmt.Errorf("%s: %s: %s", url, resp.Status, strings.Trim(reasons, "; "))
		}
	}
	return fmt.Errorf("%s: %s", url, resp.Status)
}

// askNATS connects to NATS and has JetStream answer.
func (p *probe) askNATS(ctx context.Context) error {
	options, err := p.auth.options()
	if err != nil {
		return err
	}
	nc, err := nats.Connect(p.nats, append(options, nats.Name("kvmesh health"), nats.Timeout(p.timeout), nats.NoReconnect())...)
	if err != nil {
		return fmt.Errorf("NATS at %s: %w", redact(p.nats), err)
	}
	defer nc.Close()
	js, err := p.auth.jetstream(nc)
	if err != nil {
		return err
	}
	if _, err := js.AccountInfo(ctx); err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			err = errors.New("JetStream does not answer: the servers of the cluster may not have found each other")
		}
		return fmt.Errorf("NATS at %s: %w", redact(p.nats), err)
	}
	return nil
}
