package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// version returns the version that the binary was built as.
func version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "(unknown)"
}

// envName returns the environment variable of a flag.
func envName(flag string) string {
	return "KVMESH_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// settle gives every flag that was not given on the command line its value from
// the environment or the configuration file.
func settle(cmd *cobra.Command) error {
	fromFile := map[string][]string{}
	if f := cmd.Flags().Lookup("config"); f != nil {
		path := f.Value.String()
		if v, ok := os.LookupEnv(envName("config")); ok && !f.Changed {
			path = v
		}
		if path != "" {
			var err error
			if fromFile, err = readConfig(path, cmd.Flags()); err != nil {
				return err
			}
		}
	}
	var errs []error
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "config" || f.Name == "help" {
			return
		}
		values, where := fromFile[f.Name], "the configuration file"
		if v, ok := os.LookupEnv(envName(f.Name)); ok {
			values, where = []string{v}, envName(f.Name)
			if f.Value.Type() == "stringArray" {
				values = strings.Fields(v)
			}
		}
		for _, v := range values {
			if err := cmd.Flags().Set(f.Name, v); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", where, err))
			}
		}
	})
	return errors.Join(errs...)
}

// readConfig reads a configuration file: a YAML mapping of flag names to values,
// or to lists of values for flags that may be given several times.
func readConfig(path string, flags *pflag.FlagSet) (map[string][]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	out := map[string][]string{}
	if len(doc.Content) == 0 {
		return out, nil
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("configuration %s, line %d: want lines like data-dir: ./data", path, top.Line)
	}
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		if flags.Lookup(key.Value) == nil {
			return nil, fmt.Errorf("configuration %s, line %d: there is no setting %q here", path, key.Line, key.Value)
		}
		switch value.Kind {
		case yaml.ScalarNode:
			out[key.Value] = []string{value.Value}
		case yaml.SequenceNode:
			for _, item := range value.Content {
				if item.Kind != yaml.ScalarNode {
					return nil, fmt.Errorf("configuration %s, line %d: want a value", path, item.Line)
				}
				out[key.Value] = append(out[key.Value], item.Value)
			}
		default:
			return nil, fmt.Errorf("configuration %s, line %d: want a value or a list of values", path, value.Line)
		}
	}
	return out, nil
}

// logFlags are how to log.
type logFlags struct{ format, level string }

func (l *logFlags) add(flags *pflag.FlagSet) {
	flags.StringVar(&l.format, "log-format", "text", "how to log: text or json")
	flags.StringVar(&l.level, "log-level", "info", "what to log: debug, info, warn or error")
}

func (l *logFlags) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err != nil {
		return nil, fmt.Errorf("--log-level is %q: want debug, info, warn or error", l.level)
	}
	options := &slog.HandlerOptions{Level: level}
	switch l.format {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, fmt.Errorf("--log-format is %q: want text or json", l.format)
}
