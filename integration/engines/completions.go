package engines

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/workload"
)

// WorkerHeader names the worker of a completion: instance:rank, or instance alone
// for rank 0.
const WorkerHeader = "X-Worker"

// completion is the body of POST /v1/completions, as far as it is read.
type completion struct {
	Model     string          `json:"model"`
	Prompt    json.RawMessage `json:"prompt"` // a text or token ids
	MaxTokens *int            `json:"max_tokens"`
	Seed      uint64          `json:"seed"`
	Salt      string          `json:"cache_salt"`
}

type completed struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"`
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   usage    `json:"usage"`
}

type choice struct {
	Index  int    `json:"index"`
	Text   string `json:"text"`
	Finish string `json:"finish_reason"`
}

type usage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
	Details    struct {
		Cached int `json:"cached_tokens"`
	} `json:"prompt_tokens_details"`
}

// completions runs a completion. A text has a token for each of its bytes, and
// the answer is made of words that mean nothing.
func (f *Fleet) completions(w http.ResponseWriter, r *http.Request) {
	var in completion
	if !read(w, r, &in) {
		return
	}
	instance, rank := "", uint32(0)
	if !fromPath(w, r, &instance, &rank) {
		return
	}
	if instance == "" {
		name, number, ok := strings.Cut(r.Header.Get(WorkerHeader), ":")
		n, err := strconv.ParseUint(number, 10, 32)
		if name == "" || ok && err != nil {
			refuse(w, http.StatusBadRequest, fmt.Errorf("header %s is %q, want instance:rank", WorkerHeader, r.Header.Get(WorkerHeader)))
			return
		}
		instance, rank = name, uint32(n)
	}
	worker, err := f.Worker(instance, rank)
	if err != nil {
		fail(w, err)
		return
	}
	tokens, err := tokenize(in.Prompt)
	n := 16 // OpenAI's default
	if in.MaxTokens != nil {
		n = *in.MaxTokens
	}
	if err == nil && (n < 0 || n > maxTokens) {
		err = fmt.Errorf("max_tokens is %d, want 0 to %d", n, maxTokens)
	}
	if err != nil {
		refuse(w, http.StatusBadRequest, err)
		return
	}
	answer := workload.Segment{Seed: in.Seed, Tokens: n}.Append(nil)
	res, err := worker.Generate(r.Context(), Job{Prompt: cache.Prompt{Tokens: tokens, Salt: in.Salt}, Output: answer})
	if err != nil {
		fail(w, err)
		return
	}
	out := completed{
		ID: fmt.Sprintf("cmpl-%s-%d-%d", worker.Instance, worker.Rank, worker.Totals().Requests), Object: "text_completion",
		Created: time.Now().Unix(), Model: in.Model,
		Choices: []choice{{Text: strings.Repeat(" token", res.Output), Finish: "length"}},
		Usage:   usage{Prompt: res.Prompt, Completion: res.Output, Total: res.Prompt + res.Output},
	}
	out.Usage.Details.Cached = res.CachedDevice + res.CachedHost
	reply(w, out)
}

func tokenize(prompt json.RawMessage) ([]uint32, error) {
	var text string
	if json.Unmarshal(prompt, &text) == nil && text != "" {
		out := make([]uint32, len(text))
		for i := range len(text) {
			out[i] = uint32(text[i])
		}
		return out, nil
	}
	var tokens []uint32
	if json.Unmarshal(prompt, &tokens) == nil && len(tokens) > 0 {
		return tokens, nil
	}
	return nil, errors.New("prompt is neither a text nor a list of token ids")
}
