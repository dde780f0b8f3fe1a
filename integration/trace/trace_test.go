package trace

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"
)

const sample = `{"timestamp": 0, "input_length": 1024, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 2.5, "input_length": 1100, "output_length": 0, "hash_ids": [0, 1, 2], "more": true}

{"hash_ids": [], "output_length": 3, "input_length": 0, "timestamp": 3536999}`

func TestRead(t *testing.T) {
	got, err := Read(strings.NewReader(sample))
	if err != nil {
		t.Fatal(err)
	}
	want := []Request{
		{At: 0, InputLength: 1024, OutputLength: 500, HashIDs: []uint64{0, 1}},
		{At: 2500 * time.Microsecond, InputLength: 1100, HashIDs: []uint64{0, 1, 2}},
		{At: 3536999 * time.Millisecond, OutputLength: 3},
	}
	equal := func(a, b Request) bool {
		return a.At == b.At && a.InputLength == b.InputLength && a.OutputLength == b.OutputLength && slices.Equal(a.HashIDs, b.HashIDs)
	}
	if !slices.EqualFunc(got, want, equal) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if n := IDs(got); n != 3 {
		t.Errorf("ids below %d, want 3", n)
	}
}

func TestReadBadLines(t *testing.T) {
	good := `{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [7]}` + "\n"
	for name, line := range map[string]string{
		"no JSON":        `{"timestamp": `,
		"no object":      `[1]`,
		"no timestamp":   `{"input_length": 1, "output_length": 1, "hash_ids": [7]}`,
		"before start":   `{"timestamp": -1, "input_length": 1, "output_length": 1, "hash_ids": [7]}`,
		"too late":       `{"timestamp": 1e300, "input_length": 1, "output_length": 1, "hash_ids": [7]}`,
		"negative input": `{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}`,
		"huge input":     `{"timestamp": 0, "input_length": 9007199254740991, "output_length": 1, "hash_ids": [7]}`,
		"missing ids":    `{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [7]}`,
		"surplus ids":    `{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [7, 8]}`,
		"negative id":    `{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [-7]}`,
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Read(strings.NewReader(good + line))
			if !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "line 2") {
				t.Errorf("error is %v, want ErrFormat and the line", err)
			}
			if len(got) != 1 {
				t.Errorf("%d requests before the error, want 1", len(got))
			}
		})
	}
	if _, err := Read(iotest.ErrReader(io.ErrUnexpectedEOF)); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("error is %v, want the reader's", err)
	}
	if _, err := Read(strings.NewReader(strings.Repeat("[", maxLine+1))); err == nil {
		t.Error("a line over the limit is no error")
	}
}

func TestAllStops(t *testing.T) {
	n := 0
	for range All(strings.NewReader(sample)) {
		n++
		break
	}
	if n != 1 {
		t.Errorf("%d requests, want 1", n)
	}
}

func TestPrompts(t *testing.T) {
	requests, err := Read(strings.NewReader(sample))
	if err != nil {
		t.Fatal(err)
	}
	a, b := requests[0], requests[1]
	la, lb := a.AppendLocals(nil, 16), b.AppendLocals(nil, 16)
	if len(la) != 64 || len(lb) != 96 {
		t.Fatalf("%d and %d blocks, want 32 for each id", len(la), len(lb))
	}
	if !slices.Equal(la, lb[:64]) {
		t.Error("equal ids have other blocks")
	}
	seen := map[uint64]bool{}
	for _, l := range lb {
		if seen[l] {
			t.Fatal("two blocks of different ids or places are equal")
		}
		seen[l] = true
	}
	ta, tb := a.AppendTokens(nil, 1000), b.AppendTokens(nil, 1000)
	if len(ta) != 1024 || len(tb) != 1100 || !slices.Equal(ta, tb[:1024]) {
		t.Errorf("prompts of %d and %d tokens, want 1024 and 1100 that begin alike", len(ta), len(tb))
	}
	if slices.Max(tb) >= 1000 {
		t.Error("a token is not in the vocabulary")
	}
	c := a.Shifted(IDs(requests))
	for _, l := range c.AppendLocals(nil, 16) {
		if seen[l] {
			t.Fatal("a disjoint copy shares a block")
		}
	}
	if a.HashIDs[0] != 0 {
		t.Error("the original was changed")
	}
}
