package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"reflect"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

// queryBench measures what a query over HTTP costs its server.
type queryBench struct {
	rate     float64
	duration time.Duration
	rounds   int
	conns    int
	json     string
	server   string // directory; set in the process that is the server
	profile  profiler
}

func benchQueryCommand() *cobra.Command {
	b := &queryBench{}
	cmd := &cobra.Command{
		Use:   "query",
		Short: "Measure what a query over HTTP costs its server, and how long it takes",
		Long: `Starts a server in a process of its own, whose index holds 64 workers with 16 sequences of
1,024 blocks each; eight workers hold the same sequences. Then it asks for prompts of
16,384 tokens at a fixed rate, whether answers come or not, over connections that are kept:
as JSON, as octets, and, to see what net/http costs alone, with the same bodies and replies
from a handler that only reads and writes. The processor time is the server's, idle_cpu_us_s
of it what it uses in a second without queries. It depends on the rate: a process that sleeps
between two queries has to be woken for each. Every reply is compared with a naive model.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if b.server != "" {
				return serveQueries(cmd.Context(), b.server, cmd.InOrStdin(), cmd.OutOrStdout(), &b.profile)
			}
			f, err := b.run(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return f.print(cmd.OutOrStdout(), b.json)
		},
	}
	cmd.Flags().Float64Var(&b.rate, "rate", 4000, "queries a second")
	cmd.Flags().DurationVar(&b.duration, "duration", 2*time.Second, "how long each form is asked for in each round")
	cmd.Flags().IntVar(&b.rounds, "rounds", 3, "rounds; the figures are those of the median one")
	cmd.Flags().IntVar(&b.conns, "connections", 16, "connections")
	cmd.Flags().StringVar(&b.server, "server-dir", "", "be the server, with its log in this directory")
	cmd.Flags().Lookup("server-dir").Hidden = true
	b.profile.add(cmd.Flags())
	cmd.Flags().StringVar(&b.json, "json", "", "file to write the figures to, as JSON")
	return cmd
}

// start starts the server's process.
func (b *queryBench) start(ctx context.Context, dir string) (*peer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	args := []string{"bench", "query", "--server-dir", dir}
	if b.profile.path != "" {
		args = append(args, "--cpuprofile", b.profile.path)
	}
	cmd := exec.CommandContext(ctx, self, args...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &peer{say: in, hear: json.NewDecoder(out), wait: cmd.Wait}
	var hello usage
	if err := p.hear.Decode(&hello); err != nil {
		return nil, errors.Join(fmt.Errorf("the server did not start: %w", err), p.stop())
	}
	p.addr = hello.Addr
	return p, nil
}

func (p *peer) stop() error { return errors.Join(p.say.Close(), p.wait()) }

// form is one way to ask.
type form struct {
	name     string
	requests [][]byte // whole ones, one a prompt
}

// requestTo returns a request as bytes.
func requestTo(method, path, contentType string, body []byte) []byte {
	head := fmt.Sprintf("%s %s HTTP/1.1\r\nHost: bench\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n", method, path, contentType, len(body))
	return append([]byte(head), body...)
}

// benchPrompts is how many prompts are asked for in turn.
const benchPrompts = 32

// sequenceOf returns the sequence of a prompt: those of all groups, in turn.
func sequenceOf(prompt int) int { return held(prompt%fleetGroup*fleetGroup, prompt/fleetGroup) }

// forms returns the requests of each form.
func forms() (out []form, err error) {
	out = []form{{name: "json"}, {name: "binary"}, {name: "json_floor"}, {name: "binary_floor"}}
	for i := range benchPrompts {
		tokens := fleetTokens(sequenceOf(i))
		body, err := json.Marshal(map[string]any{"model_name": fleetPartition.Model, "token_ids": tokens})
		if err != nil {
			return nil, err
		}
		octets := make([]byte, 0, 4*len(tokens))
		for _, t := range tokens {
			octets = binary.LittleEndian.AppendUint32(octets, t)
		}
		for f, r := range [][]byte{
			requestTo("POST", "/query", "application/json", body),
			requestTo("POST", "/query?model_name="+fleetPartition.Model, "application/octet-stream", octets),
			requestTo("POST", "/floor", "application/json", body),
			requestTo("POST", "/floor", "application/octet-stream", octets),
		} {
			out[f].requests = append(out[f].requests, r)
		}
	}
	return out, nil
}

func (b *queryBench) run(ctx context.Context, progress io.Writer) (figures, error) {
	dir, err := os.MkdirTemp("", "kvmesh-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	fmt.Fprintln(progress, "starting a server and filling its index")
	server, err := b.start(ctx, dir)
	if err != nil {
		return nil, err
	}
	defer server.stop()
	all, err := forms()
	if err != nil {
		return nil, err
	}
	check := newChecker()
	conns := make([]*benchConn, b.conns)
	for i := range conns {
		if conns[i], err = dialBench(server.addr); err != nil {
			return nil, err
		}
		defer conns[i].close()
	}
	// The floor answers with a reply that the API gave.
	reply, err := conns[0].ask(all[0].requests[0])
	if err != nil {
		return nil, err
	}
	check.floor = bytes.Clone(reply)
	if _, err := conns[0].ask(requestTo("PUT", "/floor", "application/json", check.floor)); err != nil {
		return nil, err
	}
	f := figures{}
	rounds := map[string][]float64{}
	note := func(name string, v float64) { rounds[name] = append(rounds[name], v) }
	for round := range b.rounds {
		fmt.Fprintf(progress, "round %d of %d\n", round+1, b.rounds)
		if err := b.idle(ctx, server, note); err != nil {
			return nil, err
		}
		for _, form := range all {
			if err := b.measure(ctx, server, conns, form, check, note); err != nil {
				return nil, err
			}
		}
	}
	for name, values := range rounds {
		f[name] = percentile(values, 50)
	}
	f["queries"], f["errors"], f["mismatches"] = float64(check.asked), float64(check.errors), float64(check.mismatches)
	return f, nil
}

// idle notes what the server uses while nobody asks.
func (b *queryBench) idle(ctx context.Context, server *peer, note func(string, float64)) error {
	before, err := server.usage()
	if err != nil {
		return err
	}
	select {
	case <-time.After(b.duration / 2):
	case <-ctx.Done():
		return ctx.Err()
	}
	after, err := server.usage()
	note("idle_cpu_us_s", float64((after.CPU-before.CPU).Microseconds())/(b.duration/2).Seconds())
	return err
}

// measure asks at the rate for the duration, and notes the figures.
func (b *queryBench) measure(ctx context.Context, server *peer, conns []*benchConn, f form, check *checker, note func(string, float64)) error {
	n := int(b.rate * b.duration.Seconds())
	type due struct {
		prompt int
		at     time.Time
	}
	queue := make(chan due, n) // whether answers come or not
	latencies := make([][]int64, len(conns))
	var tasks sync.WaitGroup
	for i, c := range conns {
		tasks.Go(func() {
			for d := range queue {
				reply, err := c.ask(f.requests[d.prompt])
				latencies[i] = append(latencies[i], int64(time.Since(d.at)))
				check.check(f.name, d.prompt, reply, err)
			}
		})
	}
	before, err := server.usage()
	began := time.Now()
	for i := 0; i < n && err == nil; i++ {
		time.Sleep(time.Until(began.Add(time.Duration(float64(i) / b.rate * 1e9))))
		queue <- due{i % benchPrompts, time.Now()}
		err = ctx.Err()
	}
	close(queue)
	tasks.Wait()
	if err != nil {
		return err
	}
	after, err := server.usage()
	if err != nil {
		return err
	}
	var all []int64
	for _, l := range latencies {
		all = append(all, l...)
	}
	size := "_16k_"
	if f.name == "json_floor" || f.name == "binary_floor" {
		size = "_"
	}
	note(f.name+size+"cpu_us", float64((after.CPU-before.CPU).Nanoseconds())/1e3/float64(n))
	note(f.name+size+"allocs", float64(after.Mallocs-before.Mallocs)/float64(n))
	note(f.name+size+"p50_us", float64(percentile(all, 50))/1e3)
	note(f.name+size+"p99_us", float64(percentile(all, 99))/1e3)
	return nil
}

// -- connections --------------------------------------------------------------

// benchConn is a connection that is kept. It writes whole requests, so that the
// client costs little of the machine.
type benchConn struct {
	conn net.Conn
	in   *bufio.Reader
	buf  bytes.Buffer
}

func dialBench(addr string) (*benchConn, error) {
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &benchConn{conn: conn, in: bufio.NewReaderSize(conn, 16<<10)}, nil
}

func (c *benchConn) close() { c.conn.Close() }

// ask makes a request and returns the body of the reply, which is valid until the
// next one.
func (c *benchConn) ask(request []byte) ([]byte, error) {
	c.conn.SetDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.conn.Write(request); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	c.buf.Reset()
	if _, err := c.buf.ReadFrom(resp.Body); err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %.200s", resp.Status, c.buf.Bytes())
	}
	return c.buf.Bytes(), nil
}

// -- checking -----------------------------------------------------------------

// checker compares replies with a naive model of what the fleet holds.
type checker struct {
	state  model.State
	locals [benchPrompts][]uint64
	floor  []byte

	mu                        sync.Mutex
	right                     map[string][]byte // replies that were found right, by form and prompt
	asked, errors, mismatches int
}

func newChecker() *checker {
	c := &checker{right: map[string][]byte{}}
	c.state = model.State{BlockSize: fleetBlockSize, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
	for worker := range fleetWorkers {
		blocks := map[uint64]bool{}
		for i := range fleetSequences {
			for _, seq := range hash.AppendSequence(nil, fleetLocals(held(worker, i))) {
				blocks[seq] = true
			}
		}
		c.state.Held[model.Rank{Instance: fleetSource(worker).Instance}] = map[model.Tier]map[uint64]bool{model.Device: blocks}
	}
	for i := range c.locals {
		c.locals[i] = fleetLocals(sequenceOf(i))
	}
	return c
}

// check compares a reply. One that has the bytes of a right one is right.
func (c *checker) check(form string, prompt int, reply []byte, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked++
	key := fmt.Sprint(form, prompt)
	want := c.right[key]
	if c.floor != nil && (form == "json_floor" || form == "binary_floor") {
		want = c.floor
	}
	switch {
	case err != nil:
		c.errors++
	case want != nil && bytes.Equal(reply, want):
	case !c.rightly(prompt, reply):
		c.mismatches++
	default:
		c.right[key] = bytes.Clone(reply)
	}
}

// rightly tells whether a reply is what the model answers.
func (c *checker) rightly(prompt int, reply []byte) bool {
	var r struct {
		Scores    map[string]map[uint32]int `json:"scores"`
		Instances map[string]struct {
			GPU     int            `json:"gpu"`
			CPU     int            `json:"cpu"`
			Disk    int            `json:"disk"`
			Longest int            `json:"longest_matched"`
			DP      map[uint32]int `json:"dp"`
		} `json:"instances"`
	}
	if json.Unmarshal(reply, &r) != nil || len(r.Instances) != len(r.Scores) {
		return false
	}
	got := map[string]model.Row{}
	for name, in := range r.Instances {
		got[name] = model.Row{GPU: in.GPU, CPU: in.CPU, Disk: in.Disk, Longest: in.Longest, DP: in.DP}
		if !maps.Equal(in.DP, r.Scores[name]) {
			return false
		}
	}
	return len(got) > 0 && reflect.DeepEqual(got, c.state.Answer(c.locals[prompt]))
}
