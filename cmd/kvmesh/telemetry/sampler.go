package telemetry

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"
)

// checkSampler tells what is wrong with the sampler that the SDK reads.
func checkSampler(name, arg string) error {
	switch name = strings.ToLower(name); name {
	case "", "always_on", "always_off", "parentbased_always_on", "parentbased_always_off":
		return nil
	case "traceidratio", "parentbased_traceidratio":
		if arg == "" {
			return nil
		}
		if part, err := strconv.ParseFloat(arg, 64); err != nil || !(part >= 0 && part <= 1) {
			return fmt.Errorf("OTEL_TRACES_SAMPLER_ARG is %q: want a number from 0 to 1", arg)
		}
		return nil
	}
	return fmt.Errorf("OTEL_TRACES_SAMPLER is %q: want always_on, always_off, traceidratio, or one of these after parentbased_", name)
}

// isURL tells whether text is a URL with a host that OTLP can be sent to.
func isURL(text string) bool {
	u, err := url.Parse(text)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != ""
}
