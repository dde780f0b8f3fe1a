package api

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"math/rand/v2"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// randomCall returns the body of a call with members of every type, some of them
// of the wrong one.
func randomCall(rng *rand.Rand, content string, outer bool) map[string]any {
	name := func() any { return []any{"", "a", "é\"\\\n", strings.Repeat("n", 40), nil, 7, []int{1}}[rng.IntN(7)] }
	number := func() any {
		return []any{0, 1, 127, 128, 65536, uint64(1) << 63, ^uint64(0), -1, nil, "1", true}[rng.IntN(11)]
	}
	numbers := func() any {
		if rng.IntN(4) == 0 {
			return number()
		}
		out := make([]any, rng.IntN(4))
		for i := range out {
			if out[i] = uint64(rng.IntN(1000)); rng.IntN(20) == 0 {
				out[i] = number()
			}
		}
		return out
	}
	values := func() any {
		if rng.IntN(12) == 0 {
			return []any{nil, 1, "x", map[string]any{}, true}[rng.IntN(5)]
		}
		out := make([]any, rng.IntN(40))
		for i := range out {
			switch {
			case content == tokenIDs:
				out[i] = rng.Uint32() >> rng.IntN(32)
			case rng.IntN(2) == 0:
				out[i] = rng.Uint64() >> rng.IntN(64)
			case rng.IntN(2) == 0:
				out[i] = strconv.FormatUint(rng.Uint64(), 10)
			default:
				out[i] = -int64(rng.Uint64() >> 1 >> rng.IntN(63))
			}
			if rng.IntN(200) == 0 {
				out[i] = []any{nil, -1, uint64(1) << 32, []any{}, map[string]any{"a": 1}, "x", false}[rng.IntN(7)]
			}
		}
		return out
	}
	out := map[string]any{}
	for key, v := range map[string]func() any{
		"model_name": name, "model": name, "routing_group": name, "lora_name": name, "cache_salt": name, "min_log_seq": number, "min_log_seqs": numbers, "top": number,
		"token_ids": values, "block_hashes": values, "unknown": values,
	} {
		if rng.IntN(3) == 0 {
			out[key] = v()
		}
	}
	if outer && rng.IntN(2) == 0 {
		queries := make([]any, rng.IntN(4))
		for i := range queries {
			queries[i] = randomCall(rng, content, false)
			if rng.IntN(20) == 0 {
				queries[i] = 5
			}
		}
		out["queries"] = queries
	}
	return out
}

// same tells whether two prompts ask the same. Of errors only that there is one
// counts.
func same(a, b *prompt) bool {
	return string(a.model) == string(b.model) && string(a.group) == string(b.group) && (a.group == nil) == (b.group == nil) &&
		string(a.lora) == string(b.lora) && string(a.salt) == string(b.salt) && a.given == b.given &&
		slices.Equal(a.tokens, b.tokens) && slices.Equal(a.hashes, b.hashes) && a.min.Equal(b.min) && a.top == b.top
}

// TestPackedReadsWhatJSONReads reads the same calls in both forms. JSON is held to
// its oracle in the scanner's tests.
func TestPackedReadsWhatJSONReads(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	a, b := newWork(), newWork()
	right, wrong := 0, 0
	for range 5000 {
		content := []string{tokenIDs, blockHashes}[rng.IntN(2)]
		call := randomCall(rng, content, true)
		a.reset()
		b.reset()
		a.content, b.content = content, content
		var err error
		if a.body, err = json.Marshal(call); err != nil {
			t.Fatal(err)
		}
		if b.body, err = msgpack.Marshal(call); err != nil {
			t.Fatal(err)
		}
		if err := a.readCall(mediaJSON, ""); err != nil {
			t.Fatalf("%s: %v", a.body, err)
		}
		if err := b.readCall(mediaPacked, ""); err != nil {
			t.Fatalf("%x: %v", b.body, err)
		}
		pairs := [][2]*prompt{{&a.outer, &b.outer}}
		if a.batch != b.batch || len(a.prompts) != len(b.prompts) {
			t.Fatalf("%s: %d prompts, in MessagePack %d", a.body, len(a.prompts), len(b.prompts))
		}
		for i := range a.prompts {
			pairs = append(pairs, [2]*prompt{&a.prompts[i], &b.prompts[i]})
		}
		for _, p := range pairs {
			if (p[0].err == nil) != (p[1].err == nil) || p[0].err == nil && !same(p[0], p[1]) {
				t.Fatalf("%s: %+v, in MessagePack %+v", a.body, p[0], p[1])
			}
			if p[0].err == nil {
				right++
			} else {
				wrong++
			}
		}
	}
	if right < 1000 || wrong < 1000 {
		t.Errorf("%d right, %d wrong: the test is one-sided", right, wrong)
	}
}

