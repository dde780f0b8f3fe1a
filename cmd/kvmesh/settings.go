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
	fromFile := map[string][]setting{}
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
		values := fromFile[f.Name]
		if v, ok := os.LookupEnv(envName(f.Name)); ok {
			values = []setting{{v, envName(f.Name)}}
			if f.Value.Type() == "stringArray" {
				values = nil
				for _, v := range strings.Fields(v) {
					values = append(values, setting{v, envName(f.Name)})
				}
			}
		}
		if len(values) > 1 && f.Value.Type() != "stringArray" {
			errs = append(errs, fmt.Errorf("%s: %s takes one value", values[1].origin, f.Name))
			return
		}
		for _, v := range values {
			if err := cmd.Flags().Set(f.Name, v.value); err != nil {
				errs = append(errs, fmt.Errorf("%s: %s", v.origin, reason(f, v.value, err)))
				continue
			}
			noteOrigin(f, v)
		}
	})
	return errors.Join(errs...)
}

// setting is one value of a flag, and where it was given.
type setting struct{ value, origin string }

// originNote is the annotation of a flag that says where its values were given.
const originNote = "kvmesh_origin"

// noteOrigin remembers where a value was given, for errors that are found later.
func noteOrigin(f *pflag.Flag, v setting) {
	if f.Annotations == nil {
		f.Annotations = map[string][]string{}
	}
	f.Annotations[originNote] = append(f.Annotations[originNote], v.origin, v.value)
}

// located puts where a value of a flag was given before an error about it, if that
// was not the command line.
func located(flags *pflag.FlagSet, flag, value string, err error) error {
	f := flags.Lookup(flag)
	if err == nil || f == nil {
		return err
	}
	at := f.Annotations[originNote]
	for i := 0; i+1 < len(at); i += 2 {
		if at[i+1] == value || value == "" {
			return fmt.Errorf("%s: %w", at[i], err)
		}
	}
	return err
}

// reason says what is wrong with a value, without the words that pflag puts
// before.
func reason(f *pflag.Flag, value string, err error) string {
	var invalid *pflag.InvalidValueError
	if errors.As(err, &invalid) {
		err = invalid.Unwrap()
	}
	kind := map[string]string{"int": "a number", "uint32": "a number", "uint64": "a number", "float64": "a number", "bool": "true or false",
		"duration": "a duration such as 30s"}[f.Value.Type()]
	if kind == "" {
		return fmt.Sprintf("%s is %q: %v", f.Name, value, err)
	}
	return fmt.Sprintf("%s is %q: want %s", f.Name, value, kind)
}

// readConfig reads a configuration file: a YAML mapping of flag names to values,
// or to lists of values for flags that may be given several times.
func readConfig(path string, flags *pflag.FlagSet) (map[string][]setting, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("configuration: %w", err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return nil, fmt.Errorf("configuration %s: %w", path, err)
	}
	out := map[string][]setting{}
	first := map[string]int{}
	if len(doc.Content) == 0 {
		return out, nil
	}
	top := doc.Content[0]
	if top.Kind != yaml.MappingNode {
		return nil, fmt.Errorf("configuration %s, line %d: want lines like data-dir: ./data", path, top.Line)
	}
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, value := top.Content[i], top.Content[i+1]
		where := func(n *yaml.Node) string { return fmt.Sprintf("configuration %s, line %d", path, n.Line) }
		if f := flags.Lookup(key.Value); f == nil || key.Value == "help" || key.Value == "config" {
			return nil, fmt.Errorf("%s: there is no setting %q here%s", where(key), key.Value, similar(key.Value, flags))
		}
		if at, ok := first[key.Value]; ok {
			return nil, fmt.Errorf("%s: %s was given in line %d already", where(key), key.Value, at)
		}
		first[key.Value] = key.Line
		switch value.Kind {
		case yaml.ScalarNode:
			out[key.Value] = []setting{{value.Value, where(value)}}
		case yaml.SequenceNode:
			for _, item := range value.Content {
				if item.Kind != yaml.ScalarNode {
					return nil, fmt.Errorf("%s: want a value", where(item))
				}
				out[key.Value] = append(out[key.Value], setting{item.Value, where(item)})
			}
		default:
			return nil, fmt.Errorf("%s: want a value or a list of values", where(value))
		}
	}
	return out, nil
}

// similar proposes the setting that was meant.
func similar(name string, flags *pflag.FlagSet) string {
	best, distance := "", 3
	flags.VisitAll(func(f *pflag.Flag) {
		if d := editDistance(name, f.Name); d < distance {
			best, distance = f.Name, d
		}
	})
	if best == "" {
		return ""
	}
	return fmt.Sprintf("; %q is", best)
}

// editDistance is how many letters have to be put in, taken out or changed.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
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
