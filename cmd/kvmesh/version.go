package main

import (
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// build is what the binary says of how it was made.
type build struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"` // of the source
	Time     string `json:"time,omitempty"`     // of the revision
	Modified bool   `json:"modified"`           // the source was not as in the revision
	Go       string `json:"go"`
	Platform string `json:"platform"`
	NATS     string `json:"nats_server"` // the one that is embedded
	Record   int    `json:"record_version"`
}

// buildOf reads what the Go toolchain has put into a binary.
func buildOf(info *debug.BuildInfo) build {
	b := build{Version: info.Main.Version, Go: info.GoVersion, Record: event.Version}
	for _, s := range info.Settings {
		switch s.Key {
		case "GOOS", "GOARCH":
			if b.Platform != "" {
				b.Platform = s.Value + "/" + b.Platform
			} else {
				b.Platform = s.Value
			}
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.time":
			b.Time = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	for _, dep := range info.Deps {
		if dep.Path == "github.com/nats-io/nats-server/v2" {
			b.NATS = dep.Version
		}
	}
	return b
}

func versionCommand() *cobra.Command {
	var of string
	var asJSON, sbom bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, and what the binary was built from",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			info, ok := debug.ReadBuildInfo()
			if of != "" {
				var err error
				if info, err = buildinfo.ReadFile(of); err != nil {
					return err
				}
			} else if !ok {
				return errors.New("the binary does not say what it was built from")
			}
			b, out := buildOf(info), cmd.OutOrStdout()
			switch {
			case sbom:
				return writeJSON(out, billOf(info, b))
			case asJSON:
				return writeJSON(out, b)
			}
			dirty := ""
			if b.Modified {
				dirty = ", modified"
			}
			fmt.Fprintf(out, "kvmesh %s\n", b.Version)
			if b.Revision != "" {
				fmt.Fprintf(out, "source   %s of %s%s\n", b.Revision, b.Time, dirty)
			}
			_, err := fmt.Fprintf(out, "go       %s, %s\nnats     %s, embedded\nrecords  version %d\n", b.Go, b.Platform, b.NATS, b.Record)
			return err
		},
	}
	cmd.Flags().StringVar(&of, "of", "", "binary to tell of; empty: this one")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&sbom, "sbom", false, "print what it is made of, as a CycloneDX 1.5 bill of materials")
	return cmd
}

func writeJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// bill is a bill of materials in the form of CycloneDX 1.5.
type bill struct {
	Format       string       `json:"bomFormat"`
	Spec         string       `json:"specVersion"`
	Version      int          `json:"version"`
	Metadata     billMetadata `json:"metadata"`
	Components   []part       `json:"components"`
	Dependencies []depends    `json:"dependencies"`
}

type billMetadata struct {
	Timestamp string `json:"timestamp,omitempty"`
	Component part   `json:"component"`
}

type part struct {
	Type     string `json:"type"`
	Ref      string `json:"bom-ref"`
	Name     string `json:"name"`
	Version  string `json:"version"`
	PURL     string `json:"purl"`
	Licenses []any  `json:"licenses,omitempty"`
}

type depends struct {
	Ref       string   `json:"ref"`
	DependsOn []string `json:"dependsOn"`
}

// billOf lists the modules that are linked into the binary, and the Go standard
// library.
func billOf(info *debug.BuildInfo, b build) bill {
	apache := []any{map[string]any{"license": map[string]string{"id": "Apache-2.0"}}}
	main := modulePart("application", "github.com/kvmesh/kvmesh", b.Version)
	main.Licenses = apache
	out := bill{Format: "CycloneDX", Spec: "1.5", Version: 1, Metadata: billMetadata{Timestamp: b.Time, Component: main}}
	add := func(p part) { out.Components = append(out.Components, p) }
	add(modulePart("library", "std", strings.TrimPrefix(b.Go, "go")))
	for _, d := range info.Deps {
		if d.Replace != nil {
			d = d.Replace
		}
		add(modulePart("library", d.Path, d.Version))
	}
	all := depends{Ref: main.Ref, DependsOn: []string{}}
	for _, c := range out.Components {
		all.DependsOn = append(all.DependsOn, c.Ref)
	}
	out.Dependencies = []depends{all}
	return out
}

func modulePart(kind, path, version string) part {
	purl := "pkg:golang/" + path + "@" + version
	return part{Type: kind, Ref: purl, Name: path, Version: version, PURL: purl}
}
