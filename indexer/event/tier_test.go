package event

import (
	"strings"
	"testing"
)

func TestTierNames(t *testing.T) {
	for number, name := range []string{"device", "host", "disk", "external"} {
		tier := Tier(number)
		if tier.String() != name {
			t.Errorf("tier %d is called %q, want %q", number, tier, name)
		}
		for _, spelling := range []string{name, strings.ToUpper(name), strings.ToUpper(name[:1]) + name[1:]} {
			if got, ok := ParseTier(spelling); !ok || got != tier {
				t.Errorf("ParseTier(%q) = %v, %v", spelling, got, ok)
			}
		}
	}
	if Tier(Tiers).String() != "unknown" || Tier(255).String() != "unknown" {
		t.Error("a number that is no tier has a name")
	}
	for _, bad := range []string{"", "gpu", "unknown", "device "} {
		if tier, ok := ParseTier(bad); ok {
			t.Errorf("ParseTier(%q) = %v", bad, tier)
		}
	}
}
