package event

import "strings"

// Tier is where a block is held.
type Tier uint8

// The tiers, from the fastest on. A query continues them in this order.
const (
	Device Tier = iota
	Host
	Disk
	External

	// Tiers is how many tiers there are.
	Tiers = 4
)

var tierNames = [Tiers]string{"device", "host", "disk", "external"}

// String returns the tier's name in JSON and in metrics.
func (t Tier) String() string {
	if t < Tiers {
		return tierNames[t]
	}
	return "unknown"
}

// ParseTier returns the tier with the given name, in any case.
func ParseTier(name string) (Tier, bool) {
	for i, n := range tierNames {
		if strings.EqualFold(n, name) {
			return Tier(i), true
		}
	}
	return 0, false
}

// TierMask is a set of tiers: bit 1<<t stands for tier t.
type TierMask uint8

// AllTiers holds every tier.
const AllTiers TierMask = 1<<Tiers - 1

// Has tells whether the set holds t.
func (m TierMask) Has(t Tier) bool { return m>>t&1 == 1 }

// Mask returns the set that holds t alone.
func (t Tier) Mask() TierMask { return 1 << t }
