package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// docsCommand writes what packages have beside the binary. All of it is made from
// the tables of commands and flags.
func docsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "docs DIRECTORY",
		Short: "Write the man page and the shell completions into a directory",
		Long: `Writes man/kvmesh.1, completions/kvmesh.bash, completions/_kvmesh (zsh) and
completions/kvmesh.fish. For one shell only, see kvmesh completion --help.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error { return writeDocs(cmd.Root(), args[0]) },
	}
	return cmd
}

func writeDocs(root *cobra.Command, dir string) error {
	for name, write := range map[string]func(io.Writer) error{
		"man/kvmesh.1":            func(w io.Writer) error { return writeManual(w, root) },
		"completions/kvmesh.bash": func(w io.Writer) error { return root.GenBashCompletionV2(w, true) },
		"completions/_kvmesh":     root.GenZshCompletion,
		"completions/kvmesh.fish": func(w io.Writer) error { return root.GenFishCompletion(w, true) },
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		f, err := os.Create(path)
		if err != nil {
			return err
		}
		err = write(f)
		if e := f.Close(); err == nil {
			err = e
		}
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return nil
}

// writeManual writes the manual of all commands as one man page.
func writeManual(w io.Writer, root *cobra.Command) error {
	m := &manual{}
	name := root.Name()
	m.line(".TH %s 1 \"\" \"%s %s\" \"User Commands\"", strings.ToUpper(name), name, roff(root.Version))
	m.line(".SH NAME\n%s \\- %s", name, roff(strings.TrimSuffix(root.Short, ".")))
	m.line(".SH SYNOPSIS\n.B %s\n.I command\n[\\fIflags\\fR]", name)
	m.line(".SH DESCRIPTION")
	m.text(root.Long)
	m.line(".SH COMMANDS")
	m.commands(root)
	m.line(".SH ENVIRONMENT\n.TP\n.B KVMESH_*\nEvery flag: \\fB\\-\\-data\\-dir\\fR is \\fBKVMESH_DATA_DIR\\fR. Lists are separated by spaces.")
	m.line(".SH EXIT STATUS\n0 if all went well, 1 if not; the reason is on standard error.")
	_, err := io.WriteString(w, m.b.String())
	return err
}

// manual is a man page that is being written.
type manual struct{ b strings.Builder }

func (m *manual) line(format string, args ...any) { fmt.Fprintf(&m.b, format+"\n", args...) }

// roff escapes text.
func roff(text string) string {
	return strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "…", "...", "→", "->").Replace(text)
}

// text writes paragraphs.
func (m *manual) text(text string) {
	for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
		if line == "" {
			m.line(".PP")
			continue
		}
		line = roff(line)
		if strings.HasPrefix(line, ".") {
			line = `\&` + line
		}
		m.line("%s", line)
	}
}

// commands writes all commands below one, but for those that are hidden and
// help.
func (m *manual) commands(parent *cobra.Command) {
	for _, c := range parent.Commands() {
		if c.Hidden || c.Name() == "help" {
			continue
		}
		if c.Runnable() {
			m.line(".SS %s", roff(c.UseLine()))
			m.text(c.Short + ".")
			if c.Long != "" {
				m.line(".PP")
				m.text(c.Long)
			}
			if c.Example != "" {
				m.line(".PP\n.nf")
				m.text(c.Example)
				m.line(".fi")
			}
			c.NonInheritedFlags().VisitAll(func(f *pflag.Flag) { m.flag(f) })
		}
		m.commands(c)
	}
}

func (m *manual) flag(f *pflag.Flag) {
	if f.Hidden || f.Name == "help" {
		return
	}
	kind, usage := pflag.UnquoteUsage(f)
	name := `\fB\-\-` + roff(f.Name) + `\fR`
	if kind != "" {
		name += ` \fI` + roff(kind) + `\fR`
	}
	m.line(".TP\n%s", name)
	m.text(usage)
	if f.DefValue != "" && f.DefValue != "[]" && f.DefValue != "false" {
		m.text("(" + f.DefValue + ")")
	}
}

// completeValues has the shells propose the values of flags that take few.
func completeValues(cmd *cobra.Command) {
	values := map[string][]string{
		"log-format": {"text", "json"},
		"log-level":  {"debug", "info", "warn", "error"},
		"on-gap":     {"keep", "reset"},
		"engine":     {"vllm", "sglang", "trtllm", "dynamo", "mooncake"},
		"dialect":    strings.Split(dialects(), ", "),
	}
	for name, list := range values {
		if cmd.Flags().Lookup(name) != nil {
			cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(list, cobra.ShellCompDirectiveNoFileComp)) // fails for unknown flags only
		}
	}
	for _, c := range cmd.Commands() {
		completeValues(c)
	}
}
