package bridge

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestWindowAgainstASlice compares a window with a sorted slice.
func TestWindowAgainstASlice(t *testing.T) {
	type held struct{ seq, conn uint64 }
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var w window
		var want []held
		for range 200 {
			switch x := rng.IntN(10); {
			case x < 6:
				h := held{uint64(rng.IntN(40)), uint64(rng.IntN(4))}
				w.Add(h.seq, h.conn, make([]byte, h.seq))
				if !slices.ContainsFunc(want, func(o held) bool { return o.seq == h.seq }) {
					want = append(want, h)
				}
			case x < 9 && len(want) > 0:
				got := w.Pop()
				slices.SortFunc(want, func(a, b held) int { return int(a.seq) - int(b.seq) })
				if got.seq != want[0].seq || got.conn != want[0].conn || len(got.payload) != int(got.seq) {
					t.Fatalf("seed %d: got batch %d of connection %d, want %v", seed, got.seq, got.conn, want[0])
				}
				want = want[1:]
			case x == 9:
				conn := uint64(rng.IntN(5))
				w.DropBefore(conn)
				want = slices.DeleteFunc(want, func(h held) bool { return h.conn < conn })
			}
			bytes := 0
			for _, h := range want {
				bytes += int(h.seq)
			}
			if w.Len() != len(want) || w.bytes != bytes {
				t.Fatalf("seed %d: %d batches of %d bytes, want %d of %d", seed, w.Len(), w.bytes, len(want), bytes)
			}
		}
	}
}

func TestConfigurationsThatMakeNoSense(t *testing.T) {
	if err := func() error { c := Default("x"); return c.Validate() }(); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Config){
		"ID":              func(c *Config) { c.ID = "" },
		"Log":             func(c *Config) { c.Log.Shards = 0 },
		"OnGap":           func(c *Config) { c.OnGap = "panic" },
		"Media":           func(c *Config) { c.Media = nil },
		"MaxHeld":         func(c *Config) { c.MaxHeld = 1 },
		"MaxBacklog":      func(c *Config) { c.MaxBacklog = c.MaxMessage - 1 },
		"MaxMessage":      func(c *Config) { c.MaxMessage = 1000 },
		"Replicas":        func(c *Config) { c.Replicas = 0 },
		"Repairs":         func(c *Config) { c.Repairs = 0 },
		"RepairTimeout":   func(c *Config) { c.RepairTimeout = 0 },
		"RepairInterval":  func(c *Config) { c.RepairInterval = -time.Second },
		"RepairAttempts":  func(c *Config) { c.RepairAttempts = 0 },
		"RepairCooldown":  func(c *Config) { c.RepairCooldown = 0 },
		"ProbeInterval":   func(c *Config) { c.ProbeInterval = 0 },
		"PublishTimeout":  func(c *Config) { c.PublishTimeout = 0 },
		"StopTimeout":     func(c *Config) { c.StopTimeout = 0 },
		"CheckpointBytes": func(c *Config) { c.CheckpointBytes = 0 },
		"Known":           func(c *Config) { c.Residency.Known = 0 },
		"Parked":          func(c *Config) { c.Residency.Parked = 0 },
		"MaxFrames":       func(c *Config) { c.ZMTP.MaxFrames = 0 },
	} {
		c := Default("x")
		change(&c)
		if err := c.Validate(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
