package bridge

import (
	"testing"
	"time"
)

// TestTurns asks for turns at given times: none is before it is asked for, and no
// two are nearer to each other than the gap.
func TestTurns(t *testing.T) {
	var all turns
	now := time.Unix(1000, 0)
	for i, c := range []struct{ at, want time.Duration }{
		{0, 0}, {0, turnGap}, {turnGap / 2, 2 * turnGap}, {turnGap / 2, 3 * turnGap}, {time.Second, time.Second}, {time.Second + turnGap/4, time.Second + turnGap},
	} {
		if got := all.next(now.Add(c.at)).Sub(now); got != c.want {
			t.Errorf("turn %d: %v, want %v", i, got, c.want)
		}
	}
}
