package engines

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/workload"
)

// Limits of a request over HTTP.
const (
	maxBody   = 16 << 20
	maxTokens = 1 << 22
)

// Generate is the body of POST /generate. The prompt is given as tokens or as
// segments.
type Generate struct {
	Instance string      `json:"instance_id,omitempty"`
	Rank     uint32      `json:"dp_rank,omitempty"`
	Tokens   []uint32    `json:"token_ids,omitempty"`
	Segments [][2]uint64 `json:"segments,omitempty"` // seed and number of tokens
	LoRA     string      `json:"lora_name,omitempty"`
	Salt     string      `json:"cache_salt,omitempty"`
	// MaxTokens is how many tokens the answer has, and Seed what they follow from.
	MaxTokens int    `json:"max_tokens,omitempty"`
	Seed      uint64 `json:"seed,omitempty"`
}

// Generated is the reply. Numbers are tokens.
type Generated struct {
	Instance     string  `json:"instance_id"`
	Rank         uint32  `json:"dp_rank"`
	Prompt       int     `json:"prompt_tokens"`
	Cached       int     `json:"cached_tokens"`
	CachedDevice int     `json:"cached_device_tokens"`
	CachedHost   int     `json:"cached_host_tokens"`
	Output       int     `json:"completion_tokens"`
	PrefillMS    float64 `json:"prefill_ms"`
	DecodeMS     float64 `json:"decode_ms"`
	// Next is the number of the engine's next batch, and Published when the last
	// one was published, in ns since 1970.
	Next      uint64 `json:"next_batch"`
	Published int64  `json:"published_ns"`
}

// Described is a worker in the reply to GET /workers.
type Described struct {
	Instance  string `json:"instance_id"`
	Rank      uint32 `json:"dp_rank"`
	Endpoint  string `json:"endpoint"`
	Replay    string `json:"replay_endpoint,omitempty"`
	Topic     string `json:"topic,omitempty"`
	Engine    string `json:"engine"`
	BlockSize int    `json:"block_size"`
	Domain    string `json:"domain,omitempty"`
	// CacheOwner is the id of the host tier's cache owner. Describe does not know
	// it: it depends on how others reach the endpoint.
	CacheOwner string `json:"cache_owner,omitempty"`
}

// Describe returns what there is to know of each worker to register it.
func (f *Fleet) Describe() []Described {
	out := make([]Described, 0, len(f.Workers))
	for _, w := range f.Workers {
		out = append(out, Described{
			Instance: w.Instance, Rank: w.Rank, Endpoint: w.Engine.Addr(), Replay: w.Engine.ReplayAddr(), Topic: w.Topic,
			Engine: f.profile, BlockSize: f.o.Cache.BlockSize, Domain: w.Domain,
		})
	}
	return out
}

// Held is a worker in the reply to GET /digests: what its cache holds. Next is
// the number of its next batch.
type Held struct {
	Instance string        `json:"instance_id"`
	Rank     uint32        `json:"dp_rank"`
	Next     uint64        `json:"next"`
	Digests  event.Digests `json:"digests"`
}

// Handler serves the fleet over HTTP:
//
//	GET  /workers                                   the workers, to be registered
//	POST /generate                                  runs a request on the worker that it names
//	POST /workers/{instance}/{rank}/generate        the same
//	POST /v1/completions                            OpenAI's, on the worker of the header X-Worker: instance:rank
//	POST /workers/{instance}/{rank}/v1/completions  the same
//	POST /faults                                    makes a fault happen
//	GET  /totals                                    sums over all workers
//	GET  /digests                                   what each cache holds, and whether all of it is published
//	GET  /health
func (f *Fleet) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /workers", func(w http.ResponseWriter, _ *http.Request) { reply(w, f.Describe()) })
	mux.HandleFunc("POST /generate", f.generate)
	mux.HandleFunc("POST /workers/{instance}/{rank}/generate", f.generate)
	mux.HandleFunc("POST /v1/completions", f.completions)
	mux.HandleFunc("POST /workers/{instance}/{rank}/v1/completions", f.completions)
	mux.HandleFunc("POST /faults", f.fault)
	mux.HandleFunc("GET /totals", func(w http.ResponseWriter, _ *http.Request) { reply(w, f.Totals()) })
	mux.HandleFunc("GET /digests", f.digests)
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { reply(w, map[string]string{"status": "ok"}) })
	return mux
}

