// Package event is the contract between those who write the log and those who
// read it.
package event

import "strings"

// Tier is where a worker holds a block, from the fastest place to the slowest.
// The numbers are part of the record format and never change.
type Tier uint8

// The tiers.
const (
	Device   Tier = 0 // memory of the accelerator
	Host     Tier = 1 // memory of the worker's machine
	Disk     Tier = 2 // storage of the worker's machine
	External Tier = 3 // storage outside of the machine
)

// Tiers is the number of tiers: a Tier below it is valid.
const Tiers = 4

var tierNames = [Tiers]string{"device", "host", "disk", "external"}

// String returns the name of the tier in lower case, "unknown" for a number
// that is no tier.
func (t Tier) String() string {
	if t < Tiers {
		return tierNames[t]
	}
	return "unknown"
}

// ParseTier returns the tier of a name as String returns it, in any case. It
// is meant for configuration.
func ParseTier(name string) (t Tier, ok bool) {
	for i, n := range tierNames {
		if strings.EqualFold(n, name) {
			return Tier(i), true
		}
	}
	return 0, false
}