// TestPackedTakesAnything cuts and changes bodies: whatever comes is read or
// refused, and takes no more memory than it brings.
func TestPackedTakesAnything(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 8))
	try := func(body []byte) {
		w := &work{content: []string{tokenIDs, blockHashes}[rng.IntN(2)], body: body}
		if w.readCall(mediaPacked, "") == nil && len(body) == 0 {
			t.Fatal("an empty body was read")
		}
		if cap(w.tokens) > 64+4*len(body) || cap(w.hashes) > 64+4*len(body) || cap(w.prompts) > 64+4*len(body) {
			t.Fatalf("%x: room for %d tokens, %d hashes, %d prompts", body, cap(w.tokens), cap(w.hashes), cap(w.prompts))
		}
	}
	for range 2000 {
		body, err := msgpack.Marshal(randomCall(rng, tokenIDs, true))
		if err != nil {
			t.Fatal(err)
		}
		try(body[:rng.IntN(len(body))])
		for range 3 {
			body[rng.IntN(len(body))] = byte(rng.Uint32())
			try(body)
		}
	}
	for _, body := range []string{
		"\x81\xa9token_ids\xdd\x7f\xff\xff\xff", "\x81\xa9token_ids\xdd\xff\xff\xff\xff\x01", "\x81\xacblock_hashes\xdd\x00\x10\x00\x00\x01", "\x81\xa7queries\xdd\x00\x10\x00\x00\x80", "\xdf\xff\xff\xff\xff",
		"\x81\xa9token_ids\xc6\xff\xff\xff\xff", "\x81\xa9token_ids\xc1", "\x81\xc1", "\x81\xa1x" + strings.Repeat("\x91", 1000),
	} {
		try([]byte(body))
	}
}

// TestParams compares with net/url.
func TestParams(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	queries := []string{"", "&", "&&model_name=m", "model_name", "model_name=", "model_name=a=b", "model_name=a&model_name=b", "=x", "model_name=a%", "model_name=%4", "model_name=%zz", "%6dodel_name=x", "model_name=a+b%2B%c3%A9&top=5", "lora_name=%00%ff&cache_salt=s&routing_group=g&unknown=x", "top=1&top=2", "top=%31"}
	for range 20_000 {
		b := []byte(queries[rng.IntN(16)])
		for range rng.IntN(3) {
			if at := rng.IntN(len(b) + 1); rng.IntN(2) == 0 {
				b = slices.Insert(b, at, "%+=&a4;1"[rng.IntN(8)])
			} else if at < len(b) {
				b = slices.Delete(b, at, at+1)
			}
		}
		queries = append(queries, string(b))
	}
	for _, query := range queries {
		if strings.Contains(query, ";") {
			continue // which net/url refuses for the sake of other servers
		}
		w := &work{content: tokenIDs}
		err := w.readCall(mediaBinary, query)
		want, wantErr := url.ParseQuery(query)
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%q: %v, net/url: %v", query, err, wantErr)
		}
		if err != nil {
			continue
		}
		last := func(name string) string { return slices.Concat([]string{""}, want[name])[len(want[name])] }
		top, topErr := strconv.ParseUint(last("top"), 10, 64)
		model := last("model_name")
		if model == "" {
			model = last("model")
		}
		p := &w.outer
		if p.err == nil && (string(p.model) != model || string(p.group) != last("routing_group") || string(p.lora) != last("lora_name") || string(p.salt) != last("cache_salt") || p.top != top) {
			t.Fatalf("%q: %+v, net/url: %v", query, p, want)
		}
		if len(want["top"]) == 1 && (p.err == nil) != (topErr == nil) && !want.Has("token_ids") && !want.Has("queries") && !want.Has("min_log_seq") {
			t.Fatalf("%q: %v", query, p.err)
		}
	}
}

// -- replies ------------------------------------------------------------------

// scores is the reply to a query as encoding/json would write it.
type scores struct {
	Scores      map[string]map[string]uint64 `json:"scores"`
	Frequencies []int                        `json:"frequencies"`
	Instances   map[string]*instanceScore    `json:"instances"`
	LogSeq      uint64                       `json:"log_seq"`
}

type instanceScore struct {
	LongestMatched uint64            `json:"longest_matched"`
	GPU            uint64            `json:"gpu"`
	DP             map[string]uint64 `json:"dp"`
	CPU            uint64            `json:"cpu"`
	Disk           uint64            `json:"disk"`
}

func scoresOf(a *indexer.Answer) *scores {
	out := &scores{Scores: map[string]map[string]uint64{}, Frequencies: []int{}, Instances: map[string]*instanceScore{}, LogSeq: a.LogSeq}
	for i := range a.Holdings {
		h := &a.Holdings[i]
		tokens := func(t event.Tier) uint64 { return uint64(h.Ends[t]) * uint64(a.BlockSize) }
		in := out.Instances[h.Instance]
		if in == nil {
			in = &instanceScore{DP: map[string]uint64{}}
			out.Instances[h.Instance], out.Scores[h.Instance] = in, in.DP
		}
		if gpu := tokens(event.Device); gpu > 0 {
			in.DP[strconv.FormatUint(uint64(h.Rank), 10)] = gpu
			in.GPU = max(in.GPU, gpu)
		}
		in.CPU = max(in.CPU, tokens(event.Host))
		in.Disk = max(in.Disk, tokens(event.External))
		in.LongestMatched = in.Disk
	}
	return out
}