func (f *Fleet) generate(w http.ResponseWriter, r *http.Request) {
	var in Generate
	if !read(w, r, &in) || !fromPath(w, r, &in.Instance, &in.Rank) {
		return
	}
	worker, err := f.Worker(in.Instance, in.Rank)
	if err != nil {
		fail(w, err)
		return
	}
	job, err := in.job()
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	res, err := worker.Generate(r.Context(), job)
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, Generated{
		Instance: worker.Instance, Rank: worker.Rank, Prompt: res.Prompt, Cached: res.CachedDevice + res.CachedHost,
		CachedDevice: res.CachedDevice, CachedHost: res.CachedHost, Output: res.Output,
		PrefillMS: ms(res.Prefill), DecodeMS: ms(res.Decode), Next: res.Next, Published: res.Published.UnixNano(),
	})
}

// job returns what the engine is to do.
func (g *Generate) job() (Job, error) {
	if g.MaxTokens < 0 || g.MaxTokens > maxTokens {
		return Job{}, fmt.Errorf("max_tokens is %d, want 0 to %d", g.MaxTokens, maxTokens)
	}
	job := Job{Prompt: cache.Prompt{Tokens: g.Tokens, LoRA: g.LoRA, Salt: g.Salt}}
	if len(g.Segments) > 0 {
		if len(g.Tokens) > 0 {
			return Job{}, errors.New("both token_ids and segments are given")
		}
		n := uint64(0)
		segments := make([]workload.Segment, len(g.Segments))
		for i, s := range g.Segments {
			if n += min(s[1], maxTokens+1); n > maxTokens {
				return Job{}, fmt.Errorf("the segments have more than %d tokens", maxTokens)
			}
			segments[i] = workload.Segment{Seed: s[0], Tokens: int(s[1])}
		}
		job.Prompt.Tokens = workload.Tokens(segments)
	}
	job.Output = workload.Segment{Seed: g.Seed, Tokens: g.MaxTokens}.Append(nil)
	return job, nil
}

func (f *Fleet) fault(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Instance   string  `json:"instance_id"`
		Rank       uint32  `json:"dp_rank"`
		Fault      string  `json:"fault"`
		Count      int     `json:"count"`
		DurationMS float64 `json:"duration_ms"`
	}
	if !read(w, r, &in) {
		return
	}
	worker, err := f.Worker(in.Instance, in.Rank)
	if err == nil {
		err = worker.Fail(Fault{Kind: in.Fault, Count: in.Count, Duration: time.Duration(in.DurationMS * float64(time.Millisecond))})
	}
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, map[string]string{"status": "ok"})
}

// Truth is the reply to GET /digests.
type Truth struct {
	Settled bool   `json:"settled"` // all of it has been published
	Workers []Held `json:"workers"`
}

func (f *Fleet) digests(w http.ResponseWriter, _ *http.Request) {
	out := Truth{Settled: f.Settled()}
	for _, w := range f.Workers {
		out.Workers = append(out.Workers, Held{w.Instance, w.Rank, w.Engine.Next(), w.Digests()})
	}
	reply(w, out)
}

// -- helpers ------------------------------------------------------------------

// fromPath takes the worker from the path, if that names one.
func fromPath(w http.ResponseWriter, r *http.Request, instance *string, rank *uint32) bool {
	if r.PathValue("instance") == "" {
		return true
	}
	n, err := strconv.ParseUint(r.PathValue("rank"), 10, 32)
	if err != nil {
		refuse(w, http.StatusBadRequest, fmt.Errorf("rank is %q, want a number", r.PathValue("rank")))
		return false
	}
	*instance, *rank = r.PathValue("instance"), uint32(n)
	return true
}

func read(w http.ResponseWriter, r *http.Request, into any) bool {
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err == nil {
		return true
	}
	status := http.StatusBadRequest
	if too := (*http.MaxBytesError)(nil); errors.As(err, &too) {
		status = http.StatusRequestEntityTooLarge
	}
	refuse(w, status, err)
	return false
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(v)
}

// fail replies with an error of the fleet.
func fail(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	switch {
	case errors.Is(err, ErrUnknownWorker):
		status = http.StatusNotFound
	case errors.Is(err, ErrFault), errors.Is(err, cache.ErrTooLong):
		status = http.StatusBadRequest
	case errors.Is(err, cache.ErrBusy):
		status = http.StatusConflict
	case errors.Is(err, ErrRestarted):
		status = http.StatusServiceUnavailable
	}
	refuse(w, status, err)
}

func refuse(w http.ResponseWriter, status int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(map[string]string{"error": err.Error()})
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