// TestReplyIsWhatEncodingJSONWrites compares replies with those of encoding/json:
// byte for byte, once the holdings are in the order in which that writes maps.
func TestReplyIsWhatEncodingJSONWrites(t *testing.T) {
	rng := rand.New(rand.NewPCG(10, 10))
	names := []string{"", "a", "b-1", "0", "<&>", "\"\\", "\x00\x1f\x7f", "é", "\u2028\u2029", "\xff\xc3", "日本", "a\nb"}
	w := newWork()
	for range 500 {
		a := indexer.Answer{Position: event.Position{LogSeq: rng.Uint64() >> rng.IntN(64)}, BlockSize: 1 << rng.IntN(17)}
		seen := map[event.Source]bool{}
		for range rng.IntN(30) {
			s := &event.Source{Instance: names[rng.IntN(len(names))], Rank: rng.Uint32N(30)}
			if seen[*s] {
				continue
			}
			seen[*s] = true
			h := indexer.Holding{Source: s}
			end := uint32(rng.IntN(3))
			for tier := range h.Ends {
				end += uint32(rng.IntN(1<<20)) * uint32(rng.IntN(2))
				h.Ends[tier] = end
			}
			a.Holdings = append(a.Holdings, h)
		}
		want, err := json.Marshal(scoresOf(&a))
		if err != nil {
			t.Fatal(err)
		}
		w.reset()
		w.appendAnswer(&a, 0)
		var mine, theirs any
		if json.Unmarshal(w.reply, &mine) != nil || json.Unmarshal(want, &theirs) != nil || !reflect.DeepEqual(mine, theirs) || len(w.reply) != len(want) {
			t.Fatalf("%s\nwant\n%s", w.reply, want)
		}
		slices.SortFunc(a.Holdings, func(a, b indexer.Holding) int {
			return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(strconv.Itoa(int(a.Rank)), strconv.Itoa(int(b.Rank))))
		})
		w.reset()
		if w.appendAnswer(&a, 0); !bytes.Equal(w.reply, want) {
			t.Fatalf("%s\nwant\n%s", w.reply, want)
		}
	}
}

// TestCutKeepsTheBest compares with sorting everything.
func TestCutKeepsTheBest(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 11))
	w := newWork()
	for range 2000 {
		var holdings []indexer.Holding
		n := 1 + rng.IntN(12)
		for i := range n * 2 {
			h := indexer.Holding{Source: &event.Source{Instance: string(rune('a' + rng.IntN(n))), Rank: uint32(i)}}
			end := uint32(0)
			for tier := range h.Ends {
				end += rng.Uint32N(3)
				h.Ends[tier] = end
			}
			holdings = append(holdings, h)
		}
		type row struct {
			name string
			best [event.Tiers]uint32
		}
		rows := map[string]*row{}
		for _, h := range holdings {
			r := rows[h.Instance]
			if r == nil {
				r = &row{name: h.Instance}
				rows[h.Instance] = r
			}
			for tier, end := range h.Ends {
				r.best[tier] = max(r.best[tier], end)
			}
		}
		want := slices.SortedFunc(maps.Values(rows), func(a, b *row) int {
			return cmp.Or(cmp.Compare(b.best[3], a.best[3]), cmp.Compare(b.best[0], a.best[0]), cmp.Compare(b.best[1], a.best[1]), cmp.Compare(b.best[2], a.best[2]), cmp.Compare(a.name, b.name))
		})
		top := 1 + rng.IntN(len(want))
		w.group(holdings)
		if len(w.spans) != len(want) || len(w.places) != 0 {
			t.Fatalf("%d instances, want %d", len(w.spans), len(want))
		}
		w.cut(holdings, top)
		for i, sp := range w.spans {
			if holdings[sp.first].Instance != want[i].name || sp.best != want[i].best {
				t.Fatalf("place %d of %d: %s %v, want %+v", i, top, holdings[sp.first].Instance, sp.best, want[i])
			}
		}
	}
}

func FuzzString(f *testing.F) {
	for _, s := range []string{"", "a", "<&>\"\\", "\u2028", "\xff", "\x00", "é"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if want, _ := json.Marshal(s); !bytes.Equal(appendString(nil, s), want) {
			t.Fatalf("%q: %s, want %s", s, appendString(nil, s), want)
		}
	})
}

// Log sequences in a URL are separated by commas.
func TestSeqsInURL(t *testing.T) {
	w := newWork()
	for text, want := range map[string][]uint64{"1,2,3": {1, 2, 3}, "18446744073709551615": {1<<64 - 1}, "": nil, ",": nil, "1,": nil, "1,,2": nil, "1,-2": nil, "x": nil, "1 2": nil} {
		w.reset()
		w.content, w.body = tokenIDs, nil
		if err := w.readCall(mediaBinary, "model_name=m&min_log_seqs="+url.QueryEscape(text)); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		bad := want == nil && text != ""
		p := &w.outer
		if (p.err != nil) != bad || !bad && !slices.Equal(p.min.LogSeqs, want) || bad && !strings.Contains(p.err.Error(), "min_log_seqs") {
			t.Errorf("%q: %v, %v", text, p.min, p.err)
		}
	}
}
